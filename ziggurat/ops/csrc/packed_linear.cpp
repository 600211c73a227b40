// Linear maps whose weights are integers in blocks. Twin of `linear_reference` in ziggurat/numerics/linear.py.
//
//     panel    16 outputs, one in each lane of a register, or of two or four registers where these are narrower
//     block    16 inputs of a panel: 4 steps of 16 x 4 bytes (narrow), or 8 steps of 16 x 2 words of 16 bits (wide)
//
// A narrow weight has 128 added, because VNNI multiplies unsigned bytes by signed ones; the sum of a block begins at
// -128 times the sum of its activations, which takes that off again. Sums of integers are exact and a scale of a block
// is a power of two, so all instructions give the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "registers.h"
#include "unaligned.h"

namespace {

constexpr int64_t kLanes = 16;     // outputs of a panel
constexpr int64_t kBlock = 16;     // inputs of a block
constexpr int64_t kPanels = 4;     // that a thread takes at a time
constexpr float kLeastLargest = 1e-30f;

// As CLinear in ziggurat/numerics/linear.py.
struct Linear {
  const void* codes;
  const uint8_t* exponents;  // of blocks, or null: a scale for each output
  const float* scales;       // of outputs, or null
  const float* bias;         // or null
  int64_t outputs, inputs, num_blocks, is_wide;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int64_t kVector = 16;  // outputs in a register
typedef __m512i Ints;
typedef __m512 Floats;
inline Ints all(int32_t value) { return _mm512_set1_epi32(value); }
inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats floats_of(Ints value) { return _mm512_cvtepi32_ps(value); }
inline Ints load(const void* from) { return _mm512_loadu_si512(from); }
inline Floats load_floats(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
inline Floats product(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
// The product is exact, so it makes no difference that it is not rounded.
inline Floats sum_with_scaled(Floats sum, Floats value, Floats scale) { return _mm512_fmadd_ps(value, scale, sum); }
inline Floats powers_of_two(const uint8_t* exponents) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(exponents));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 23));
}
typedef int8_t Narrow;  // an activation that meets a narrow weight
inline int64_t place_of(int64_t input) { return input; }
template <bool is_wide>
inline Ints sum_with_dot(Ints sum, Ints weights, const int32_t* activations) {
  if (is_wide) return _mm512_dpwssd_epi32(sum, weights, all(*activations));
  return _mm512_dpbusd_epi32(sum, weights, all(*activations));
}
constexpr int64_t kPath = 2;
#else
// Without VNNI wider registers are not used: the products below are those of AVX2.
constexpr int64_t kVector = std::min<int64_t>(kRegisterBytes, 32) / 4;
typedef int32_t Ints __attribute__((vector_size(4 * kVector)));
typedef float Floats __attribute__((vector_size(4 * kVector)));
inline Ints all(int32_t value) { return Ints{} + value; }
inline Floats zeros() { return Floats{}; }
inline Floats floats_of(Ints value) { return __builtin_convertvector(value, Floats); }
inline Ints load(const void* from) { return load_unaligned<Ints>(from); }
inline Floats load_floats(const float* from) { return load_unaligned<Floats>(from); }
inline void store(float* to, Floats value) { store_unaligned(to, value); }
inline Floats product(Floats a, Floats b) { return a * b; }
inline Floats sum_with_scaled(Floats sum, Floats value, Floats scale) { return sum + value * scale; }
inline Floats powers_of_two(const uint8_t* exponents) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(exponents));
  return (Floats)_mm256_slli_epi32(_mm256_cvtepu8_epi32(bytes), 23);
#else
  const Ints bits{exponents[0], exponents[1], exponents[2], exponents[3]};
  return (Floats)(bits << 23);
#endif
}
// Adds the products of both words of 16 bits in each lane.
inline Ints sum_with_words(Ints sum, Ints words, int32_t activations) {
#if defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)words, _mm256_set1_epi32(activations));
#elif defined(__SSE2__)
  return sum + (Ints)_mm_madd_epi16((__m128i)words, _mm_set1_epi32(activations));
#else
  const Ints low = (words << 16) >> 16;
  const Ints high = words >> 16;
  return sum + low * int32_t(int16_t(activations)) + high * (activations >> 16);
#endif
}
// Without VNNI bytes are multiplied as words of 16 bits: first those of even inputs of a step, then those of odd ones, and
// so activations lie, which serve many outputs.
typedef int16_t Narrow;
inline int64_t place_of(int64_t input) { return (input & ~int64_t(3)) | (input & 1) << 1 | (input >> 1 & 1); }
template <bool is_wide>
inline Ints sum_with_dot(Ints sum, Ints weights, const int32_t* activations) {
  if (is_wide) return sum_with_words(sum, weights, *activations);
  sum = sum_with_words(sum, weights & 0x00FF00FF, activations[0]);
  return sum_with_words(sum, (weights >> 8) & 0x00FF00FF, activations[1]);
}
#if defined(__AVX2__)
constexpr int64_t kPath = 1;
#else
constexpr int64_t kPath = 0;
#endif
#endif

