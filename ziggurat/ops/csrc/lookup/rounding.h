// Numbers to rows in a format: counted noise, rounding, ends and codes. Twin of noise.py and the formats in ops/row_formats/.
#pragma once
#include "formats.h"

namespace {

// ---------------------------------------------------------------- noise

// Which rows of which tables the rows of a storage are, from `first_rows` on; `keys` are those of a step.
struct Origins {
  int64_t count;
  const int64_t *first_rows, *shifts;  // row of the table − row of the storage
  const uint64_t* keys;
  const uint32_t* columns;  // what the table's column of the first one adds to a word
  int64_t of(int64_t row) const {
    if (count > 64) return std::upper_bound(first_rows, first_rows + count, row) - first_rows - 1;
    int64_t before = -1;  // few are counted sooner than searched
    for (int64_t i = 0; i < count; i++) before += first_rows[i] <= row;
    return before;
  }
  uint32_t word(int64_t row, int64_t origin) const {
    uint64_t z = keys[origin] + static_cast<uint64_t>(row + shifts[origin]) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>(z ^ z >> 31) + columns[origin];
  }
};

constexpr uint32_t kStride = 0x9E3779B9u;

template <class T>  // of one column, or of eight
inline T nearly_mixed(T z) {
  z ^= z >> 16;
  z *= 0x7FEB352Du;
  z ^= z >> 15;
  return z * 0x846CA68Bu;
}

template <class T>
inline T mixed(T z) {
  z = nearly_mixed(z);
  return z ^ z >> 16;
}

inline uint32_t noise(uint32_t word, int64_t column) {
  return mixed(word + static_cast<uint32_t>(column + 1) * kStride);
}

inline Bits counters(uint32_t word, int64_t column) {
  return word + static_cast<uint32_t>(column + 1) * kStride + Bits{0, 1, 2, 3, 4, 5, 6, 7} * kStride;
}

inline Bits noise_of_eight(uint32_t word, int64_t column) { return mixed(counters(word, column)); }

// The upper halves, which the last step of mixing leaves as they are.
inline Bits upper_noise_of_eight(uint32_t word, int64_t column) { return nearly_mixed(counters(word, column)) >> 16; }

// ---------------------------------------------------------------- halves

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr uint32_t kExponent = 0x7F800000u;  // all ones: not finite

template <int D>
void write_bfloat16(const float* w, uint16_t* row, int64_t dim, const uint32_t* word) {
  const int64_t size = D ? D : dim;
  int64_t d = 0;
  if (!word) {
    for (; d + kLanes <= size; d += kLanes) store_bfloat16(row + d, load(w + d));
    for (; D == 0 && d < size; d++) row[d] = to_bfloat16(w[d]);
    return;
  }
  for (; d + kLanes <= size; d += kLanes) {
    const Bits bits = (Bits)load(w + d);
    const Bits rounded = (bits + upper_noise_of_eight(*word, d)) >> 16;
    const Bits is_infinite = (Bits)((bits & kExponent) == kExponent);
    const Bits is_nan = (Bits)((bits & 0x7FFFFFFFu) > kExponent);
    narrow(row + d, chosen(is_nan, 0x7FC0u + (bits & 0u), chosen(is_infinite, bits >> 16, rounded)));
  }
  for (; D == 0 && d < size; d++) {
    const uint32_t bits = bits_of(w[d]);
    const bool is_finite = (bits & kExponent) != kExponent;
    row[d] = is_finite ? static_cast<uint16_t>((bits + (noise(*word, d) >> 16)) >> 16) : to_bfloat16(w[d]);
  }
}

template <int D>
void write_split(const float* w, uint16_t* upper, uint16_t* lower, int64_t dim) {
  const int64_t size = D ? D : dim;
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    const Bits given = (Bits)load(w + d);
    const Bits bits = chosen((Bits)((given & 0x7FFFFFFFu) > kExponent), 0x7FC00000u + (given & 0u), given);
    narrow(lower + d, bits & 0xFFFFu);
    narrow(upper + d, (bits - (Bits)((Ints)(bits << 16) >> 16)) >> 16);
  }
  for (; D == 0 && d < size; d++) {
    const uint32_t bits = w[d] != w[d] ? 0x7FC00000u : bits_of(w[d]);
    lower[d] = static_cast<uint16_t>(bits);
    upper[d] = static_cast<uint16_t>((bits - static_cast<uint32_t>(static_cast<int16_t>(bits))) >> 16);
  }
}

