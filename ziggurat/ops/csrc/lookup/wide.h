// Updates of rows in few bits, sixteen columns at a time, where the processor has AVX-512: the bits of rounding.h, with a
// row in registers from where it is read to where it is written. tests/ops/row_formats/test_cpp.py
// holds both to the reference.
#pragma once
#include "rounding.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ZIGGURAT_WIDE 1

namespace {

// Rows of so many columns are sixteens, and fit the registers.
template <int D>
constexpr bool is_wide() { return D == 32 || D == 64 || D == 128; }

constexpr int kNotFinite = 0x99;  // either NaN, either infinity

inline __m512i every(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }

// The counters of noise, sixteen columns from `column` on.
inline __m512i wide_counters(uint32_t word, int64_t column) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(_mm512_mullo_epi32(lanes, every(kStride)), every(word + static_cast<uint32_t>(column + 1) * kStride));
}

inline __m512i wide_nearly_mixed(__m512i z) {
  z = _mm512_mullo_epi32(_mm512_xor_si512(z, _mm512_srli_epi32(z, 16)), every(0x7FEB352Du));
  return _mm512_mullo_epi32(_mm512_xor_si512(z, _mm512_srli_epi32(z, 15)), every(0x846CA68Bu));
}

inline __m512i wide_mixed(__m512i z) {
  z = wide_nearly_mixed(z);
  return _mm512_xor_si512(z, _mm512_srli_epi32(z, 16));
}

// ---------------------------------------------------------------- halves

inline __m512i upper_to_wide(const uint16_t* from) {
  return _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
}

inline __m512i lower_to_wide(const uint16_t* from) {
  return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Every second 16 bits of two vectors, from the first or the second on.
inline __m512i every_second(__m512i a, __m512i b, int first) {
  alignas(64) static constexpr uint16_t kEven[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                     32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  const __m512i even = _mm512_load_si512(kEven);
  return _mm512_permutex2var_epi16(a, first ? _mm512_add_epi16(even, _mm512_set1_epi16(1)) : even, b);
}

// w + factor · gradient, rounded; false if a number is not finite, and nothing is written then.
template <int D, int64_t kFormat>
inline bool wide_add_to_halves(uint16_t* upper, uint16_t* lower, const float* grad, float factor, uint32_t word) {
  constexpr int kPairs = D / 32;
  __m512i new_upper[kPairs], new_lower[kPairs];
  const __m512 factors = _mm512_set1_ps(factor);
  __mmask16 bad = 0;
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; p++) {
    __m512i sums[2], rounded[2];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const int d = 32 * p + 16 * h;
      __m512i w = upper_to_wide(upper + d);
      if (kFormat == kSplit) w = _mm512_add_epi32(w, lower_to_wide(lower + d));
      const __m512 x = _mm512_add_ps(_mm512_castsi512_ps(w), _mm512_mul_ps(factors, _mm512_loadu_ps(grad + d)));
      bad |= _mm512_fpclass_ps_mask(x, kNotFinite);
      sums[h] = _mm512_castps_si512(x);
      const __m512i up = kFormat == kSplit ? every(0x8000u) : _mm512_srli_epi32(wide_nearly_mixed(wide_counters(word, d)), 16);
      rounded[h] = _mm512_add_epi32(sums[h], up);
    }
    new_upper[p] = every_second(rounded[0], rounded[1], 1);
    if (kFormat == kSplit) new_lower[p] = every_second(sums[0], sums[1], 0);
  }
  if (bad) return false;
#pragma GCC unroll 4
  for (int p = 0; p < kPairs; p++) {
    _mm512_storeu_si512(upper + 32 * p, new_upper[p]);
    if (kFormat == kSplit) _mm512_storeu_si512(lower + 32 * p, new_lower[p]);
  }
  return true;
}

// ---------------------------------------------------------------- codes

template <int64_t kFormat>
inline __m512i load_wide_codes(const uint8_t* codes, int64_t d) {
  if (kFormat == kInt8) return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + d)));
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + d / 2));
  const __m128i most = _mm_set1_epi8(15);
  const __m128i first = _mm_and_si128(pairs, most), second = _mm_and_si128(_mm_srli_epi16(pairs, 4), most);
  return _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(first, second));
}

// Four times sixteen codes, in order; what is below none is none, what is above the last is the last.
template <int64_t kFormat>
inline void store_wide_codes(uint8_t* codes, const __m512i* x, int count) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i none = _mm512_setzero_si512();
  const __m512i halves = _mm512_packus_epi32(x[0], x[1]), more = count > 2 ? _mm512_packus_epi32(x[2], x[3]) : none;
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(halves, more));
  if (kFormat == kInt8) {
    if (count > 2) _mm512_storeu_si512(codes, bytes);
    else _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm512_castsi512_si256(bytes));
    return;
  }
  const __m512i most = _mm512_min_epu8(bytes, _mm512_set1_epi8(15));
  const __m512i pairs = _mm512_maddubs_epi16(most, _mm512_set1_epi16(0x1001));  // the first code + 16 times the second
  const __m256i packed = _mm512_cvtepi16_epi8(pairs);
  if (count > 2) _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), packed);
  else _mm_storeu_si128(reinterpret_cast<__m128i*>(codes), _mm256_castsi256_si128(packed));
}

