// A cache of hot rows: which rows it holds, lookups that read them or the rows behind it, and rows that move between
// both. Twin of ziggurat/ops/row_cache/ways.py and of the torch code of CachedStorage, which define it.
//
//     admit      distinct rows of a step ──► a way for each, what left it, or no way
//     lookup     row ──► its way (FP32), or the row in its format behind the cache; added where it is read
//     exchange   what leaves a way is rounded and kept, what enters is decoded; state moves as it is
//
// Every set belongs to one thread and decides by steps, counts and rows alone, so neither threads nor the order of rows
// change a bit.

#include "ways.h"
#include "wide.h"

namespace {

constexpr int64_t kHit = -2, kFree = -1, kNoWay = -3;  // what `left` says beside rows
constexpr int32_t kMostCount = (1 << 24) - 1;          // FP32 of checkpoints holds one more

// ---------------------------------------------------------------- admission

struct Miss {
  int64_t row, at;  // `at`: position among the rows of the step
};

// The way that a miss takes: a free one, else that of the smallest (count or stamp, tag) not touched in this step.
inline int victim_of(const Ways& ways, int64_t set, int32_t step) {
  constexpr int32_t kMost = 0x7FFFFFFF;
  const int32_t *tags = ways.tags + set * kWays, *stamps = ways.stamps + set * kWays;
  const int32_t* measures = ways.measures ? ways.measures + set * kWays : stamps;
  if (const uint32_t free = matches(tags, -1)) return __builtin_ctz(free);
  int32_t low = kMost, tag = kMost;
  for (int w = 0; w < kWays; w++) low = std::min(low, stamps[w] == step ? kMost : measures[w]);
  if (low == kMost) return -1;
  for (int w = 0; w < kWays; w++) tag = std::min(tag, (stamps[w] != step) & (measures[w] == low) ? tags[w] : kMost);
  return __builtin_ctz(matches(tags, tag));
}

void admit_set(const Ways& ways, int64_t set, std::vector<Miss>& misses, int32_t step, int64_t* places, int64_t* left) {
  std::sort(misses.begin(), misses.end(), [&](const Miss& a, const Miss& b) {
    if (ways.counts && ways.counts[a.row] != ways.counts[b.row]) return ways.counts[a.row] > ways.counts[b.row];
    return a.row < b.row;
  });
  bool full = false;
  for (const Miss& miss : misses) {
    const int way = full ? -1 : victim_of(ways, set, step);
    int64_t gone = kFree;
    full = way < 0;
    if (!full) {
      int32_t& tag = ways.tags[set * kWays + way];
      gone = tag < 0 ? kFree : tag * ways.num_sets + set;
      full = ways.counts && gone >= 0 && ways.measures[set * kWays + way] > ways.counts[miss.row];
      if (!full) {
        tag = static_cast<int32_t>(miss.row / ways.num_sets);
        ways.stamps[set * kWays + way] = step;
        if (ways.counts) ways.measures[set * kWays + way] = ways.counts[miss.row];
      }
    }
    places[miss.at] = full ? -1 : set * kWays + way;
    left[miss.at] = full ? kNoWay : gone;
  }
}

// Rows that are held are stamped; the others are grouped by set, and each set admits its own.
void admit(const Ways& ways, const int64_t* rows, int64_t num_rows, int32_t step, int64_t* places, int64_t* left,
           int num_threads) {
  const Divider sets(ways.num_sets);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t u = 0; u < num_rows; u++) {
    if (u + kAhead < num_rows) {
      const int64_t next = rows[u + kAhead], first = (next - sets(next) * ways.num_sets) * kWays;
      __builtin_prefetch(ways.tags + first);
      __builtin_prefetch(ways.tags + first + 16);
      __builtin_prefetch(ways.stamps + first, 1);
      __builtin_prefetch(ways.stamps + first + 16, 1);
      if (ways.counts) __builtin_prefetch(ways.counts + next, 1);
    }
    if (ways.counts && ways.counts[rows[u]] < kMostCount) ways.counts[rows[u]]++;
    const int64_t place = find(ways.tags, sets, rows[u]);
    places[u] = place;
    left[u] = place < 0 ? kNoWay : kHit;
    if (place < 0) continue;
    ways.stamps[place] = step;
    if (ways.counts) ways.measures[place] = ways.counts[rows[u]];
  }
  std::vector<int32_t> begins(ways.num_sets + 1, 0);
  std::vector<int64_t> touched;
  int64_t num_misses = 0;
  for (int64_t u = 0; u < num_rows; u++) {
    if (left[u] != kNoWay) continue;
    const int64_t set = rows[u] - sets(rows[u]) * ways.num_sets;
    if (begins[set]++ == 0) touched.push_back(set);
    num_misses++;
  }
  std::vector<int64_t> order(num_misses), firsts(touched.size() + 1, 0);
  for (size_t t = 0; t < touched.size(); t++) {  // from here on `begins` says where a set's next miss goes
    firsts[t + 1] = firsts[t] + begins[touched[t]];
    begins[touched[t]] = static_cast<int32_t>(firsts[t]);
  }
  for (int64_t u = 0; u < num_rows; u++)
    if (left[u] == kNoWay) order[begins[rows[u] - sets(rows[u]) * ways.num_sets]++] = u;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<Miss> misses;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < static_cast<int64_t>(touched.size()); t++) {
      misses.clear();
      for (int64_t i = firsts[t]; i < firsts[t + 1]; i++) misses.push_back({rows[order[i]], order[i]});
      admit_set(ways, touched[t], misses, step, places, left);
    }
  }
}

