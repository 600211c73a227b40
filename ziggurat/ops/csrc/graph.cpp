// Weighted sums of rows over a graph in CSR form. See ziggurat/ops/graph/propagation.py for what and why.
//
// Each row is added up by one thread, edge after edge, so results do not depend on the number of threads. The sums of a
// row's columns stand in registers while its edges pass by; memory is asked for a few edges ahead.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "bfloat16.h"
#include "memory.h"
#include "registers.h"

namespace {

constexpr int64_t kAhead = 36;       // edges between asking for a row and reading it
constexpr int64_t kTaskEdges = 4096;  // about so many edges are one task of a thread

constexpr int64_t kWide = kRegisterBytes / 4;
typedef float Wide __attribute__((vector_size(4 * kWide), aligned(4), may_alias));
typedef uint32_t WideBits __attribute__((vector_size(4 * kWide), aligned(4), may_alias));
typedef uint16_t WideHalves __attribute__((vector_size(2 * kWide), aligned(2), may_alias));

inline Wide load(const float* from) { return *reinterpret_cast<const Wide*>(from); }
inline void store(float* to, Wide x) { *reinterpret_cast<Wide*>(to) = x; }

inline Wide load(const uint16_t* from) {
#if defined(__AVX512F__)
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return (Wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
#elif defined(__AVX2__)
  return (Wide)load_bfloat16(from);
#else
  return (Wide)(__builtin_convertvector(*reinterpret_cast<const WideHalves*>(from), WideBits) << 16);
#endif
}
inline void store(uint16_t* to, Wide x) {
  const WideBits rounded = nearest_bfloat16((WideBits)x) >> 16;
  *reinterpret_cast<WideHalves*>(to) = __builtin_convertvector(rounded, WideHalves);
}

// Columns 0, 2, 4, … and 1, 3, 5, … of two vectors, and back.
#if defined(__AVX512F__)
inline void part_columns(Wide low, Wide high, Wide* even, Wide* odd) {
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
  *even = (Wide)_mm512_permutex2var_ps((__m512)low, evens, (__m512)high);
  *odd = (Wide)_mm512_permutex2var_ps((__m512)low, odds, (__m512)high);
}
inline void join_columns(Wide even, Wide odd, Wide* low, Wide* high) {
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  *low = (Wide)_mm512_permutex2var_ps((__m512)even, first, (__m512)odd);
  *high = (Wide)_mm512_permutex2var_ps((__m512)even, second, (__m512)odd);
}
#elif defined(__AVX2__)
// The shuffle works in halves of a register, so their quarters are put in order behind it.
template <int kWhich>
inline Wide every_second(Wide low, Wide high) {
  const __m256d mixed = _mm256_castps_pd(_mm256_shuffle_ps((__m256)low, (__m256)high, kWhich));
  return (Wide)_mm256_permute4x64_pd(mixed, 0xd8);
}
inline void part_columns(Wide low, Wide high, Wide* even, Wide* odd) {
  *even = every_second<0x88>(low, high);
  *odd = every_second<0xdd>(low, high);
}
inline void join_columns(Wide even, Wide odd, Wide* low, Wide* high) {
  const __m256 outer = _mm256_unpacklo_ps((__m256)even, (__m256)odd);
  const __m256 inner = _mm256_unpackhi_ps((__m256)even, (__m256)odd);
  *low = (Wide)_mm256_permute2f128_ps(outer, inner, 0x20);
  *high = (Wide)_mm256_permute2f128_ps(outer, inner, 0x31);
}
#else
inline void part_columns(Wide low, Wide high, Wide* even, Wide* odd) {
  *even = Wide{low[0], low[2], high[0], high[2]};
  *odd = Wide{low[1], low[3], high[1], high[3]};
}
inline void join_columns(Wide even, Wide odd, Wide* low, Wide* high) {
  *low = Wide{even[0], odd[0], even[1], odd[1]};
  *high = Wide{even[2], odd[2], even[3], odd[3]};
}
#endif

// Sums of `vectors` vectors of columns, which stand in registers.
template <typename X, int64_t vectors>
struct Sums {
  Wide of[vectors];

  explicit Sums(const float* base) {
    for (int64_t v = 0; v < vectors; ++v) of[v] = base ? load(base + v * kWide) : Wide{};
  }
  void add(float weight, const X* from) {
    for (int64_t v = 0; v < vectors; ++v) of[v] += weight * load(from + v * kWide);
  }
  template <typename Out>
  void write(float scale, Out* out) const {
    for (int64_t v = 0; v < vectors; ++v) store(out + v * kWide, scale * of[v]);
  }
};

// Two columns of BF16 lie in 32 bits: a mask leaves the odd one as a float, a shift the even one. That takes fewer
// instructions than widening each, so even and odd columns have sums of their own until the row is written.
template <int64_t pairs>
struct PairedSums {
  Wide even[pairs], odd[pairs];

  explicit PairedSums(const float* base) {
    for (int64_t p = 0; p < pairs; ++p) {
      even[p] = odd[p] = Wide{};
      if (base) part_columns(load(base + 2 * p * kWide), load(base + (2 * p + 1) * kWide), &even[p], &odd[p]);
    }
  }
  void add(float weight, const uint16_t* from) {
    for (int64_t p = 0; p < pairs; ++p) {
      const WideBits bits = *reinterpret_cast<const WideBits*>(from + 2 * p * kWide);
      even[p] += weight * (Wide)(bits << 16);
      odd[p] += weight * (Wide)(bits & 0xffff0000u);
    }
  }
  void write(float scale, uint16_t* out) const {
    for (int64_t p = 0; p < pairs; ++p) {
      const WideBits evens = nearest_bfloat16((WideBits)(scale * even[p])) >> 16;
      const WideBits odds = nearest_bfloat16((WideBits)(scale * odd[p])) & 0xffff0000u;
      *reinterpret_cast<WideBits*>(out + 2 * p * kWide) = evens | odds;
    }
  }
  void write(float scale, float* out) const {
    for (int64_t p = 0; p < pairs; ++p) {
      Wide low, high;
      join_columns(scale * even[p], scale * odd[p], &low, &high);
      store(out + 2 * p * kWide, low);
      store(out + (2 * p + 1) * kWide, high);
    }
  }
};
template <>
struct Sums<uint16_t, 4> : PairedSums<2> {
  using PairedSums::PairedSums;
};
template <>
struct Sums<uint16_t, 8> : PairedSums<4> {
  using PairedSums::PairedSums;
};

inline float load_one(const float* from) { return *from; }
inline float load_one(const uint16_t* from) { return from_bfloat16(*from); }
inline void store_one(float* to, float x) { *to = x; }
inline void store_one(uint16_t* to, float x) { *to = to_bfloat16(x); }

template <typename X>
inline void ask_for_columns(const X* row, int64_t columns) {
  for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(X)); byte += 64)
    ask_for(reinterpret_cast<const char*>(row) + byte);
}