// What sixteen codes of a row stand for.
template <int64_t kFormat>
struct Meanings {
  __m512 low, step, high, all;
  explicit Meanings(const Reader<kFormat>& reader)
      : low(_mm512_set1_ps(reader.low)), step(_mm512_set1_ps(reader.step)), high(_mm512_set1_ps(reader.high)) {
    if (kFormat == kInt4) all = of(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  __m512 of(__m512i codes) const {
    const __m512 x = _mm512_add_ps(low, _mm512_mul_ps(step, _mm512_cvtepi32_ps(codes)));
    return _mm512_mask_mov_ps(x, _mm512_cmpeq_epi32_mask(codes, every(static_cast<uint32_t>(most<kFormat>()))), high);
  }
  __m512 look_up(__m512i codes) const { return kFormat == kInt4 ? _mm512_permutexvar_ps(codes, all) : of(codes); }
};

// w + factor · gradient, and their range.
template <int D, int64_t kFormat>
inline Range wide_add_to_codes(const uint8_t* row, const float* grad, float factor, float* w) {
  const Reader<kFormat> reader(row);
  const Meanings<kFormat> meanings(reader);
  const __m512 factors = _mm512_set1_ps(factor), zero = _mm512_setzero_ps();
  __m512 lows = zero, highs = zero, any = zero;
#pragma GCC unroll 8
  for (int d = 0; d < D; d += 16) {
    const __m512 old = meanings.look_up(load_wide_codes<kFormat>(reader.row, d));
    const __m512 x = _mm512_add_ps(old, _mm512_mul_ps(factors, _mm512_loadu_ps(grad + d)));
    _mm512_storeu_ps(w + d, x);
    any = _mm512_fmadd_ps(x, zero, any);  // NaN from a number that is not finite
    lows = d ? _mm512_min_ps(x, lows) : x;
    highs = d ? _mm512_max_ps(x, highs) : x;
  }
  return {_mm512_reduce_min_ps(lows), _mm512_reduce_max_ps(highs), _mm512_cmp_ps_mask(any, zero, _CMP_NEQ_UQ) != 0};
}

// The numbers of a row, sixteen at a time.
template <int64_t kFormat>
struct WideReader {
  Reader<kFormat> reader;
  Meanings<kFormat> meanings;
  explicit WideReader(const uint8_t* row) : reader(row), meanings(reader) {}
  __m512 some(int64_t d) const {
    if constexpr (has_codes<kFormat>()) return meanings.look_up(load_wide_codes<kFormat>(reader.row, d));
    else return _mm512_castsi512_ps(upper_to_wide(reinterpret_cast<const uint16_t*>(reader.row) + d));
  }
};

// Reads a row in the vectors of its sum.
template <int D, int64_t kFormat>
using ReaderOf = std::conditional_t<D == 0 || D % 16 != 0, Reader<kFormat>, WideReader<kFormat>>;

// The numbers of a row + factor · gradient, in FP32.
template <int D, int64_t kFormat>
inline void wide_add_to_decoded(const uint8_t* row, const float* grad, float factor, float* w) {
  const __m512 factors = _mm512_set1_ps(factor);
  const WideReader<kFormat> reader(row);
#pragma GCC unroll 8
  for (int d = 0; d < D; d += 16)
    _mm512_storeu_ps(w + d, _mm512_add_ps(reader.some(d), _mm512_mul_ps(factors, _mm512_loadu_ps(grad + d))));
}

// `range_of`.
template <int D>
inline Range wide_range_of(const float* w) {
  const __m512 zero = _mm512_setzero_ps();
  __m512 lows = _mm512_loadu_ps(w), highs = lows, any = _mm512_mul_ps(lows, zero);
#pragma GCC unroll 8
  for (int d = 16; d < D; d += 16) {
    const __m512 x = _mm512_loadu_ps(w + d);
    any = _mm512_fmadd_ps(x, zero, any);  // NaN from a number that is not finite
    lows = _mm512_min_ps(x, lows);
    highs = _mm512_max_ps(x, highs);
  }
  return {_mm512_reduce_min_ps(lows), _mm512_reduce_max_ps(highs), _mm512_cmp_ps_mask(any, zero, _CMP_NEQ_UQ) != 0};
}

// The ends of up to eight rows. Bit r of `apart` is set if there is something between those of row r.
struct Ends {
  float first[8], per[8];  // the lower end, and codes per unit
  uint32_t pairs[8];       // as a row begins
  uint32_t apart;
};

// `to_half` and `write_ends` of eight rows at once: the lower ends in the first lanes, the upper ones in the others.
template <int64_t kFormat>
inline void wide_find_ends(const Range* ranges, const uint32_t* words, int count, Ends& ends) {
  float numbers[16] = {};
  for (int r = 0; r < count; r++) {
    numbers[r] = ranges[r].infinite ? NAN : ranges[r].low;
    numbers[8 + r] = ranges[r].infinite ? NAN : ranges[r].high;
  }
  const __m512 most_half = _mm512_set1_ps(65504.0f), least_half = _mm512_set1_ps(-65504.0f);
  const auto inside = [&](__m512 x) { return _mm512_min_ps(most_half, _mm512_max_ps(least_half, x)); };  // NaN stays
  __m512 x = inside(_mm512_loadu_ps(numbers));
  if (words) {
    const __m512i word = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
    const __m512 own = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srli_epi32(wide_mixed(word), 19)), _mm512_set1_ps(0x1p-13f));
    __m512i exponent = _mm512_and_si512(_mm512_srli_epi32(_mm512_castps_si512(x), 23), every(0xFFu));
    exponent = _mm512_min_epu32(_mm512_max_epu32(exponent, every(127u - 14u)), every(127u + 15u));
    const __m512 quantum = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(exponent, every(10u)), 23));
    const __m512 per_quantum =
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(every(2u * 127u + 10u), exponent), 23));
    const __m512 steps = _mm512_add_ps(_mm512_mul_ps(x, per_quantum), own);
    x = inside(_mm512_mul_ps(_mm512_roundscale_ps(steps, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), quantum));
  }
  const __m256i halves = _mm512_cvtps_ph(_mm512_add_ps(x, _mm512_setzero_ps()), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m128i lower = _mm256_castsi256_si128(halves), upper = _mm256_extracti128_si256(halves, 1);
  const __m256 first = _mm256_cvtph_ps(lower), last = _mm256_cvtph_ps(upper);
  _mm256_storeu_ps(ends.first, first);
  _mm256_storeu_ps(ends.per, _mm256_div_ps(_mm256_set1_ps(most<kFormat>()), _mm256_sub_ps(last, first)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(ends.pairs), _mm_unpacklo_epi16(lower, upper));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(ends.pairs) + 1, _mm_unpackhi_epi16(lower, upper));
  ends.apart = _mm256_cmp_ps_mask(last, first, _CMP_GT_OQ);
}

