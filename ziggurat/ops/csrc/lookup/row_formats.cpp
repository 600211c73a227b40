// Pooled lookups and exact updates of rows that are kept in few bits. Twin of ziggurat/ops/row_formats/reference.py and
// noise.py, which define every bit of it; the rule is that of rules.h.
//
//     lookup   codes or halves of a row ──► eight floats at a time ──► the sum, in registers
//     update   row ──► floats in the L1 cache ──► the rule ──► rounded ──► row
//
// A row is decoded where it is added, so a lookup reads the bytes of the format and writes nothing but the sum. Each row
// of an update belongs to one thread, and its noise is counted: threads do not change a bit.

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "parts.h"
#include "rules.h"

namespace {

constexpr int64_t kBfloat16 = 1, kSplit = 2, kInt8 = 3, kInt4 = 4;  // formats
constexpr int64_t kEnds = 4;                                        // bytes of the two ends of a row of codes

typedef _Float16 Half;

#ifdef __AVX2__  // the compiler's own conversion from eight bytes goes through single numbers
inline Bits eight_bytes(const uint8_t* from) {
  return (Bits)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
#else
typedef uint8_t Bytes __attribute__((vector_size(8), aligned(1), may_alias));
inline Bits eight_bytes(const uint8_t* from) {
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Bits);
}
#endif

inline float half_at(const uint8_t* from) {
  Half x;
  std::memcpy(&x, from, sizeof(x));
  return static_cast<float>(x);
}

template <int64_t kFormat>
constexpr float most() { return kFormat == kInt8 ? 255.0f : 15.0f; }

template <int64_t kFormat>
inline int64_t row_bytes(int64_t dim) {
  if (kFormat == kInt8) return dim + kEnds;
  if (kFormat == kInt4) return (dim + 1) / 2 + kEnds;
  return 2 * dim;
}

// The numbers of one row, eight or one at a time.
template <int64_t kFormat>
struct Reader {
  const uint8_t* row;
  float low = 0.0f, high = 0.0f, step = 0.0f;
  explicit Reader(const uint8_t* from) : row(from) {
    if (kFormat == kInt8 || kFormat == kInt4) {
      low = half_at(from);
      high = half_at(from + 2);
      step = (high - low) / most<kFormat>();
      row = from + kEnds;
    }
  }
  Lanes eight(int64_t d) const {
    if (kFormat == kBfloat16 || kFormat == kSplit) return load_bfloat16(reinterpret_cast<const uint16_t*>(row) + d);
    Bits codes;
    if (kFormat == kInt8) {
      codes = eight_bytes(row + d);
    } else {
      uint32_t word;
      std::memcpy(&word, row + d / 2, 4);
      codes = (Bits{word, word, word, word, word, word, word, word} >> Bits{0, 4, 8, 12, 16, 20, 24, 28}) & 15u;
    }
    const Lanes x = low + step * __builtin_convertvector(codes, Lanes);
    const Bits is_last = (Bits)(codes == static_cast<uint32_t>(most<kFormat>()));
    const Lanes top = {high, high, high, high, high, high, high, high};
    return (Lanes)((is_last & (Bits)top) | (~is_last & (Bits)x));
  }
  float one(int64_t d) const {
    if (kFormat == kBfloat16 || kFormat == kSplit) {
      uint16_t bits;
      std::memcpy(&bits, row + 2 * d, 2);
      return from_bfloat16(bits);
    }
    const int code = kFormat == kInt8 ? row[d] : (row[d / 2] >> (d % 2 * 4)) & 15;
    return code == static_cast<int>(most<kFormat>()) ? high : low + step * static_cast<float>(code);
  }
};

// Rows in a format, for the lookup of parts.h.
template <int D, int64_t kFormat>
struct Packed {
  const uint8_t* rows;
  int64_t dim;
  const uint8_t* at(int64_t row) const { return rows + row * row_bytes<kFormat>(D ? D : dim); }
  void prefetch(int64_t row) const {
    const int64_t size = row_bytes<kFormat>(D ? D : dim);
    for (int64_t byte = 0; byte < size + 63; byte += 64) __builtin_prefetch(at(row) + std::min(byte, size - 1), 0, 2);
  }
  void set(Sum<D>& sum, int64_t row) const {
    const Reader<kFormat> reader(at(row));
    if constexpr (D > 0) {
      for (int l = 0; l < Sum<D>::kCount; l++) sum.lanes[l] = reader.eight(l * kLanes);
    } else {
      for (int64_t d = 0; d < dim; d++) sum.sum[d] = reader.one(d);
    }
  }
  void add(Sum<D>& sum, int64_t row) const {
    const Reader<kFormat> reader(at(row));
    if constexpr (D > 0) {
      for (int l = 0; l < Sum<D>::kCount; l++) sum.lanes[l] += reader.eight(l * kLanes);
    } else {
      for (int64_t d = 0; d < dim; d++) sum.sum[d] += reader.one(d);
    }
  }
};

// ---------------------------------------------------------------- noise and rounding

inline uint32_t noise(uint32_t word, int64_t column) {
  uint32_t z = word + static_cast<uint32_t>(column + 1) * 0x9E3779B9u;
  z ^= z >> 16;
  z *= 0x7FEB352Du;
  z ^= z >> 15;
  z *= 0x846CA68Bu;
  return z ^ z >> 16;
}

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
Range range_of(const float* w, int64_t dim) {
  const int64_t size = D ? D : dim;
  uint32_t infinite = 0;
  for (int64_t d = 0; d < size; d++) infinite |= (bits_of(w[d]) & 0x7F800000u) == 0x7F800000u;
  float low = w[0], high = w[0];
  int64_t d = 0;
  if (size >= kLanes) {
    Lanes lows = load(w), highs = lows;
    for (d = kLanes; d + kLanes <= size; d += kLanes) {
      const Lanes x = load(w + d);
      lows = x < lows ? x : lows;
      highs = x > highs ? x : highs;
    }
    for (int l = 0; l < kLanes; l++) low = std::min(low, lows[l]), high = std::max(high, highs[l]);
  }
  if constexpr (D == 0) {  // the others are multiples of eight
    for (; d < size; d++) low = std::min(low, w[d]), high = std::max(high, w[d]);
  }
  return {low, high, infinite != 0};
}

template <int D, int64_t kFormat>
void write_codes(const float* w, uint8_t* row, int64_t dim, const uint32_t* word, float* codes) {
  const int64_t size = D ? D : dim;
  const auto [low, high, infinite] = range_of<D>(w, dim);
  const int64_t own = word ? static_cast<int64_t>(noise(*word, -1) >> 19) : -1;
  const Half nan = static_cast<Half>(NAN);
  const Half ends[2] = {infinite ? nan : to_half(low, own), infinite ? nan : to_half(high, own)};
  std::memcpy(row, ends, sizeof(ends));
  const float first = ends[0], last = ends[1], top = most<kFormat>();
  if (!(last > first)) {
    std::memset(row + kEnds, 0, row_bytes<kFormat>(size) - kEnds);
    return;
  }
  const float per = top / (last - first);
  const float smallest = low, largest = high;
  const auto fill = [&](auto u) {
    for (int64_t d = 0; d < size; d++) {
      const float x = std::min(std::max((w[d] - first) * per + u(d), 0.0f), top);
      codes[d] = w[d] == smallest ? 0.0f : w[d] == largest ? top : x;
    }
  };
  if (word) {
    const uint32_t own_word = *word;
    fill([own_word](int64_t d) { return static_cast<float>(static_cast<int32_t>(noise(own_word, d) >> 8)) * 0x1p-24f; });
  } else {
    fill([](int64_t) { return 0.5f; });
  }
  uint8_t* out = row + kEnds;
  if (kFormat == kInt8) {
    for (int64_t d = 0; d < size; d++) out[d] = static_cast<uint8_t>(static_cast<int32_t>(codes[d]));
    return;
  }
  for (int64_t d = 0; d < size; d += 2) {
    const int32_t second = d + 1 < size ? static_cast<int32_t>(codes[d + 1]) : 0;
    out[d / 2] = static_cast<uint8_t>(static_cast<int32_t>(codes[d]) | second << 4);
  }
}

template <int D>
void write_bfloat16(const float* w, uint16_t* row, int64_t dim, const uint32_t* word) {
  const int64_t size = D ? D : dim;
  if (word && !range_of<D>(w, dim).infinite) {
    const uint32_t own_word = *word;
    for (int64_t d = 0; d < size; d++) row[d] = static_cast<uint16_t>((bits_of(w[d]) + (noise(own_word, d) >> 16)) >> 16);
    return;
  }
  for (int64_t d = 0; d < size; d++) {
    const uint32_t bits = bits_of(w[d]);
    const bool is_finite = (bits & 0x7F800000u) != 0x7F800000u;
    row[d] = word && is_finite ? static_cast<uint16_t>((bits + (noise(*word, d) >> 16)) >> 16) : to_bfloat16(w[d]);
  }
}

// ---------------------------------------------------------------- update

struct Tables {
  uint8_t* rows;
  uint16_t* lower;  // lower halves of split numbers; nullptr otherwise
};

template <int D, int64_t kFormat>
void read_row(const Tables& tables, int64_t row, int64_t dim, float* w) {
  const int64_t size = D ? D : dim;
  const uint8_t* from = tables.rows + row * row_bytes<kFormat>(size);
  if (kFormat == kSplit) {
    const uint16_t* upper = reinterpret_cast<const uint16_t*>(from);
    const int16_t* lower = reinterpret_cast<const int16_t*>(tables.lower) + row * size;
    for (int64_t d = 0; d < size; d++)
      w[d] = float_of((static_cast<uint32_t>(upper[d]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(lower[d])));
    return;
  }
  const Reader<kFormat> reader(from);
  int64_t d = 0;
  if (D) for (; d + kLanes <= size; d += kLanes) store(w + d, reader.eight(d));
  for (; d < size; d++) w[d] = reader.one(d);
}

template <int D, int64_t kFormat>
void write_row(const Tables& tables, int64_t row, int64_t dim, const float* w, const uint32_t* word, float* codes) {
  const int64_t size = D ? D : dim;
  uint8_t* to = tables.rows + row * row_bytes<kFormat>(size);
  if (kFormat == kInt8 || kFormat == kInt4) return write_codes<D, kFormat>(w, to, dim, word, codes);
  uint16_t* upper = reinterpret_cast<uint16_t*>(to);
  if (kFormat == kBfloat16) return write_bfloat16<D>(w, upper, dim, word);
  uint16_t* lower = tables.lower + row * size;
  for (int64_t d = 0; d < size; d++) {
    const uint32_t bits = w[d] != w[d] ? 0x7FC00000u : bits_of(w[d]);
    lower[d] = static_cast<uint16_t>(bits);
    upper[d] = static_cast<uint16_t>((bits - static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(bits)))) >> 16);
  }
}