struct Edges {
  const int32_t* columns;
  const float* weights;
  int64_t size;      // of this row
  int64_t readable;  // from `columns` on there are so many, of this row and those behind it
};

// Which edges of a long row take part; see edge_sampling.py, whose numbers these are.
struct Sampling {
  int64_t width;     // 0: all edges
  int64_t strategy;  // 0 bucket, 1 fast_rand
  int64_t rescales;
  int64_t key;

  // The edge that a row of n edges begins with.
  int64_t first(int64_t row, int64_t n) const {
    if (!key) return 0;
    uint64_t z = static_cast<uint64_t>(key) + static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return static_cast<int64_t>((z ^ z >> 31) >> 33) % n;
  }
};

constexpr int64_t kPrime = 2147483647;

// out = scale * (base + sum of weight * x[column]) for `vectors` vectors of columns.
template <int64_t vectors, typename X, typename Out>
inline void add_up(const Edges& edges, const X* x, int64_t stride, const float* base, float scale, Out* out) {
  Sums<X, vectors> sums(base);
  const int64_t asked = std::min(edges.size, edges.readable - kAhead);
  int64_t e = 0;
  for (; e < asked; ++e) {
    ask_for_columns(x + static_cast<int64_t>(edges.columns[e + kAhead]) * stride, vectors * kWide);
    sums.add(edges.weights[e], x + static_cast<int64_t>(edges.columns[e]) * stride);
  }
  for (; e < edges.size; ++e) sums.add(edges.weights[e], x + static_cast<int64_t>(edges.columns[e]) * stride);
  sums.write(scale, out);
}