// The codes of numbers between ends, of which `begin` is the lower one; `per` codes are one unit.
template <int D, int64_t kFormat>
inline void wide_fill_codes(const float* w, uint8_t* codes, const Range& range, const uint32_t* word, float begin, float per_unit) {
  const float top = most<kFormat>();
  const __m512 first = _mm512_set1_ps(begin), per = _mm512_set1_ps(per_unit);
  const __m512 low = _mm512_set1_ps(range.low), high = _mm512_set1_ps(range.high);
  const __m512i tops = every(static_cast<uint32_t>(top));
#pragma GCC unroll 2
  for (int d = 0; d < D; d += 64) {
    constexpr int kCount = D < 64 ? 2 : 4;
    __m512i code[4];
#pragma GCC unroll 4
    for (int c = 0; c < kCount; c++) {
      const __m512 x = _mm512_loadu_ps(w + d + 16 * c);
      __m512 y = _mm512_mul_ps(_mm512_sub_ps(x, first), per);
      if (word) {  // + u, in one rounding: the product is exact
        const __m512i bits = _mm512_srli_epi32(wide_mixed(wide_counters(*word, d + 16 * c)), 8);
        y = _mm512_fmadd_ps(_mm512_cvtepi32_ps(bits), _mm512_set1_ps(0x1p-24f), y);
      } else {
        y = _mm512_add_ps(y, _mm512_set1_ps(0.5f));
      }
      // where ends are apart, so are low and high
      code[c] = _mm512_maskz_cvttps_epi32(_mm512_cmp_ps_mask(x, low, _CMP_NEQ_UQ), y);
      code[c] = _mm512_mask_mov_epi32(code[c], _mm512_cmp_ps_mask(x, high, _CMP_EQ_OQ), tops);
    }
    store_wide_codes<kFormat>(codes + (kFormat == kInt8 ? d : d / 2), code, kCount);
  }
}

}  // namespace

#else
#define ZIGGURAT_WIDE 0

namespace {
template <int D>
constexpr bool is_wide() { return false; }
template <int D, int64_t kFormat>
using ReaderOf = Reader<kFormat>;
}  // namespace

#endif

namespace {

// `write_row`, in the widest registers.
template <int D, int64_t kFormat>
inline void pack_row(const float* w, uint8_t* row, uint16_t* lower, int64_t dim, const uint32_t* word) {
#if ZIGGURAT_WIDE
  if constexpr (is_wide<D>() && has_codes<kFormat>()) {
    const Range range = wide_range_of<D>(w);
    const bool apart = write_ends<kFormat>(row, range, word);
    const float first = half_at(row), last = half_at(row + 2);
    if (apart) wide_fill_codes<D, kFormat>(w, row + kEnds, range, word, first, most<kFormat>() / (last - first));
    else std::memset(row + kEnds, 0, row_bytes<kFormat>(D) - kEnds);
    return;
  }
#endif
  write_row<D, kFormat>(w, row, lower, dim, word);
}

}  // namespace