// ---------------------------------------------------------------- lookup

// Rows that are in the cache as numbers, the others behind it in a format.
template <int D, int64_t kFormat>
struct Cached {
  Floats<D> held;
  Packed<D, kFormat> behind;
  const int32_t* tags;
  Divider sets;
  void prefetch(int64_t row) const {
    const int64_t place = find(tags, sets, row);
    place < 0 ? behind.prefetch(row) : held.prefetch(place);
  }
  void set(Sum<D>& sum, int64_t row) const {
    const int64_t place = find(tags, sets, row);
    place < 0 ? behind.set(sum, row) : held.set(sum, place);
  }
  void add(Sum<D>& sum, int64_t row) const {
    const int64_t place = find(tags, sets, row);
    place < 0 ? behind.add(sum, row) : held.add(sum, place);
  }
};

template <int D, int64_t kFormat>
int64_t lookup_cached(const float* slots, const uint8_t* rows, const Ways& ways, const Part& part, int64_t dim, void* out,
                      bool is_bfloat16, int num_threads) {
  const Cached<D, kFormat> table{{slots, dim}, {rows, dim}, ways.tags, Divider(ways.num_sets)};
  if (is_bfloat16) return lookup<D>(table, part, dim, static_cast<uint16_t*>(out), num_threads);
  return lookup<D>(table, part, dim, static_cast<float*>(out), num_threads);
}

// ---------------------------------------------------------------- exchange

struct Arrays {  // the same rows twice: in the cache, and behind it
  float* slots;
  uint8_t* rows;
  uint16_t* lower;  // not used: no cache stands in front of split numbers
  float *state[2], *behind[2];  // nullptr where the rule keeps less
  int64_t widths[2];            // numbers a row
};

