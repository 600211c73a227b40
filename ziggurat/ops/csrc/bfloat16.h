// Eight floats as a vector, and bfloat16: the upper 16 bits of a float.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(16), aligned(2), may_alias));
constexpr int kLanes = 8;

// Eight times 16 bits to 32 and back. Compilers do it in halves, or one by one; AVX2 has instructions for it.
#ifdef __AVX2__
inline Bits widen(const uint16_t* from) {
  return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void narrow(uint16_t* to, Bits x) {  // x < 2^16
  const __m256i packed = _mm256_packus_epi32((__m256i)x, (__m256i)x);  // 0 … 3 twice, 4 … 7 twice
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}
#else
inline Bits widen(const uint16_t* from) {
  return __builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits);
}
inline void narrow(uint16_t* to, Bits x) { *reinterpret_cast<Halves*>(to) = __builtin_convertvector(x, Halves); }
#endif

// Round the bits of floats to the nearest bfloat16, ties to even, in the upper 16 bits; NaN stays NaN. The lower ones mean
// nothing.
template <typename B>
inline B nearest_bfloat16(B bits) {
  const B nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
  const B is_nan = (B)((bits & 0x7fffffffu) > 0x7f800000u);
  return (is_nan & 0x7fc00000u) | (~is_nan & nearest);
}
inline void store_bfloat16(uint16_t* to, Lanes x) { narrow(to, nearest_bfloat16((Bits)x) >> 16); }

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline Lanes load_bfloat16(const uint16_t* from) {
  return (Lanes)(widen(from) << 16);
}

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
