// A cache of hot rows: which rows it holds, lookups that read them or the rows behind it, and updates that move rows
// between both. Twin of ziggurat/ops/row_cache/ways.py and of the torch code of CachedStorage, which define it.
//
//     admit      distinct rows of a step ──► a way for each, what left it, or no way
//     lookup     row ──► its way (FP32), or the row in its format behind the cache; added where it is read
//     update     what leaves a way is rounded and kept, what enters is decoded, and the rule is applied to it, in one walk
//
// Every set belongs to one thread and decides by steps, counts and rows alone, so neither threads nor the order of rows
// change a bit.

#include <limits>

#include "packed_rows.h"
#include "walk.h"
#include "ways.h"

namespace {

constexpr int64_t kHit = -2, kFree = -1, kNoWay = -3;  // what `left` says beside rows
constexpr int32_t kMostCount = (1 << 24) - 1;          // FP32 of checkpoints holds one more

// ---------------------------------------------------------------- admission

struct Miss {
  int64_t row, at;  // `at`: position among the rows of the step
};

typedef int64_t Keys __attribute__((vector_size(64), aligned(8), may_alias));
inline Keys all_keys(int64_t key) { return Keys{key, key, key, key, key, key, key, key}; }

// The ways of a set in the order in which misses take them: free ones, then those of the smallest (count or stamp, tag)
// that this step has not touched.
struct Victims {
  int64_t keys[kWays];
  int32_t tags[kWays];
  int64_t last = std::numeric_limits<int64_t>::min();  // of the way that was taken last; keys are distinct
  Victims(const Ways& ways, int64_t set, int32_t step) {
    const int32_t *now = ways.tags + set * kWays, *stamps = ways.stamps + set * kWays;
    const int32_t* measures = ways.measures ? ways.measures + set * kWays : stamps;
    for (int64_t w = 0; w < kWays; w++) {
      const int64_t key = ((static_cast<int64_t>(measures[w]) + 1) << 32) + now[w];
      tags[w] = now[w];
      keys[w] = now[w] < 0 ? w - kWays : stamps[w] == step ? kNobody : key;
    }
  }
  // The next way, or -1.
  int next() {
    Keys leasts = all_keys(kNobody);
    for (int64_t w = 0; w < kWays; w += 8) {
      const Keys key = *reinterpret_cast<const Keys*>(keys + w), later = key > last ? key : all_keys(kNobody);
      leasts = later < leasts ? later : leasts;
    }
    int64_t least = leasts[0];
    for (int k = 1; k < 8; k++) least = leasts[k] < least ? leasts[k] : least;
    last = least;
    if (least == kNobody) return -1;
    return least < 0 ? static_cast<int>(least + kWays) : __builtin_ctz(matches(tags, static_cast<int32_t>(least)));
  }
  static constexpr int64_t kNobody = std::numeric_limits<int64_t>::max();
};

void admit_set(const Ways& ways, int64_t set, std::vector<Miss>& misses, int32_t step, int64_t* places, int64_t* left) {
  std::sort(misses.begin(), misses.end(), [&](const Miss& a, const Miss& b) {
    if (ways.counts && ways.counts[a.row] != ways.counts[b.row]) return ways.counts[a.row] > ways.counts[b.row];
    return a.row < b.row;
  });
  Victims victims(ways, set, step);
  bool full = false;
  for (const Miss& miss : misses) {
    const int way = full ? -1 : victims.next();
    int64_t gone = kFree;
    full = way < 0;
    if (!full) {
      const int32_t tag = victims.tags[way];
      gone = tag < 0 ? kFree : tag * ways.num_sets + set;
      full = ways.counts && gone >= 0 && ways.measures[set * kWays + way] > ways.counts[miss.row];
      if (!full) {
        ways.tags[set * kWays + way] = static_cast<int32_t>(miss.row / ways.num_sets);
        ways.stamps[set * kWays + way] = step;
        if (ways.counts) ways.measures[set * kWays + way] = ways.counts[miss.row];
      }
    }
    places[miss.at] = full ? -1 : set * kWays + way;
    left[miss.at] = full ? kNoWay : gone;
  }
}

// The misses of a step: those of the t-th set that has any are order[firsts[t]] … order[firsts[t + 1] - 1].
struct MissesBySet {
  std::vector<int64_t> touched, firsts, order;
  MissesBySet(int64_t num_sets, int64_t num_rows, const int64_t* sets, const int64_t* left) : order(num_rows) {
    std::vector<int64_t> misses(num_rows + 1);
    int64_t count = 0;
    for (int64_t u = 0; u < num_rows; u++) {
      misses[count] = u;
      count += left[u] == kNoWay;  // without a branch that nobody could foresee
    }
    std::vector<int32_t> begins(num_sets, 0);
    for (int64_t m = 0; m < count; m++)
      if (begins[sets[misses[m]]]++ == 0) touched.push_back(sets[misses[m]]);
    firsts.assign(1, 0);
    for (const int64_t set : touched) {  // from here on `begins` says where a set's next miss goes
      firsts.push_back(firsts.back() + begins[set]);
      begins[set] = static_cast<int32_t>(firsts[firsts.size() - 2]);
    }
    for (int64_t m = 0; m < count; m++) order[begins[sets[misses[m]]]++] = misses[m];
  }
};

// Rows that are held are stamped; the others are grouped by set, and each set admits its own.
void admit(const Ways& ways, const int64_t* rows, int64_t num_rows, int32_t step, int64_t* places, int64_t* left,
           int num_threads) {
  const Divider sets(ways.num_sets);
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t u = 0; u < num_rows; u++) {
    if (u + kAhead < num_rows) {
      const int64_t next = rows[u + kAhead];
      ways.prefetch(next - sets(next) * ways.num_sets);
      if (ways.counts) __builtin_prefetch(ways.counts + next, 1);
    }
    if (ways.counts && ways.counts[rows[u]] < kMostCount) ways.counts[rows[u]]++;
    const auto [place, set] = find(ways.tags, sets, rows[u]);
    places[u] = place < 0 ? set : place;  // where to look for a way
    left[u] = place < 0 ? kNoWay : kHit;
    if (place < 0) continue;
    ways.stamps[place] = step;
    if (ways.counts) ways.measures[place] = ways.counts[rows[u]];
  }
  const MissesBySet by_set(ways.num_sets, num_rows, places, left);
  const auto num_touched = static_cast<int64_t>(by_set.touched.size());
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<Miss> misses;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_touched; t++) {
      if (t + 2 < num_touched) ways.prefetch(by_set.touched[t + 2]);
      misses.clear();
      for (int64_t i = by_set.firsts[t]; i < by_set.firsts[t + 1]; i++)
        misses.push_back({rows[by_set.order[i]], by_set.order[i]});
      admit_set(ways, by_set.touched[t], misses, step, places, left);
    }
  }
}