// ---------------------------------------------------------------- codes

// A finite number in FP16, by 13 random bits (own >= 0) or to the nearest.
inline Half to_half(float x, int64_t own) {
  x = std::min(std::max(x, -65504.0f), 65504.0f);
  if (own >= 0) {
    const uint32_t exponent = std::min(std::max(bits_of(x) >> 23 & 0xFFu, 127u - 14u), 127u + 15u);
    const float quantum = float_of((exponent - 10u) << 23), per_quantum = float_of((2u * 127u + 10u - exponent) << 23);
    x = std::floor(x * per_quantum + static_cast<float>(own) * 0x1p-13f) * quantum;
    x = std::min(std::max(x, -65504.0f), 65504.0f);
  }
  return static_cast<Half>(x + 0.0f);
}

// The smallest and the largest number of a row, and whether one is not finite (then the other two mean nothing).
struct Range {
  float low, high;
  bool infinite;
};

template <int D>
inline Range range_of(const float* w, int64_t dim) {
  const int64_t size = D ? D : dim;
  float low = w[0], high = w[0];
  uint32_t infinite = 0;
  int64_t d = 0;
  if (size >= kLanes) {
    Lanes lows = load(w), highs = lows;
    Bits any = {0};
    for (; d + kLanes <= size; d += kLanes) {
      const Lanes x = load(w + d);
      any = larger(any, (Bits)x & 0x7FFFFFFFu);
      lows = lesser(x, lows);
      highs = greater(x, highs);
    }
    low = least(lows), high = -least(-highs), infinite = largest(any);
  }
  for (; D == 0 && d < size; d++) {
    low = std::min(low, w[d]), high = std::max(high, w[d]);
    infinite = std::max(infinite, bits_of(w[d]) & 0x7FFFFFFFu);
  }
  return {low, high, infinite >= kExponent};
}

template <int D, int64_t kFormat>
inline void fill_codes(const float* w, uint8_t* codes, int64_t dim, const Range& range, const uint32_t* word) {
  const int64_t size = D ? D : dim;
  const float first = half_at(codes - kEnds), last = half_at(codes - kEnds + 2), top = most<kFormat>();
  const float per = top / (last - first);
  const Bits tops = (Bits)((Ints){0} + static_cast<int32_t>(top));
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) {
    const Lanes given = load(w + d);
    const Lanes u = word ? __builtin_convertvector((Ints)(noise_of_eight(*word, d) >> 8), Lanes) * 0x1p-24f : all(0.5f);
    Lanes x = (given - first) * per + u;
    const Bits code = (Bits)__builtin_convertvector(lesser(greater(x, all(0.0f)), all(top)), Ints);
    const Bits is_low = (Bits)(given == range.low), is_high = (Bits)(given == range.high);
    store_codes<kFormat>(codes, d, ~is_low & chosen(is_high, tops, code));
  }
  for (; D == 0 && d < size; d++) {
    const float u = word ? static_cast<float>(static_cast<int32_t>(noise(*word, d) >> 8)) * 0x1p-24f : 0.5f;
    float x = std::min(std::max((w[d] - first) * per + u, 0.0f), top);
    x = w[d] == range.low ? 0.0f : w[d] == range.high ? top : x;
    const uint8_t code = static_cast<uint8_t>(static_cast<int32_t>(x));
    if (kFormat == kInt8) codes[d] = code;
    else codes[d / 2] = d % 2 ? static_cast<uint8_t>(codes[d / 2] | code << 4) : code;
  }
}