template <int D, int64_t kFormat>
void apply(const Tables& tables, const State& state, int64_t dim, const int64_t* rows, const float* sums,
           const uint32_t* words, int64_t num_unique, const Rule& rule, int num_threads) {
  const int64_t size = D ? D : dim;
  const Packed<D, kFormat> packed{tables.rows, dim};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<float> memory(3 * size);
    float *w = memory.data(), *scaled = w + size, *codes = scaled + size;
#pragma omp for schedule(static)
    for (int64_t u = 0; u < num_unique; u++) {
      if (u + kAhead < num_unique) {
        const int64_t next = rows[u + kAhead];
        packed.prefetch(next);
        if (kFormat == kSplit)
          for (int64_t d = 0; d < size; d += 32) __builtin_prefetch(tables.lower + next * size + d, 0, 2);
        if (rule.kind == kRowwiseAdagrad) __builtin_prefetch(state.first + next);
      }
      read_row<D, kFormat>(tables, rows[u], dim, w);
      apply_row<D>(w, state, rows[u], sums + u * size, dim, rule, scaled);
      write_row<D, kFormat>(tables, rows[u], dim, w, words ? words + u : nullptr, codes);
    }
  }
}

template <int D, int64_t kFormat>
int64_t lookup_packed(const uint8_t* rows, const Part& part, int64_t dim, void* out, bool is_bfloat16, int num_threads) {
  const Packed<D, kFormat> packed{rows, dim};
  if (is_bfloat16) return lookup<D>(packed, part, dim, static_cast<uint16_t*>(out), num_threads);
  return lookup<D>(packed, part, dim, static_cast<float*>(out), num_threads);
}

}  // namespace