// ---------------------------------------------------------------- lookup

// Rows that are in the cache as numbers, the others behind it in a format: a way, or the complement of a row.
template <int D, int64_t kFormat>
struct Cached {
  Floats<D> held;
  Packed<D, kFormat> behind;
  const int32_t* tags;
  Divider sets;
  static constexpr bool kIsSearched = true;
  int64_t find(int64_t row) const {
    const int64_t place = ::find(tags, sets, row).place;
    return place < 0 ? ~row : place;
  }
  void prepare(int64_t row) const {  // to find it
    const int64_t set = row - static_cast<int64_t>(sets(row) * sets.divisor);
    __builtin_prefetch(tags + set * kWays);
    __builtin_prefetch(tags + set * kWays + 16);
  }
  void prefetch(int64_t at) const { at < 0 ? behind.prefetch(~at) : held.prefetch(at); }
  void set(Sum<D>& sum, int64_t at) const { at < 0 ? behind.set(sum, ~at) : held.set(sum, at); }
  void add(Sum<D>& sum, int64_t at) const { at < 0 ? behind.add(sum, ~at) : held.add(sum, at); }
};

template <int D, int64_t kFormat>
int64_t lookup_cached(const float* slots, const uint8_t* rows, const Ways& ways, const Part& part, int64_t dim, void* out,
                      bool is_bfloat16, int num_threads) {
  const Cached<D, kFormat> table{{slots, dim}, {rows, dim}, ways.tags, Divider(ways.num_sets)};
  if (is_bfloat16) return lookup<D>(table, part, dim, static_cast<uint16_t*>(out), num_threads);
  return lookup<D>(table, part, dim, static_cast<float*>(out), num_threads);
}

