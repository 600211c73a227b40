// Pooled lookups and exact updates of rows that are kept in few bits. Twin of ziggurat/ops/row_formats/reference.py and
// noise.py, which define every bit of it; the rule is that of rules.h, sorting and walking are those of lookup.cpp.
//
//     lookup   codes or halves of a row ──► eight floats at a time ──► the sum, in registers
//     update   gradients of a row ──► their sum, in registers; row ──► floats in the L1 cache ──► the rule ──► rounded ──► row
//
// A row is decoded where it is added, so a lookup reads the bytes of the format and writes nothing but the sum; an update
// reads and writes a row once, and no sum leaves the cache. Each row belongs to one thread, and its noise is counted:
// threads do not change a bit.

#include "walk.h"
#include "wide.h"

namespace {

// Rows in a format, for the updates of walk.h.
template <int D, int64_t kFormat>
struct PackedRows {
  uint8_t* rows;
  uint16_t* lower;  // lower halves of split numbers; nullptr otherwise
  State state;
  int64_t dim;
  const Rule& rule;
  const Origins* origins;  // nullptr rounds to the nearest
  int64_t first_row = 0, origin = -1;
  static constexpr int kTogether = 8;

  PackedRows table(int64_t first) const {
    return {rows, lower, state, dim, rule, origins, first, origins ? origins->of(first) : -1};
  }
  void touch(int64_t row) const {
    const int64_t size = D ? D : dim, place = first_row + row;
    Packed<D, kFormat>{rows, dim}.prefetch(place);
    if (kFormat == kSplit)
      for (int64_t d = 0; d < size; d += 32) ask_for(lower + place * size + d);
    touch_state<D>(state, place, dim, rule);
  }
  uint8_t* kept(int64_t place) const { return rows + place * row_bytes<kFormat>(D ? D : dim); }
  uint16_t* halves(int64_t place) const { return kFormat == kSplit ? lower + place * (D ? D : dim) : nullptr; }
  uint32_t word(int64_t place) const { return origins ? origins->word(place, origin < 0 ? origins->of(place) : origin) : 0; }
  bool is_usual() const { return D > 0 && rule.kind != kAdam && rule.scale == 1.0f && rule.weight_decay == 0.0f; }

  // The usual rules, which add a multiple of the gradient: the same numbers, in one pass over the row, or two for codes.
  inline void add(int64_t place, const float* grad, float factor, float* memory) const {
    const uint32_t counted = word(place), *noise = origins ? &counted : nullptr;
#if ZIGGURAT_WIDE
    if constexpr (is_wide<D>()) {
      if (!has_codes<kFormat>() && (kFormat == kSplit || noise))
        if (wide_add_to_halves<D, kFormat>(reinterpret_cast<uint16_t*>(kept(place)), halves(place), grad, factor, counted)) return;
    }
#endif
    if constexpr (has_codes<kFormat>()) {
      write_codes<D, kFormat>(memory, kept(place), D, noise, add_to_codes<D, kFormat>(kept(place), grad, factor, memory));
    } else {
      if ((kFormat == kSplit || noise) && add_to_halves<D, kFormat>(kept(place), halves(place), grad, factor, noise, memory))
        return;
      read_row<D, kFormat>(kept(place), halves(place), D, memory);
      for (int64_t d = 0; d < D; d += kLanes) store(memory + d, load(memory + d) + factor * load(grad + d));
      write_row<D, kFormat>(memory, kept(place), halves(place), D, noise);
    }
  }
  // The same for rows of codes, one part of the work after the other.
  inline void add_together(const int64_t* at, const float* const* grads, const float* factors, int count, float* memory) const {
#if ZIGGURAT_WIDE
    Range ranges[kTogether];
    bool filled[kTogether];
    uint32_t words[kTogether];
    for (int r = 0; r < count; r++)
      ranges[r] = wide_add_to_codes<D, kFormat>(kept(first_row + at[r]), grads[r], factors[r], memory + r * D);
    for (int r = 0; r < count; r++) {
      words[r] = word(first_row + at[r]);
      filled[r] = write_ends<kFormat>(kept(first_row + at[r]), ranges[r], origins ? words + r : nullptr);
    }
    for (int r = 0; r < count; r++) {
      uint8_t* codes = kept(first_row + at[r]) + kEnds;
      if (filled[r]) wide_fill_codes<D, kFormat>(memory + r * D, codes, ranges[r], origins ? words + r : nullptr);
      else std::memset(codes, 0, row_bytes<kFormat>(D) - kEnds);
    }
#endif
  }
  void apply(int64_t row, const float* grad, float* memory) const { apply_all(&row, &grad, 1, memory); }
  // One copy for updates and sums: a call costs nothing beside rows from memory, and compiling takes half the time.
  __attribute__((noinline)) void apply_all(const int64_t* at, const float* const* grads, int count, float* memory) const {
    if constexpr (D > 0) {
      if (is_usual()) {
        float factors[kTogether];
        step_factors<D, kTogether>(state, first_row, at, grads, count, rule, factors);
        if constexpr (is_wide<D>() && has_codes<kFormat>()) return add_together(at, grads, factors, count, memory);
        for (int r = 0; r < count; r++) add(first_row + at[r], grads[r], factors[r], memory);
        return;
      }
    }
    for (int r = 0; r < count; r++) {
      const int64_t place = first_row + at[r];
      const uint32_t counted = word(place);
      read_row<D, kFormat>(kept(place), halves(place), dim, memory);
      apply_row<D>(memory, state, place, grads[r], dim, rule, memory + (D ? D : dim));
      pack_row<D, kFormat>(memory, kept(place), halves(place), dim, origins ? &counted : nullptr);
    }
  }
};

template <int D, int64_t kFormat>
int64_t lookup_packed(const uint8_t* rows, const Part& part, int64_t dim, void* out, bool is_bfloat16, int num_threads) {
  const Packed<D, kFormat> packed{rows, dim};
  if (is_bfloat16) return lookup<D>(packed, part, dim, static_cast<uint16_t*>(out), num_threads);
  return lookup<D>(packed, part, dim, static_cast<float*>(out), num_threads);
}

}  // namespace