#define FOR_FORMAT(call, D)               \
  switch (format) {                       \
    case kBfloat16: return call(D, kBfloat16); \
    case kSplit: return call(D, kSplit);  \
    case kInt8: return call(D, kInt8);    \
    default: return call(D, kInt4);       \
  }

#ifndef ZIGGURAT_ROWS_ALONE  // for what includes the rows without their interface
extern "C" {

// The fields of a part, pooled into out; rows are R rows in a format.
int64_t ziggurat_lookup_rows(const uint8_t* rows, int64_t format, const Part* part, int64_t dim, void* out,
                             int64_t out_is_bfloat16, int64_t num_threads) {
  if (format == kSplit) format = kBfloat16;  // lookups read upper halves
#define LOOKUP_ROWS(D, F) \
  lookup_packed<D, F == kSplit ? kBfloat16 : F>(rows, *part, dim, out, out_is_bfloat16 != 0, int(num_threads))
#define LOOKUP_DIM(D) [&]() -> int64_t { FOR_FORMAT(LOOKUP_ROWS, D) }()
  FOR_DIM(dim, LOOKUP_DIM)
}

// The rule for (U,) distinct rows with their summed gradients; words: noise of each, nullptr rounds to the nearest.
void ziggurat_apply_rows(uint8_t* rows, uint16_t* lower, int64_t format, float* state_first, float* state_second,
                         int64_t dim, const int64_t* places, const float* sums, const uint32_t* words,
                         int64_t num_unique, const Rule* rule, int64_t num_threads) {
  const Tables tables{rows, lower};
  const State state{state_first, state_second};
#define APPLY_ROWS(D, F) apply<D, F>(tables, state, dim, places, sums, words, num_unique, *rule, int(num_threads))
#define APPLY_DIM(D) [&]() { FOR_FORMAT(APPLY_ROWS, D) }()
  FOR_DIM(dim, APPLY_DIM)
}

}  // extern "C"
#endif