// ---------------------------------------------------------------- update

struct Arrays {  // the same rows twice: in the cache, and behind it
  float* slots;
  uint8_t* rows;
  float *state[2], *behind[2];  // nullptr where the rule keeps less
  int64_t widths[2];            // numbers a row
  State held() const { return {state[0], state[1]}; }
  State kept() const { return {behind[0], behind[1]}; }
};

// The distinct rows of a step where an admission has put them, for walk.h. What leaves a way is rounded and kept, what
// takes it is decoded into it, and state moves as it is; a row without a way is updated behind the cache.
template <int D, int64_t kFormat>
struct CachedRows {
  const Arrays& arrays;
  FloatRows<D> held;
  PackedRows<D, kFormat> behind;
  const int64_t *rows, *places, *left;
  static constexpr int kTogether = PackedRows<D, kFormat>::kTogether;

  void touch(int64_t u) const {
    if (left[u] != kNoWay) held.touch(places[u]);
    if (left[u] != kHit) behind.touch(rows[u]);
    if (left[u] >= 0) behind.touch(left[u]);
  }
  void apply_all(const int64_t* at, const float* const* grads, int count, float* memory) const {
    int64_t ways[kTogether], conflicts[kTogether];
    const float *sums[kTogether], *others[kTogether];
    int num_ways = 0;
    leave(at, count);
    for (int r = 0; r < count; r++) {
      const int64_t u = at[r];
      const int other = r - num_ways;
      conflicts[other] = rows[u], others[other] = grads[r];
      ways[num_ways] = places[u], sums[num_ways] = grads[r];
      num_ways += left[u] != kNoWay;
      if (left[u] == kFree || left[u] >= 0) enter(rows[u], places[u]);
    }
    held.apply_all(ways, sums, num_ways, memory);
    if (num_ways < count) behind.apply_all(conflicts, others, count - num_ways, memory);
  }
  void leave(const int64_t* at, int count) const {
    int64_t gone[kTogether];
    const float* slots[kTogether];
    int num_gone = 0;
    for (int r = 0; r < count; r++) {
      if (left[at[r]] < 0) continue;
      gone[num_gone] = left[at[r]];
      slots[num_gone++] = slot(places[at[r]]);
      copy_state(arrays.behind, left[at[r]], arrays.state, places[at[r]]);
    }
    behind.keep_all(gone, slots, num_gone);
  }
  void enter(int64_t row, int64_t place) const {
    read_row<D, kFormat>(behind.kept(row), nullptr, held.dim, slot(place));
    copy_state(arrays.state, place, arrays.behind, row);
  }
  float* slot(int64_t place) const { return held.weight + place * (D ? D : held.dim); }
  void copy_state(float* const* to, int64_t to_row, float* const* from, int64_t from_row) const {
    for (int part = 0; part < 2; part++) {
      if (!to[part]) continue;
      const int64_t width = arrays.widths[part];
      if (width == 1) to[part][to_row] = from[part][from_row];
      else std::memcpy(to[part] + to_row * width, from[part] + from_row * width, width * sizeof(float));
    }
  }
};

