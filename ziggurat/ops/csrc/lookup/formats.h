// What rows are kept as, and the numbers of a row: FP32 from halves or codes. Twin of the formats in ops/row_formats/.
#pragma once
#include "parts.h"

namespace {

constexpr int64_t kBfloat16 = 1, kSplit = 2, kInt8 = 3, kInt4 = 4;  // formats
constexpr int64_t kEnds = 4;                                        // bytes of the two ends of a row of codes

typedef _Float16 Half;
typedef int32_t Ints __attribute__((vector_size(32), aligned(4), may_alias));

template <int64_t kFormat>
constexpr bool has_codes() { return kFormat == kInt8 || kFormat == kInt4; }

template <int64_t kFormat>
constexpr float most() { return kFormat == kInt8 ? 255.0f : 15.0f; }

template <int64_t kFormat>
inline int64_t row_bytes(int64_t dim) {
  if (kFormat == kInt8) return dim + kEnds;
  if (kFormat == kInt4) return (dim + 1) / 2 + kEnds;
  return 2 * dim;
}

inline Lanes all(float x) { return Lanes{x, x, x, x, x, x, x, x}; }

// Of numbers that are none of them NaN.
#ifdef __AVX2__
inline Lanes lesser(Lanes a, Lanes b) { return (Lanes)_mm256_min_ps((__m256)a, (__m256)b); }
inline Lanes greater(Lanes a, Lanes b) { return (Lanes)_mm256_max_ps((__m256)a, (__m256)b); }
inline Bits larger(Bits a, Bits b) { return (Bits)_mm256_max_epu32((__m256i)a, (__m256i)b); }
inline Bits widen_signed(const uint16_t* from) {
  return (Bits)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
#else
inline Lanes lesser(Lanes a, Lanes b) { return a < b ? a : b; }
inline Lanes greater(Lanes a, Lanes b) { return a > b ? a : b; }
inline Bits larger(Bits a, Bits b) { return a > b ? a : b; }
inline Bits widen_signed(const uint16_t* from) { return (Bits)((Ints)(widen(from) << 16) >> 16); }
#endif
inline float least(Lanes x) {
  const float a = std::min(std::min(x[0], x[4]), std::min(x[2], x[6]));
  return std::min(a, std::min(std::min(x[1], x[5]), std::min(x[3], x[7])));
}
inline uint32_t largest(Bits x) {
  const uint32_t a = std::max(std::max(x[0], x[4]), std::max(x[2], x[6]));
  return std::max(a, std::max(std::max(x[1], x[5]), std::max(x[3], x[7])));
}
inline Bits chosen(Bits mask, Bits a, Bits b) { return (mask & a) | (~mask & b); }

// ---------------------------------------------------------------- eight codes, to and from a row

#ifdef __AVX2__  // the compiler's own conversions go through single numbers
inline Bits eight_bytes(const uint8_t* from) {
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline uint64_t to_bytes(Bits x) {  // x < 2^8
  const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
  const __m128i halves = _mm256_castsi256_si128(pairs);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
}
#else
typedef uint8_t Bytes __attribute__((vector_size(8), aligned(1), may_alias));
inline Bits eight_bytes(const uint8_t* from) {
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Bits);
}
inline uint64_t to_bytes(Bits x) {
  uint64_t bytes = 0;
  for (int l = 0; l < kLanes; l++) bytes |= static_cast<uint64_t>(x[l]) << 8 * l;
  return bytes;
}
#endif

template <int64_t kFormat>
inline Bits load_codes(const uint8_t* codes, int64_t d) {
  if (kFormat == kInt8) return eight_bytes(codes + d);
  uint32_t word;
  std::memcpy(&word, codes + d / 2, 4);
  return (Bits{word, word, word, word, word, word, word, word} >> Bits{0, 4, 8, 12, 16, 20, 24, 28}) & 15u;
}

template <int64_t kFormat>
inline void store_codes(uint8_t* codes, int64_t d, Bits x) {
  uint64_t bytes = to_bytes(x);
  if (kFormat == kInt8) {
    std::memcpy(codes + d, &bytes, 8);
    return;
  }
  bytes = (bytes | bytes >> 4) & 0x00FF00FF00FF00FFull;  // two codes a byte, every second byte
  bytes = (bytes | bytes >> 8) & 0x0000FFFF0000FFFFull;
  const uint32_t word = static_cast<uint32_t>(bytes | bytes >> 16);
  std::memcpy(codes + d / 2, &word, 4);
}

// ---------------------------------------------------------------- the numbers of a row

inline float half_at(const uint8_t* from) {
  Half x;
  std::memcpy(&x, from, sizeof(x));
  return static_cast<float>(x);
}

// The numbers of one row, eight or one at a time.
template <int64_t kFormat>
struct Reader {
  const uint8_t* row;
  float low = 0.0f, high = 0.0f, step = 0.0f;
  explicit Reader(const uint8_t* from) : row(from) {
    if (has_codes<kFormat>()) {
      low = half_at(from);
      high = half_at(from + 2);
      step = (high - low) / most<kFormat>();
      row = from + kEnds;
    }
  }
  Lanes some(int64_t d) const { return eight(d); }
  Lanes eight(int64_t d) const {
    if (!has_codes<kFormat>()) return load_bfloat16(reinterpret_cast<const uint16_t*>(row) + d);
    const Bits codes = load_codes<kFormat>(row, d);
    const Lanes x = low + step * __builtin_convertvector((Ints)codes, Lanes);
    const Bits is_last = (Bits)(codes == static_cast<uint32_t>(most<kFormat>()));
    return (Lanes)chosen(is_last, (Bits)all(high), (Bits)x);
  }
  float one(int64_t d) const {
    if (!has_codes<kFormat>()) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * d, 2);
      return from_bfloat16(bits);
    }
    const int code = kFormat == kInt8 ? row[d] : (row[d / 2] >> (d % 2 * 4)) & 15;
    return code == static_cast<int>(most<kFormat>()) ? high : low + step * static_cast<float>(code);
  }
};

template <int D, int64_t kFormat>
void read_row(const uint8_t* row, const uint16_t* lower, int64_t dim, float* w) {
  const int64_t size = D ? D : dim;
  int64_t d = 0;
  if constexpr (kFormat == kSplit) {
    const uint16_t* upper = reinterpret_cast<const uint16_t*>(row);
    for (; d + kLanes <= size; d += kLanes)
      store(w + d, (Lanes)((widen(upper + d) << 16) + widen_signed(lower + d)));
    for (; D == 0 && d < size; d++) {
      const uint32_t bits = (static_cast<uint32_t>(upper[d]) << 16) + static_cast<uint32_t>(static_cast<int16_t>(lower[d]));
      std::memcpy(w + d, &bits, 4);
    }
  } else {
    const Reader<kFormat> reader(row);
    for (; d + kLanes <= size; d += kLanes) store(w + d, reader.eight(d));
    for (; D == 0 && d < size; d++) w[d] = reader.one(d);
  }
}

}  // namespace
