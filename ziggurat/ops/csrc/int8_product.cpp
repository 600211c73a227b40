// Operands of a product as INT8, and its INT32 sums as numbers again. Twin of the reference in ziggurat/precision/int8.py.
//
//     codes   round(x / scale), scale = largest magnitude of a row or column over 127, 1 where all are zero
//     result  float(sum) * scale of its row * scale of its column
//
// A row or column with a number that is not finite has the scale NaN and codes of 0, so that its products are NaN.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr float kMost = 127.0f;
constexpr float kRounds = 12582912.0f;  // adding and subtracting 1.5 * 2^23 rounds to an integer, ties to even

inline float value_of(const float* x) { return *x; }
inline float value_of(const uint16_t* x) {  // BF16
  const uint32_t bits = uint32_t(*x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline int32_t magnitude_bits(float x) {  // magnitudes are ordered as their bits are, NaN above all
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7FFFFFFF;
}

inline float scale_of(int32_t largest_bits) {
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  if (!(largest <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
  return largest > 0 ? largest / kMost : 1.0f;
}

inline int8_t code_of(float x, float scale) { return int8_t(int32_t((x / scale + kRounds) - kRounds)); }

template <typename T>
void rows_to_codes(const T* x, int64_t rows, int64_t columns, int8_t* codes, float* scales, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * columns;
    int8_t* to = codes + row * columns;
    int32_t largest = 0;
    for (int64_t i = 0; i < columns; ++i) largest = std::max(largest, magnitude_bits(value_of(from + i)));
    const float scale = scales[row] = scale_of(largest);
    if (!(scale <= std::numeric_limits<float>::max()) || scale == 0) {
      std::memset(to, 0, columns);
      continue;
    }
    for (int64_t i = 0; i < columns; ++i) to[i] = code_of(value_of(from + i), scale);
  }
}

template <typename T>
void columns_to_codes(const T* x, int64_t rows, int64_t columns, int8_t* codes, float* scales, int64_t threads) {
  constexpr int64_t kTile = 256;  // columns of a task: their scales stay in the nearest cache
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t first = 0; first < columns; first += kTile) {
    const int64_t count = std::min(kTile, columns - first);
    int32_t largest[kTile] = {};
    float scale[kTile];
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x + row * columns + first;
      for (int64_t i = 0; i < count; ++i) largest[i] = std::max(largest[i], magnitude_bits(value_of(from + i)));
    }
    for (int64_t i = 0; i < count; ++i) {
      const float found = scales[first + i] = scale_of(largest[i]);
      // Divided by an infinity all finite numbers are codes of 0.
      scale[i] = found > 0 ? found : std::numeric_limits<float>::infinity();
    }
    for (int64_t row = 0; row < rows; ++row) {
      const T* from = x + row * columns + first;
      int8_t* to = codes + row * columns + first;
      for (int64_t i = 0; i < count; ++i) {
        const float value = value_of(from + i);
        const bool is_finite = magnitude_bits(value) < 0x7F800000;
        to[i] = code_of(is_finite ? value : 0.0f, scale[i]);
      }
    }
  }
}

}  // namespace

extern "C" {

void ziggurat_int8_codes(const void* x, int64_t is_bf16, int64_t rows, int64_t columns, int64_t by_column, int8_t* codes,
                         float* scales, int64_t threads) {
  const auto* halves = static_cast<const uint16_t*>(x);
  const auto* floats = static_cast<const float*>(x);
  if (by_column) {
    if (is_bf16) columns_to_codes(halves, rows, columns, codes, scales, threads);
    else columns_to_codes(floats, rows, columns, codes, scales, threads);
  } else {
    if (is_bf16) rows_to_codes(halves, rows, columns, codes, scales, threads);
    else rows_to_codes(floats, rows, columns, codes, scales, threads);
  }
}

void ziggurat_int8_scaled(const int32_t* sums, const float* of_rows, const float* of_columns, int64_t rows,
                          int64_t columns, int64_t is_bf16, void* out, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* from = sums + row * columns;
    const float scale = of_rows[row];
    if (!is_bf16) {
      float* to = static_cast<float*>(out) + row * columns;
      for (int64_t i = 0; i < columns; ++i) to[i] = (float(from[i]) * scale) * of_columns[i];
      continue;
    }
    uint16_t* to = static_cast<uint16_t*>(out) + row * columns;
    for (int64_t i = 0; i < columns; ++i) {
      const float value = (float(from[i]) * scale) * of_columns[i];
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const uint32_t nearest = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
      to[i] = uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : nearest);
    }
  }
}
}