// The rule for (U,) distinct rows with their sums.
template <class Rows>
void apply_cached(const Rows& rows, int64_t dim, const float* sums, int64_t num_unique, int num_threads) {
  constexpr int64_t kCount = Rows::kTogether;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<float> memory((kCount + kMoreRows) * dim);
#pragma omp for schedule(static)
    for (int64_t first = 0; first < num_unique; first += kCount) {
      int64_t at[kCount];
      const float* grads[kCount];
      const int count = static_cast<int>(std::min(kCount, num_unique - first));
      for (int r = 0; r < count; r++) at[r] = first + r, grads[r] = sums + at[r] * dim;
      for (int64_t u = first + kCount; u < std::min(first + 2 * kCount, num_unique); u++) rows.touch(u);
      rows.apply_all(at, grads, count, memory.data());
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
  for (int64_t u = 0; u < num_rows; u++) places[u] = find(ways->tags, sets, rows[u]).place;
}

// A way for each of (U,) distinct rows of a step, and what left it; see `Ways.admit`. `counts`: hits, rows that left, and
// rows without a way.
void ziggurat_admit_rows(const Ways* ways, const int64_t* rows, int64_t num_rows, int64_t step, int64_t* places,
                         int64_t* left, int64_t* counts, int64_t num_threads) {
  admit(*ways, rows, num_rows, static_cast<int32_t>(step), places, left, int(num_threads));
  counts[0] = std::count(left, left + num_rows, kHit);
  counts[1] = std::count_if(left, left + num_rows, [](int64_t row) { return row >= 0; });
  counts[2] = std::count(left, left + num_rows, kNoWay);
}

// The fields of a part, pooled into out; rows are in the cache, or behind it in a format.
int64_t ziggurat_lookup_cached(const float* slots, const uint8_t* rows, int64_t format, const Ways* ways,
                               const Part* part, int64_t dim, void* out, int64_t out_is_bfloat16, int64_t num_threads) {
#define LOOKUP_CACHED(D, F) lookup_cached<D, F>(slots, rows, *ways, *part, dim, out, out_is_bfloat16 != 0, int(num_threads))
#define LOOKUP_CACHED_DIM(D) [&]() -> int64_t { FOR_ROUNDED(LOOKUP_CACHED, D) }()
  FOR_DIM(dim, LOOKUP_CACHED_DIM)
}

// What Python passes of a cache, what is behind it, and where an admission has put the distinct rows of a step.
struct Placed {
  Arrays arrays;
  int64_t format, dim;
  const Origins* origins;  // nullptr rounds to the nearest
  const int64_t *rows, *places, *left;
};

#define PLACED_ROWS(D, F)                                                                                   \
  CachedRows<D, F> {                                                                                        \
    placed->arrays, {placed->arrays.slots, placed->arrays.held(), dim, *rule},                              \
        {placed->arrays.rows, nullptr, placed->arrays.kept(), dim, *rule, placed->origins}, placed->rows, \
        placed->places, placed->left                                                                        \
  }

// Moves rows, sums gradients and applies the rule, right after `ziggurat_sort` of the workspace and the admission.
void ziggurat_update_cached(void* workspace, const Placed* placed, const Rule* rule, int64_t num_threads) {
  const Workspace& work = *static_cast<Workspace*>(workspace);
  const int64_t dim = placed->dim, format = placed->format;
#define UPDATE_CACHED(D, F) update_sorted<D>(work, PLACED_ROWS(D, F), dim, int(num_threads))
#define UPDATE_CACHED_DIM(D) [&]() { FOR_ROUNDED(UPDATE_CACHED, D) }()
  FOR_DIM(dim, UPDATE_CACHED_DIM)
}

// The same for (U, dim) sums.
void ziggurat_apply_cached(const float* sums, int64_t num_unique, const Placed* placed, const Rule* rule,
                           int64_t num_threads) {
  const int64_t dim = placed->dim, format = placed->format;
#define APPLY_CACHED(D, F) apply_cached(PLACED_ROWS(D, F), dim, sums, num_unique, int(num_threads))
#define APPLY_CACHED_DIM(D) [&]() { FOR_ROUNDED(APPLY_CACHED, D) }()
  FOR_DIM(dim, APPLY_CACHED_DIM)
}

}  // extern "C"
