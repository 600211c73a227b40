// What Python passes to lookups and updates, sums of vectors, and the pooled lookup over rows of any kind.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../bfloat16.h"
#include "../memory.h"
#include "../unaligned.h"

namespace {

// ---------------------------------------------------------------- what Python passes

constexpr int64_t kSingle = 0, kMean = 2;        // kinds of a slot; 1 is a sum
constexpr int64_t kRowwiseAdagrad = 1, kAdam = 2;  // kinds of a rule; 0 is SGD

struct Slot {
  int64_t kind, index, first_row, num_rows, column;
};

struct Part {
  const Slot* slots;
  int64_t num_slots;
  const int64_t* single;   // (S, B)
  const int64_t* values;   // (N,)
  const int64_t* offsets;  // (J·B + 1,)
  int64_t num_values;
  int64_t batch_size;
  int64_t width;      // columns of out and grad
  const float* grad;  // (B, width); unused by lookups
};

struct Rule {
  int64_t kind;
  float learning_rate, scale, eps, weight_decay, beta1, beta2;
};

constexpr int64_t kOk = 0, kRowOutOfBounds = 1, kBadOffsets = 2;

// ---------------------------------------------------------------- eight floats


inline Lanes load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, Lanes x) { *reinterpret_cast<Lanes*>(to) = x; }