// Rows of activations as integers, with the sums that their blocks begin at.
struct Activations {
  std::vector<int32_t> words;   // rows x blocks x steps of a block: four bytes or words of 16 bits
  std::vector<int32_t> begins;  // rows x blocks; of all inputs, in the first one, where outputs have one scale
  std::vector<float> scales;    // NaN where a row has a number that is not finite
};

// Consecutive rows begin `stride` numbers apart.
template <typename Code, bool is_wide>
void quantise_rows(const float* x, int64_t batch, int64_t stride, const Linear& map, Activations& found) {
  constexpr int kMost = is_wide ? 32767 : 127;
  const int64_t padded = map.num_blocks * kBlock;
  const int64_t row_words = padded * int64_t(sizeof(Code)) / 4;
  found.words.assign(batch * row_words, 0);
  found.begins.assign(batch * map.num_blocks, 0);
  found.scales.resize(batch);
  for (int64_t row = 0; row < batch; ++row) {
    const float* from = x + row * stride;
    int32_t largest_bits = 0;  // magnitudes are ordered as their bits are, NaN above all
    for (int64_t i = 0; i < map.inputs; ++i) {
      int32_t bits;
      std::memcpy(&bits, from + i, 4);
      largest_bits = std::max(largest_bits, bits & 0x7FFFFFFF);
    }
    float largest;
    std::memcpy(&largest, &largest_bits, 4);
    if (!(largest <= std::numeric_limits<float>::max())) {
      found.scales[row] = std::numeric_limits<float>::quiet_NaN();
      continue;
    }
    largest = std::max(largest, kLeastLargest);
    const float inverse = float(kMost) / largest;
    found.scales[row] = largest / float(kMost);
    Code* to = reinterpret_cast<Code*>(found.words.data() + row * row_words);
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, ties to even.
    for (int64_t i = 0; i < map.inputs; ++i) {
      const int32_t code = int32_t((from[i] * inverse + 12582912.0f) - 12582912.0f);
      to[is_wide ? i : place_of(i)] = Code(code);
    }
    if (is_wide) continue;  // wide weights have nothing added
    for (int64_t block = 0; block < map.num_blocks; ++block) {
      int32_t sum = 0;
      for (int64_t i = 0; i < kBlock; ++i) sum += to[block * kBlock + i];
      found.begins[row * map.num_blocks + (map.exponents ? block : 0)] -= 128 * sum;
    }
  }
}

// `lane`: the first output of each panel that is in the register.
template <bool is_wide, bool is_blocked, int kRows, int kColumns>
void multiply_tile(const Linear& map, const Activations& x, int64_t row, int64_t panel, int64_t lane, float* out) {
  constexpr int64_t kSteps = is_wide ? 8 : 4;
  constexpr int64_t kWords = is_wide ? 1 : sizeof(Narrow);  // of activations a step
  const int64_t num_blocks = map.num_blocks;
  const int64_t row_words = num_blocks * kSteps * kWords;
  const int32_t* words = x.words.data() + row * row_words;
  const int32_t* begins = x.begins.data() + row * num_blocks;
  const char* codes = static_cast<const char*>(map.codes) + panel * num_blocks * kSteps * 64 + lane * 4;
  Ints exact[kRows][kColumns];
  Floats sums[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kColumns; ++p) {
      sums[r][p] = zeros();
      exact[r][p] = all(begins[r * num_blocks]);
    }
  }
  for (int64_t block = 0; block < num_blocks; ++block) {
#pragma GCC unroll 4
    for (int p = 0; p < kColumns; ++p) {
      if (is_blocked) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) exact[r][p] = all(begins[r * num_blocks + block]);
      }
      const char* from = codes + (p * num_blocks + block) * kSteps * 64;