// Writes the ends of a row; false if there is nothing between them, or a number that is not finite.
template <int64_t kFormat>
inline bool write_ends(uint8_t* row, const Range& range, const uint32_t* word) {
  const int64_t own = word ? static_cast<int64_t>(noise(*word, -1) >> 19) : -1;
  const Half nan = static_cast<Half>(NAN);
  const Half ends[2] = {range.infinite ? nan : to_half(range.low, own), range.infinite ? nan : to_half(range.high, own)};
  std::memcpy(row, ends, sizeof(ends));
  return static_cast<float>(ends[1]) > static_cast<float>(ends[0]);
}

template <int D, int64_t kFormat>
inline void write_codes(const float* w, uint8_t* row, int64_t dim, const uint32_t* word, const Range& range) {
  if (write_ends<kFormat>(row, range, word)) fill_codes<D, kFormat>(w, row + kEnds, dim, range, word);
  else std::memset(row + kEnds, 0, row_bytes<kFormat>(D ? D : dim) - kEnds);
}

// ---------------------------------------------------------------- w + factor · gradient, rounded, without a row of floats

// For halves of multiples of eight columns; false if a number is not finite, and nothing is written then. `room` is for
// a row of floats.
template <int D, int64_t kFormat>
inline bool add_to_halves(uint8_t* row, uint16_t* lower, const float* grad, float factor, const uint32_t* word, float* room) {
  uint16_t* upper = reinterpret_cast<uint16_t*>(row);
  uint16_t *new_upper = reinterpret_cast<uint16_t*>(room), *new_lower = new_upper + D;
  Bits any = {0};
  for (int64_t d = 0; d < D; d += kLanes) {
    Lanes w = load_bfloat16(upper + d);
    if (kFormat == kSplit) w = (Lanes)((Bits)w + widen_signed(lower + d));
    const Bits bits = (Bits)(w + factor * load(grad + d));
    any = larger(any, bits & 0x7FFFFFFFu);
    if (kFormat == kSplit) {
      narrow(new_lower + d, bits & 0xFFFFu);
      narrow(new_upper + d, (bits + 0x8000u) >> 16);
    } else {
      narrow(new_upper + d, (bits + upper_noise_of_eight(*word, d)) >> 16);
    }
  }
  if (largest(any) >= kExponent) return false;
  std::memcpy(upper, new_upper, 2 * D);
  if (kFormat == kSplit) std::memcpy(lower, new_lower, 2 * D);
  return true;
}

// For codes: the sums, and their range.
template <int D, int64_t kFormat>
inline Range add_to_codes(const uint8_t* row, const float* grad, float factor, float* w) {
  const Reader<kFormat> reader(row);
  Lanes lows = {0}, highs = {0};
  Bits any = {0};
  for (int64_t d = 0; d < D; d += kLanes) {
    const Lanes x = reader.eight(d) + factor * load(grad + d);
    store(w + d, x);
    any = larger(any, (Bits)x & 0x7FFFFFFFu);
    lows = d ? lesser(x, lows) : x;
    highs = d ? greater(x, highs) : x;
  }
  return {least(lows), -least(-highs), largest(any) >= kExponent};
}

template <int D, int64_t kFormat>
inline void write_row(const float* w, uint8_t* row, uint16_t* lower, int64_t dim, const uint32_t* word) {
  if constexpr (has_codes<kFormat>()) write_codes<D, kFormat>(w, row, dim, word, range_of<D>(w, dim));
  else if constexpr (kFormat == kSplit) write_split<D>(w, reinterpret_cast<uint16_t*>(row), lower, dim);
  else write_bfloat16<D>(w, reinterpret_cast<uint16_t*>(row), dim, word);
}

}  // namespace