inline float add_up(Lanes x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

inline void store(uint16_t* to, Lanes x) { store_bfloat16(to, x); }

inline void store_one(float* to, float x) { *to = x; }
inline void store_one(uint16_t* to, float x) { *to = to_bfloat16(x); }

#ifdef __AVX512F__  // sixteen floats: half the instructions of a sum, the same additions
typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
inline void store(float* to, Sixteen x) { *reinterpret_cast<Sixteen*>(to) = x; }
inline void store(uint16_t* to, Sixteen x) {
  store(to, (Lanes)_mm512_castps512_ps256((__m512)x));
  store(to + kLanes, (Lanes)_mm512_extractf32x8_ps((__m512)x, 1));
}
template <int D>
using LanesOfSum = std::conditional_t<D % 16 == 0, Sixteen, Lanes>;
#else
template <int D>
using LanesOfSum = Lanes;
#endif

// A sum of vectors of `dim` floats: in registers where D is known (and not 0), else in `memory`.
template <int D>
struct Sum {
  typedef LanesOfSum<D> Some;
  static constexpr int kWidth = sizeof(Some) / sizeof(float), kCount = D / kWidth;
  Some lanes[kCount];
  Sum(float*, int64_t) {}
  static Some some(const float* from) { return load_unaligned<Some>(from); }
  void set(const float* x) { for (int l = 0; l < kCount; l++) lanes[l] = some(x + l * kWidth); }
  void clear() { for (int l = 0; l < kCount; l++) lanes[l] = Some{0}; }
  void add(const float* x) { for (int l = 0; l < kCount; l++) lanes[l] += some(x + l * kWidth); }
  void scale(float factor) { for (int l = 0; l < kCount; l++) lanes[l] *= factor; }
  template <class Out>
  void write(Out* out) const { for (int l = 0; l < kCount; l++) store(out + l * kWidth, lanes[l]); }
};

template <>
struct Sum<0> {
  float* sum;
  int64_t dim;
  Sum(float* memory, int64_t size) : sum(memory), dim(size) {}
  void set(const float* x) { std::memcpy(sum, x, dim * sizeof(float)); }
  void clear() { std::memset(sum, 0, dim * sizeof(float)); }
  void add(const float* x) { for (int64_t d = 0; d < dim; d++) sum[d] += x[d]; }
  void scale(float factor) { for (int64_t d = 0; d < dim; d++) sum[d] *= factor; }
  template <class Out>
  void write(Out* out) const { for (int64_t d = 0; d < dim; d++) store_one(out + d, sum[d]); }
};

template <int D>
inline void prefetch_row(const float* row, int64_t dim) {
  const int64_t size = D ? D : dim;
  for (int64_t d = 0; d < size; d += 16) ask_for(row + d);
}

// Rows that are numbers. Whatever else rows are has the same four methods; `find` says where a row lies, for the others.
template <int D>
struct Floats {
  const float* weight;
  int64_t dim;
  static constexpr bool kIsSearched = false;  // whether `find` takes time
  int64_t find(int64_t row) const { return row; }
  const float* at(int64_t row) const { return weight + row * (D ? D : dim); }
  void prefetch(int64_t row) const { prefetch_row<D>(at(row), dim); }
  void set(Sum<D>& sum, int64_t row) const { sum.set(at(row)); }
  void add(Sum<D>& sum, int64_t row) const { sum.add(at(row)); }
};

// ---------------------------------------------------------------- lookup

constexpr int kAhead = 16;  // lookups between a prefetch and its use, at least
constexpr int kBurst = 8;   // rows that are asked for at a time: their pages are then looked for side by side

// One field of samples first … last - 1. A single field is read as lists of one row each.
template <int D, class Rows, class Out>
int64_t lookup_field(const Rows& table, const Part& part, const Slot& slot, int64_t dim, Out* out, int64_t first,
                     int64_t last, float* memory) {
  const bool single = slot.kind == kSingle;
  const int64_t start = slot.index * part.batch_size;
  const int64_t* rows = single ? part.single + start : part.values;
  const int64_t* offsets = part.offsets + start;
  const int64_t end = single ? part.batch_size : std::min(offsets[last], part.num_values);
  // rows of the next samples, too: their turn comes when the other fields have had theirs
  const int64_t known = single ? part.batch_size : std::min(offsets[part.batch_size], part.num_values);
  const uint64_t num_rows = slot.num_rows;
  const auto inside = [&](int64_t p) { return static_cast<uint64_t>(rows[p]) < num_rows; };
  const auto find = [&](int64_t p) { return table.find(slot.first_row + rows[p]); };
  // where the next rows lie: they are looked for once, in advance
  int64_t found[Rows::kIsSearched ? 2 * kAhead : 1];
  const auto ask = [&](int64_t p) {
    if (p >= known || !inside(p)) return;
    const int64_t there = find(p);
    if (Rows::kIsSearched) found[p % (2 * kAhead)] = there;
    table.prefetch(there);
  };
  if constexpr (Rows::kIsSearched) {
    const int64_t begin = std::max<int64_t>(single ? first : offsets[first], 0);
    for (int64_t p = begin; p < std::min((begin + kBurst - 1) / kBurst * kBurst + kAhead, known); p++)
      if (inside(p)) found[p % (2 * kAhead)] = find(p);
  }
  Sum<D> sum(memory, dim);
  for (int64_t b = first; b < last; b++) {
    const int64_t from = single ? b : offsets[b], to = single ? b + 1 : offsets[b + 1];
    if (from < 0 || from > to || to > end) return kBadOffsets;
    sum.clear();
    for (int64_t p = from; p < to; p++) {
      if (!inside(p)) return kRowOutOfBounds;
      const int64_t here = Rows::kIsSearched ? found[p % (2 * kAhead)] : find(p);
      if (p % kBurst == 0) {
        if constexpr (Rows::kIsSearched)
          for (int64_t q = p + 2 * kAhead; q < std::min(p + 2 * kAhead + kBurst, known); q++)
            if (inside(q)) table.prepare(slot.first_row + rows[q]);
        for (int64_t q = p + kAhead; q < p + kAhead + kBurst; q++) ask(q);
      }
      p == from ? table.set(sum, here) : table.add(sum, here);
    }
    if (slot.kind == kMean && to - from > 1) sum.scale(1.0f / static_cast<float>(to - from));
    sum.write(out + b * part.width + slot.column);
  }
  return kOk;
}

template <int D, class Rows, class Out>
int64_t lookup(const Rows& table, const Part& part, int64_t dim, Out* out, int num_threads) {
  constexpr int64_t kChunk = 32;  // samples whose output stays in the cache while the fields fill it
  const int64_t num_chunks = (part.batch_size + kChunk - 1) / kChunk;
  std::atomic<int64_t> status{kOk};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && num_chunks > 1)
  {
    std::vector<float> memory(dim);
#pragma omp for schedule(static)
    for (int64_t chunk = 0; chunk < num_chunks; chunk++) {
      const int64_t first = chunk * kChunk, last = std::min(first + kChunk, part.batch_size);
      for (int64_t s = 0; s < part.num_slots; s++) {
        const Slot& slot = part.slots[s];
        const int64_t result = lookup_field<D>(table, part, slot, dim, out, first, last, memory.data());
        if (result != kOk) status.store(result, std::memory_order_relaxed);
      }
    }
  }
  return status.load();
}

}  // namespace

#define FOR_DIM(dim, call)                                                                     \
  switch (dim) {                                                                               \
    case 8: return call(8);                                                                    \
    case 16: return call(16);                                                                  \
    case 32: return call(32);                                                                  \
    case 64: return call(64);                                                                  \
    case 128: return call(128);                                                                \
    default: return call(0);                                                                   \
  }