template <int D, int64_t kFormat>
void exchange(const Arrays& arrays, int64_t dim, const int64_t* places, const int64_t* leaving, const int64_t* entering,
              const Origins* origins, int64_t num_places, int num_threads) {
  const int64_t size = D ? D : dim;
  const Packed<D, kFormat> packed{arrays.rows, dim};
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < num_places; i++) {
    if (i + kAhead < num_places) {
      prefetch_row<D>(arrays.slots + places[i + kAhead] * size, dim);
      if (leaving[i + kAhead] >= 0) packed.prefetch(leaving[i + kAhead]);
      if (entering[i + kAhead] >= 0) packed.prefetch(entering[i + kAhead]);
      for (int part = 0; part < 2; part++) {
        if (!arrays.state[part]) continue;
        const int64_t width = arrays.widths[part];
        __builtin_prefetch(arrays.state[part] + places[i + kAhead] * width);
        if (leaving[i + kAhead] >= 0) __builtin_prefetch(arrays.behind[part] + leaving[i + kAhead] * width, 1);
        if (entering[i + kAhead] >= 0) __builtin_prefetch(arrays.behind[part] + entering[i + kAhead] * width);
      }
    }
    const int64_t place = places[i], out = leaving[i], in = entering[i];
    float* slot = arrays.slots + place * size;
    const auto kept = [&](int64_t row) { return arrays.rows + row * row_bytes<kFormat>(size); };
    uint32_t word = 0;
    if (origins && out >= 0) word = origins->word(out, origins->of(out));
    if (out >= 0) pack_row<D, kFormat>(slot, kept(out), nullptr, dim, origins ? &word : nullptr);
    if (in >= 0) read_row<D, kFormat>(kept(in), nullptr, dim, slot);
    for (int part = 0; part < 2; part++) {
      if (!arrays.state[part]) continue;
      const int64_t width = arrays.widths[part];
      float *held = arrays.state[part] + place * width, *behind = arrays.behind[part];
      if (out >= 0) std::memcpy(behind + out * width, held, width * sizeof(float));
      if (in >= 0) std::memcpy(held, behind + in * width, width * sizeof(float));
    }
  }
}

}  // namespace

// The formats that updates round: a cache in front of others saves nothing.
#define FOR_ROUNDED(call, D)                   \
  switch (format) {                            \
    case kBfloat16: return call(D, kBfloat16); \
    case kInt8: return call(D, kInt8);         \
    default: return call(D, kInt4);            \
  }

extern "C" {

// The place of each row in the cache, or -1.
void ziggurat_find_rows(const Ways* ways, const int64_t* rows, int64_t num_rows, int64_t* places, int64_t num_threads) {
  const Divider sets(ways->num_sets);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t u = 0; u < num_rows; u++) places[u] = find(ways->tags, sets, rows[u]);
}

// A way for each of (U,) distinct rows of a step, and what left it; see `Ways.admit`.
void ziggurat_admit_rows(const Ways* ways, const int64_t* rows, int64_t num_rows, int64_t step, int64_t* places,
                         int64_t* left, int64_t num_threads) {
  admit(*ways, rows, num_rows, static_cast<int32_t>(step), places, left, int(num_threads));
}

// The fields of a part, pooled into out; rows are in the cache, or behind it in a format.
int64_t ziggurat_lookup_cached(const float* slots, const uint8_t* rows, int64_t format, const Ways* ways,
                               const Part* part, int64_t dim, void* out, int64_t out_is_bfloat16, int64_t num_threads) {
#define LOOKUP_CACHED(D, F) lookup_cached<D, F>(slots, rows, *ways, *part, dim, out, out_is_bfloat16 != 0, int(num_threads))
#define LOOKUP_CACHED_DIM(D) [&]() -> int64_t { FOR_ROUNDED(LOOKUP_CACHED, D) }()
  FOR_DIM(dim, LOOKUP_CACHED_DIM)
}

// Rows leave places of the cache, rounded by the noise of `origins` or to the nearest, and others take them; -1 for none.
void ziggurat_exchange_rows(const Arrays* arrays, int64_t format, int64_t dim, const int64_t* places,
                            const int64_t* leaving, const int64_t* entering, const Origins* origins, int64_t num_places,
                            int64_t num_threads) {
#define EXCHANGE(D, F) exchange<D, F>(*arrays, dim, places, leaving, entering, origins, num_places, int(num_threads))
#define EXCHANGE_DIM(D) [&]() { FOR_ROUNDED(EXCHANGE, D) }()
  FOR_DIM(dim, EXCHANGE_DIM)
}

}  // extern "C"
