// Eight floats as a vector, and bfloat16: the upper 16 bits of a float.
#pragma once
#include <cstdint>
#include <cstring>

typedef float Lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t Halves __attribute__((vector_size(16), aligned(2), may_alias));
constexpr int kLanes = 8;

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline void store_bfloat16(uint16_t* to, Lanes x) {
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits is_nan = (Bits)((bits & 0x7fffffffu) > 0x7f800000u);
  const Bits result = (is_nan & 0x7fc0u) | (~is_nan & rounded);
  *reinterpret_cast<Halves*>(to) = __builtin_convertvector(result, Halves);
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline Lanes load_bfloat16(const uint16_t* from) {
  return (Lanes)(__builtin_convertvector(*reinterpret_cast<const Halves*>(from), Bits) << 16);
}

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
