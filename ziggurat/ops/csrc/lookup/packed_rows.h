// Rows in a format, for the lookups of parts.h and the updates of walk.h. Included by row_formats.cpp and row_cache.cpp, which say what defines them.
#pragma once
#include "rules.h"
#include "wide.h"

namespace {

// Rows in a format, for the lookup of parts.h.
template <int D, int64_t kFormat>
struct Packed {
  const uint8_t* rows;
  int64_t dim;
  static constexpr bool kIsSearched = false;
  int64_t find(int64_t row) const { return row; }
  const uint8_t* at(int64_t row) const { return rows + row * row_bytes<kFormat>(D ? D : dim); }
  void prefetch(int64_t row) const { ask_for_row(at(row)); }
  void ask_for_row(const void* row) const {
    const int64_t size = row_bytes<kFormat>(D ? D : dim);
    for (int64_t byte = 0; byte < size - 4; byte += 64) ask_for(static_cast<const uint8_t*>(row) + byte);
    ask_for(static_cast<const uint8_t*>(row) + size - 1);  // of rows that begin at multiples of four bytes, every line
  }
  void set(Sum<D>& sum, int64_t row) const {
    const ReaderOf<D, kFormat> reader(at(row));
    if constexpr (D > 0) {
      for (int l = 0; l < Sum<D>::kCount; l++) sum.lanes[l] = reader.some(l * Sum<D>::kWidth);
    } else {
      for (int64_t d = 0; d < dim; d++) sum.sum[d] = reader.one(d);
    }
  }
  void add(Sum<D>& sum, int64_t row) const {
    const ReaderOf<D, kFormat> reader(at(row));
    if constexpr (D > 0) {
      for (int l = 0; l < Sum<D>::kCount; l++) sum.lanes[l] += reader.some(l * Sum<D>::kWidth);
    } else {
      for (int64_t d = 0; d < dim; d++) sum.sum[d] += reader.one(d);
    }
  }
};

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
    const float* sums[kTogether];
    Range ranges[kTogether];
    for (int r = 0; r < count; r++) {
      ranges[r] = wide_add_to_codes<D, kFormat>(kept(first_row + at[r]), grads[r], factors[r], memory + r * D);
      sums[r] = memory + r * D;
    }
    write_together(at, sums, ranges, count);
#endif
  }
  inline void write_together(const int64_t* at, const float* const* rows_of, const Range* ranges, int count) const {
#if ZIGGURAT_WIDE
    uint32_t words[kTogether] = {};
    for (int r = 0; origins && r < count; r++) words[r] = word(first_row + at[r]);
    Ends ends;
    wide_find_ends<kFormat>(ranges, origins ? words : nullptr, count, ends);
    for (int r = 0; r < count; r++) {
      uint8_t* row = kept(first_row + at[r]);
      std::memcpy(row, ends.pairs + r, kEnds);
      const uint32_t* noise = origins ? words + r : nullptr;
      if (ends.apart >> r & 1)
        wide_fill_codes<D, kFormat>(rows_of[r], row + kEnds, ranges[r], noise, ends.first[r], ends.per[r]);
      else
        std::memset(row + kEnds, 0, row_bytes<kFormat>(D) - kEnds);
    }
#endif
  }
  // Rounds up to kTogether rows of numbers and keeps them.
  inline void keep_all(const int64_t* at, const float* const* rows_of, int count) const {
#if ZIGGURAT_WIDE
    if constexpr (is_wide<D>() && has_codes<kFormat>()) {
      Range ranges[kTogether];
      for (int r = 0; r < count; r++) ranges[r] = wide_range_of<D>(rows_of[r]);
      return write_together(at, rows_of, ranges, count);
    }
#endif
    for (int r = 0; r < count; r++) {
      const uint32_t counted = word(first_row + at[r]);
      pack_row<D, kFormat>(rows_of[r], kept(first_row + at[r]), halves(first_row + at[r]), dim, origins ? &counted : nullptr);
    }
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

}  // namespace