template <typename X, typename Out>
void one_row(const Edges& edges, const X* x, int64_t dim, const float* base, float scale, Out* out) {
  int64_t c = 0;
  for (; c + 8 * kWide <= dim; c += 8 * kWide)
    add_up<8>(edges, x + c, dim, base ? base + c : nullptr, scale, out + c);
  if (c + 4 * kWide <= dim) {
    add_up<4>(edges, x + c, dim, base ? base + c : nullptr, scale, out + c);
    c += 4 * kWide;
  }
  for (; c + kWide <= dim; c += kWide)
    add_up<1>(edges, x + c, dim, base ? base + c : nullptr, scale, out + c);
  for (; c < dim; ++c) {
    float sum = base ? base[c] : 0.0f;
    for (int64_t e = 0; e < edges.size; ++e)
      sum += edges.weights[e] * load_one(x + static_cast<int64_t>(edges.columns[e]) * dim + c);
    store_one(out + c, scale * sum);
  }
}

// Room of one thread for the edges that take part of a row.
struct Chosen {
  std::vector<int32_t> columns;
  std::vector<float> weights;

  explicit Chosen(int64_t width) : columns(width), weights(width) {}

  Edges of(const Edges& all, int64_t row, const Sampling& sampling) {
    const int64_t width = sampling.width, n = all.size;
    const float factor = sampling.rescales ? static_cast<float>(n) / static_cast<float>(width) : 1.0f;
    // Both formulas from one k to the next, without a division: bucket steps by n / W, its remainder carried along.
    const int64_t step = sampling.strategy ? kPrime % n : n / width;
    const int64_t rest = sampling.strategy ? 0 : n % width;
    int64_t e = sampling.first(row, n), carried = 0;
    for (int64_t k = 0; k < width; ++k) {
      columns[k] = all.columns[e];
      weights[k] = all.weights[e] * factor;
      e += step;
      carried += rest;
      if (carried >= width) {
        carried -= width;
        ++e;
      }
      if (e >= n) e -= n;
    }
    return {columns.data(), weights.data(), width, width};
  }
};

// rows: numbers of the rows that are wanted, or null for all of them. base and out have one row for each of those.
template <typename X, typename Out>
void propagate(const int64_t* offsets, const int32_t* columns, const float* weights, int64_t num_edges, const X* x,
               int64_t dim, const int64_t* rows, int64_t num_rows, const float* base, float scale, Out* out,
               const Sampling& sampling, int64_t threads) {
  // Tasks of about equally many edges, a row is never divided: its sum has one order.
  const int64_t wanted = rows ? 64 : num_rows * kTaskEdges / std::max<int64_t>(num_edges, 1);
  const int64_t task_rows = std::clamp<int64_t>(wanted, 1, 4096);
#pragma omp parallel num_threads(threads)
  {
    // Of the rows that are cut none has more chosen edges than there are edges.
    Chosen chosen(std::min(sampling.width, num_edges));
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < num_rows; first += task_rows) {
      for (int64_t i = first; i < std::min(num_rows, first + task_rows); ++i) {
        const int64_t row = rows ? rows[i] : i;
        const int64_t begin = offsets[row];
        Edges edges{columns + begin, weights + begin, offsets[row + 1] - begin, num_edges - begin};
        if (sampling.width && edges.size > sampling.width) edges = chosen.of(edges, row, sampling);
        one_row(edges, x, dim, base ? base + i * dim : nullptr, scale, out + i * dim);
      }
    }
  }
}

}  // namespace

extern "C" {

#define PROPAGATE(name, X, Out)                                                                                      \
  void name(const int64_t* offsets, const int32_t* columns, const float* weights, int64_t num_edges, const X* x,     \
            int64_t dim, const int64_t* rows, int64_t num_rows, const float* base, float scale, Out* out,            \
            int64_t width, int64_t strategy, int64_t rescales, int64_t key, int64_t threads) {                       \
    const Sampling sampling{width, strategy, rescales, key};                                                         \
    propagate(offsets, columns, weights, num_edges, x, dim, rows, num_rows, base, scale, out, sampling, threads);    \
  }

PROPAGATE(ziggurat_propagate_f32_f32, float, float)
PROPAGATE(ziggurat_propagate_bf16_bf16, uint16_t, uint16_t)
PROPAGATE(ziggurat_propagate_bf16_f32, uint16_t, float)
}