#define FOR_FORMAT(call, D)               \
  switch (format) {                       \
    case kBfloat16: return call(D, kBfloat16); \
    case kSplit: return call(D, kSplit);  \
    case kInt8: return call(D, kInt8);    \
    default: return call(D, kInt4);       \
  }

extern "C" {

// What Python passes of a storage: rows, what lies beside them, and how they are rounded.
struct Storage {
  uint8_t* rows;
  uint16_t* lower;
  int64_t format;
  float *state_first, *state_second;
  int64_t dim;
  const Origins* origins;
};

// The fields of a part, pooled into out; rows are R rows in a format.
int64_t ziggurat_lookup_rows(const uint8_t* rows, int64_t format, const Part* part, int64_t dim, void* out,
                             int64_t out_is_bfloat16, int64_t num_threads) {
  if (format == kSplit) format = kBfloat16;  // lookups read upper halves
#define LOOKUP_ROWS(D, F) \
  lookup_packed<D, F == kSplit ? kBfloat16 : F>(rows, *part, dim, out, out_is_bfloat16 != 0, int(num_threads))
#define LOOKUP_DIM(D) [&]() -> int64_t { FOR_FORMAT(LOOKUP_ROWS, D) }()
  FOR_DIM(dim, LOOKUP_DIM)
}

#define ROWS_OF(D, F) \
  PackedRows<D, F> { storage->rows, storage->lower, state, dim, *rule, storage->origins }

// Sum and apply; see ziggurat_update, whose workspace it takes.
int64_t ziggurat_update_rows(void* workspace, const Part* parts, int64_t num_parts, const Storage* storage,
                             const Rule* rule, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const int64_t status = plan_tasks(work, parts, num_parts, int(num_threads));
  if (status != kOk) return status;
  const State state{storage->state_first, storage->state_second};
  const int64_t dim = storage->dim, format = storage->format;
#define UPDATE_ROWS(D, F) update<D>(work, ROWS_OF(D, F), dim, int(num_threads))
#define UPDATE_DIM(D) [&]() -> int64_t { FOR_FORMAT(UPDATE_ROWS, D) }()
  FOR_DIM(dim, UPDATE_DIM)
}

// The rule for (U,) distinct rows with their summed gradients.
void ziggurat_apply_rows(const Storage* storage, const int64_t* places, const float* sums, int64_t num_unique,
                         const Rule* rule, int64_t num_threads) {
  const State state{storage->state_first, storage->state_second};
  const int64_t dim = storage->dim, format = storage->format;
#define APPLY_ROWS(D, F) apply_sums<D>(ROWS_OF(D, F), dim, places, sums, num_unique, int(num_threads))
#define APPLY_DIM(D) [&]() { FOR_FORMAT(APPLY_ROWS, D) }()
  FOR_DIM(dim, APPLY_DIM)
}

}  // extern "C"