#pragma GCC unroll 8
      for (int64_t step = 0; step < kSteps; ++step) {
        const Ints weights = load(from + step * 64);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          exact[r][p] = sum_with_dot<is_wide>(exact[r][p], weights, words + r * row_words + (block * kSteps + step) * kWords);
        }
      }
      if (is_blocked) {
        const Floats scale = powers_of_two(map.exponents + ((panel + p) * num_blocks + block) * kLanes + lane);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][p] = sum_with_scaled(sums[r][p], floats_of(exact[r][p]), scale);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kColumns; ++p) {
      const int64_t first = (panel + p) * kLanes + lane;
      Floats value = sums[r][p];
      if (!is_blocked) value = product(floats_of(exact[r][p]), load_floats(map.scales + first));
      float found[kVector];
      store(found, value);
      float* to = out + (row + r) * map.outputs + first;
      const int64_t count = std::min(kVector, map.outputs - first);
      for (int64_t i = 0; i < count; ++i) {
        const float scaled = found[i] * x.scales[row + r];
        to[i] = map.bias ? scaled + map.bias[first + i] : scaled;
      }
    }
  }
}

template <bool is_wide, bool is_blocked, int kRows, int kColumns>
void multiply_panels(const Linear& map, const Activations& x, int64_t row, int64_t panel, int64_t end, float* out) {
  for (; panel + kColumns <= end; panel += kColumns) {
    for (int64_t lane = 0; lane < kLanes; lane += kVector)
      multiply_tile<is_wide, is_blocked, kRows, kColumns>(map, x, row, panel, lane, out);
  }
  for (; panel < end; ++panel) {
    for (int64_t lane = 0; lane < kLanes; lane += kVector)
      multiply_tile<is_wide, is_blocked, kRows, 1>(map, x, row, panel, lane, out);
  }
}

// Few rows take several panels at once: a sum waits for the one before it.
template <bool is_wide, bool is_blocked>
void multiply(const Linear& map, const Activations& x, int64_t batch, float* out, int threads) {
  const int64_t num_panels = (map.outputs + kLanes - 1) / kLanes;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t panel = 0; panel < num_panels; panel += kPanels) {
    const int64_t end = std::min(panel + kPanels, num_panels);
    int64_t row = 0;
    // Of 32 registers; where there are 16, sums of four rows fill them.
    if (kVector == 16) {
      for (; row + 8 <= batch; row += 8) multiply_panels<is_wide, is_blocked, 8, 1>(map, x, row, panel, end, out);
    }
    constexpr int kColumns = kVector == 16 ? 2 : 1;
    for (; row + 4 <= batch; row += 4) multiply_panels<is_wide, is_blocked, 4, kColumns>(map, x, row, panel, end, out);
    for (; row < batch; ++row) multiply_panels<is_wide, is_blocked, 1, 4>(map, x, row, panel, end, out);
  }
}

void multiply_rows(const Linear& map, const float* x, int64_t batch, int64_t stride, float* out, int64_t num_threads) {
  const int threads = batch * map.outputs * map.inputs < (1 << 20) ? 1 : int(num_threads);
  static thread_local Activations activations;  // its memory serves the next call too
  if (map.is_wide) {
    quantise_rows<int16_t, true>(x, batch, stride, map, activations);
    multiply<true, true>(map, activations, batch, out, threads);
  } else {
    quantise_rows<Narrow, false>(x, batch, stride, map, activations);
    if (map.exponents) {
      multiply<false, true>(map, activations, batch, out, threads);
    } else {
      multiply<false, false>(map, activations, batch, out, threads);
    }
  }
}

}  // namespace

extern "C" {

// Plain 0, AVX2 1, AVX-512 VNNI 2.
int64_t ziggurat_linear_path() { return kPath; }

// x: (batch, inputs); out: (batch, outputs).
void ziggurat_linear(const Linear* map, const float* x, int64_t batch, float* out, int64_t num_threads) {
  multiply_rows(*map, x, batch, map->inputs, out, num_threads);
}

// Maps one after the other, each but the last followed by max(y, 0), and the last one too if it is asked for. Rows of x
// begin `stride` numbers apart.
void ziggurat_linear_chain(const Linear* const* maps, int64_t num_maps, int64_t relu_last, const float* x, int64_t batch,
                           int64_t stride, float* out, int64_t num_threads) {
  static thread_local std::vector<float> hidden[2];  // their memory serves the next call too
  for (int64_t i = 0; i < num_maps; ++i) {
    const Linear& map = *maps[i];
    const int64_t size = batch * map.outputs;
    const bool is_last = i + 1 == num_maps;
    std::vector<float>& room = hidden[i % 2];  // the other one is read
    if (!is_last && int64_t(room.size()) < size) room.resize(size);
    float* to = is_last ? out : room.data();
    multiply_rows(map, x, batch, stride, to, num_threads);
    if (!is_last || relu_last) {
      for (int64_t k = 0; k < size; ++k) to[k] = to[k] < 0.0f ? 0.0f : to[k];  // NaN stays, as torch has it
    }
    x = to;
    stride = map.outputs;
  }
}

}  // extern "C"
