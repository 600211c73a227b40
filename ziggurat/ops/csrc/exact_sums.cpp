// Exact sums of numbers and of their squares. Twin of `exact_sums_reference` in ziggurat/ops/exact_sums.py.
//
// A double is an integer of 53 bits times a power of two. The integers of one power are added up as whole numbers, in two
// halves that do not overflow, so nothing is ever rounded, and the order of the numbers does not matter.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr double kSmallest = 0x1p-400;  // squares of smaller numbers are nothing

inline void add(double value, int64_t* low, int64_t* high) {
  uint64_t bits;
  std::memcpy(&bits, &value, 8);
  const uint64_t exponent = bits >> 52 & 0x7FF;
  const int64_t mantissa = static_cast<int64_t>((bits & 0xFFFFFFFFFFFFFull) | (exponent ? 1ull << 52 : 0));
  const int64_t sign = static_cast<int64_t>(bits) >> 63;  // 0 or -1
  low[exponent] += ((mantissa & 0xFFFFFFFFll) ^ sign) - sign;
  high[exponent] += ((mantissa >> 32) ^ sign) - sign;
}

}  // namespace

extern "C" {

// sums, squares: (2, 2048), low halves above high ones, by the exponent's bits; added to. Finite numbers only.
void ziggurat_exact_sums(const double* values, int64_t size, int64_t* sums, int64_t* squares) {
  for (int64_t i = 0; i < size; ++i) {
    const double value = values[i];
    add(value, sums, sums + 2048);
    if (std::fabs(value) < kSmallest) continue;
    const double square = value * value;
    add(square, squares, squares + 2048);
    add(std::fma(value, value, -square), squares, squares + 2048);
  }
}

}  // extern "C"
