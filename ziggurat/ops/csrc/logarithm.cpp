// Logarithms with the same bits on every processor. Twin of `log1p_reference` and `log_reference` in
// ziggurat/ops/logarithm.py, which says why and how.
//
// Additions, multiplications and divisions alone, in the order of the reference; the build sets -ffp-contract=off, so
// that none of them is fused. Whole loops are vectorised by the compiler, which changes no bit of these operations.

#include <cstdint>
#include <cstring>

namespace {

constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;
constexpr double kSqrtHalf = 0.70710678118654752440;
constexpr double kSmall = 0.41421;

// f and k with u = 2^k * (1 + f), of a normal positive number.
inline void reduce(double u, double* f, double* k) {
  int64_t bits;
  std::memcpy(&bits, &u, 8);
  const int64_t exponent = (bits >> 52) - 1022;
  bits = (bits & 0xFFFFFFFFFFFFFll) | (1022ll << 52);  // in [0.5, 1)
  double mantissa;
  std::memcpy(&mantissa, &bits, 8);
  const bool low = mantissa < kSqrtHalf;
  *f = (low ? 2.0 * mantissa : mantissa) - 1.0;
  *k = static_cast<double>(exponent) - (low ? 1.0 : 0.0);
}

inline double sum(double f, double k, double lost) {
  const double half_square = 0.5 * f * f;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double series = 1.479819860511658591e-01;
  series = 1.531383769920937332e-01 + z * series;
  series = 1.818357216161805012e-01 + z * series;
  series = 2.222219843214978396e-01 + z * series;
  series = 2.857142874366239149e-01 + z * series;
  series = 3.999999999940941908e-01 + z * series;
  series = 6.666666666666735130e-01 + z * series;
  series = z * series;
  return k * kLn2High - ((half_square - (s * (half_square + series) + (k * kLn2Low + lost))) - f);
}

}  // namespace

extern "C" {

// values: finite numbers >= 0, or NaN.
void ziggurat_log1p(const double* __restrict values, int64_t size, double* __restrict out) {
  for (int64_t i = 0; i < size; ++i) {
    const double x = values[i];
    const double u = 1.0 + x;
    double f, k;
    reduce(u, &f, &k);
    const double lost = (u >= 2.0 ? 1.0 - (u - x) : x - (u - 1.0)) / u;
    const bool small = x < kSmall;
    const double found = sum(small ? x : f, small ? 0.0 : k, small ? 0.0 : lost);
    out[i] = x == x ? found : x;
  }
}

// values: finite numbers >= 1, or NaN.
void ziggurat_log(const double* __restrict values, int64_t size, double* __restrict out) {
  for (int64_t i = 0; i < size; ++i) {
    const double x = values[i];
    double f, k;
    reduce(x, &f, &k);
    const double found = sum(f, k, 0.0);
    out[i] = x == x ? found : x;
  }
}

}  // extern "C"
