// Pooled lookups and exact updates of rows that are kept in few bits. Twin of ziggurat/ops/row_formats/reference.py and
// noise.py, which define every bit of it; the rule is that of rules.h, sorting and walking are those of lookup.cpp.
//
//     lookup   codes or halves of a row ──► eight floats at a time ──► the sum, in registers
//     update   gradients of a row ──► their sum, in registers; row ──► floats in the L1 cache ──► the rule ──► rounded ──► row
//
// A row is decoded where it is added, so a lookup reads the bytes of the format and writes nothing but the sum; an update
// reads and writes a row once, and no sum leaves the cache. Each row belongs to one thread, and its noise is counted:
// threads do not change a bit.

#include "rounding.h"
#include "walk.h"

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
  // The usual rules, which add a multiple of the gradient: the same numbers, in one pass over the row, or two for codes.
  inline void add(int64_t place, const float* grad, const uint32_t* word, float* memory) const {
    uint8_t* kept = rows + place * row_bytes<kFormat>(D);
    uint16_t* halves = kFormat == kSplit ? lower + place * D : nullptr;
    const float factor = step_factor<D>(state, place, grad, D, rule);
    if constexpr (has_codes<kFormat>()) {
      write_codes<D, kFormat>(memory, kept, D, word, add_to_codes<D, kFormat>(kept, grad, factor, memory));
    } else {
      if ((kFormat == kSplit || word) && add_to_halves<D, kFormat>(kept, halves, grad, factor, word, memory)) return;
      read_row<D, kFormat>(kept, halves, D, memory);
      for (int64_t d = 0; d < D; d += kLanes) store(memory + d, load(memory + d) + factor * load(grad + d));
      write_row<D, kFormat>(memory, kept, halves, D, word);
    }
  }
  // One copy for updates and sums: a call costs nothing beside a row from memory, and compiling takes half the time.
  __attribute__((noinline)) void apply(int64_t row, const float* grad, float* memory) const {
    const int64_t size = D ? D : dim, place = first_row + row;
    uint8_t* kept = rows + place * row_bytes<kFormat>(size);
    uint16_t* halves = kFormat == kSplit ? lower + place * size : nullptr;
    uint32_t word = 0;
    if (origins) word = origins->word(place, origin < 0 ? origins->of(place) : origin);
    const uint32_t* noise = origins ? &word : nullptr;
    if constexpr (D > 0) {
      if (rule.kind != kAdam && rule.scale == 1.0f && rule.weight_decay == 0.0f) return add(place, grad, noise, memory);
    }
    read_row<D, kFormat>(kept, halves, dim, memory);
    apply_row<D>(memory, state, place, grad, dim, rule, memory + size);
    write_row<D, kFormat>(memory, kept, halves, dim, noise);
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
  const int64_t status = plan_tasks(work, parts, num_parts);
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
