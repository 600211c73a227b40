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
#include <memory>

#include "../registers.h"
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

constexpr int64_t kNobody = std::numeric_limits<int64_t>::max();
constexpr int64_t kKeys = kRegisterBytes / 8;  // that are compared at a time
typedef int64_t Keys __attribute__((vector_size(8 * kKeys), aligned(8), may_alias));
inline Keys all_keys(int64_t key) { return Keys{} + key; }

// How many of some keys are smaller than each. Both arrays have room for whole eights, and so have the keys numbers.
inline void count_smaller(const int64_t* keys, int64_t count, int64_t* ranks) {
  for (int64_t k = 0; k < count; k += kKeys) {
    const Keys here = *reinterpret_cast<const Keys*>(keys + k);
    Keys smaller = {0};
    for (int64_t other = 0; other < count; other++) smaller -= all_keys(keys[other]) < here;
    *reinterpret_cast<Keys*>(ranks + k) = smaller;
  }
}

// The ways of a set in the order in which misses take them: free ones, then those of the smallest (count or stamp, tag)
// that this step has not touched.
struct Victims {
  uint8_t order[kWays];
  int64_t count = 0;
  Victims(const Ways& ways, int64_t set, int32_t step) {
    const int32_t *tags = ways.tags + set * kWays, *stamps = ways.stamps + set * kWays;
    const int32_t* measures = ways.measures ? ways.measures + set * kWays : stamps;
    int64_t keys[kWays], ranks[kWays];
    for (int64_t w = 0; w < kWays; w++) {
      const int64_t key = ((static_cast<int64_t>(measures[w]) + 1) << 32) + tags[w];
      keys[w] = tags[w] < 0 ? w - kWays : stamps[w] == step ? kNobody : key;
    }
    count_smaller(keys, kWays, ranks);
    for (int64_t w = 0; w < kWays; w++) {
      order[ranks[w]] = static_cast<uint8_t>(w);  // those that stay share the last rank
      count += keys[w] != kNobody;
    }
  }
};

// The i-th miss takes the i-th way. Each is decided for itself: with counts, misses come in falling and ways in rising
// order, so behind one that finds no way none does.
void admit_set(const Ways& ways, int64_t set, Miss* misses, int64_t count, int32_t step, int64_t* places, int64_t* left) {
  const auto key_of = [&](const Miss& miss) {  // 39 bits for a row: the counts of more would be 2 TiB
    return ways.counts ? static_cast<int64_t>(kMostCount - ways.counts[miss.row]) << 39 | miss.row : miss.row;
  };
  const auto refuse = [&](const Miss& miss) { places[miss.at] = -1, left[miss.at] = kNoWay; };
  if (count > 2 * kWays) {  // only so many can find one
    std::nth_element(misses, misses + kWays, misses + count,
                     [&](const Miss& a, const Miss& b) { return key_of(a) < key_of(b); });
    for (int64_t m = kWays; m < count; m++) refuse(misses[m]);
    count = kWays;
  }
  int64_t keys[2 * kWays], ranks[2 * kWays];
  for (int64_t m = 0; m < count; m++) keys[m] = key_of(misses[m]);
  count_smaller(keys, count, ranks);
  const Victims victims(ways, set, step);
  for (int64_t m = 0; m < count; m++) {
    const Miss& miss = misses[m];
    if (ranks[m] >= victims.count) {
      refuse(miss);
      continue;
    }
    const int64_t place = set * kWays + victims.order[ranks[m]], tag = ways.tags[place];
    const int64_t gone = tag < 0 ? kFree : tag * ways.num_sets + set;
    if (ways.counts && gone >= 0 && ways.measures[place] > ways.counts[miss.row]) {
      refuse(miss);
      continue;
    }
    ways.tags[place] = static_cast<int32_t>(miss.row / ways.num_sets);
    ways.stamps[place] = step;
    if (ways.counts) ways.measures[place] = ways.counts[miss.row];
    places[miss.at] = place;
    left[miss.at] = gone;
  }
}

// The misses of a step: those of the t-th set that has any are misses[firsts[t]] … misses[firsts[t + 1] - 1].
struct MissesBySet {
  std::vector<int64_t> touched, firsts;
  std::unique_ptr<Miss[]> misses;
  MissesBySet(int64_t num_sets, const int64_t* rows, int64_t num_rows, const int64_t* sets, const int64_t* left) {
    const std::unique_ptr<int32_t[]> at(new int32_t[num_rows + 1]);
    int64_t count = 0;
    for (int64_t u = 0; u < num_rows; u++) {
      at[count] = static_cast<int32_t>(u);
      count += left[u] == kNoWay;  // without a branch that nobody could foresee
    }
    misses.reset(new Miss[count]);
    std::vector<int32_t> begins(num_sets, 0);
    touched.reserve(std::min(num_sets, count));
    for (int64_t m = 0; m < count; m++)
      if (begins[sets[at[m]]]++ == 0) touched.push_back(sets[at[m]]);
    firsts.reserve(touched.size() + 1);
    firsts.push_back(0);
    for (const int64_t set : touched) {  // from here on `begins` says where a set's next miss goes
      firsts.push_back(firsts.back() + begins[set]);
      begins[set] = static_cast<int32_t>(firsts[firsts.size() - 2]);
    }
    for (int64_t m = 0; m < count; m++) misses[begins[sets[at[m]]]++] = {rows[at[m]], at[m]};
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
    int32_t unused;
    *(place < 0 ? &unused : ways.stamps + place) = step;  // no branch here, either
    if (ways.counts && place >= 0) ways.measures[place] = ways.counts[rows[u]];
  }
  const MissesBySet by_set(ways.num_sets, rows, num_rows, places, left);
  const auto num_touched = static_cast<int64_t>(by_set.touched.size());
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < num_touched; t++) {
    if (t + 2 < num_touched) ways.prefetch(by_set.touched[t + 2]);
    const int64_t first = by_set.firsts[t], count = by_set.firsts[t + 1] - first;
    admit_set(ways, by_set.touched[t], by_set.misses.get() + first, count, step, places, left);
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
  // The first lines by addresses alone, since nobody could foresee where a row lies. Beside all else it gained nothing
  // that was measured (docs/experiments); the other way is a branch that was not measured beside it.
  void prefetch(int64_t at) const {
    const int64_t width = D ? D : held.dim, size = at < 0 ? row_bytes<kFormat>(width) : 4 * width;
    const uint8_t* row = at < 0 ? behind.at(~at) : reinterpret_cast<const uint8_t*>(held.at(at));
    for (int64_t byte = 0; byte < 4 * width; byte += 64) ask_for(row + std::min(byte, size - 1));
  }
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

  // Whoever moves no row asks for its place once more: nobody could foresee a branch.
  void touch(int64_t u) const {
    const int64_t row = rows[u], gone = left[u], place = places[u];
    if (gone == kNoWay) return behind.touch(row);
    held.touch(place);
    const float* here = slot(place);
    const Packed<D, kFormat> packed{behind.rows, held.dim};
    packed.ask_for_row(gone == kHit ? reinterpret_cast<const uint8_t*>(here) : behind.kept(row));
    packed.ask_for_row(gone < 0 ? reinterpret_cast<const uint8_t*>(here) : behind.kept(gone));
    if (held.rule.kind == kAdam) {
      touch_state<D>(behind.state, gone == kHit ? 0 : row, held.dim, held.rule);
      touch_state<D>(behind.state, gone < 0 ? 0 : gone, held.dim, held.rule);
    } else if (held.rule.kind == kRowwiseAdagrad) {
      const float* sum = held.state.first + place;
      ask_for(gone == kHit ? sum : behind.state.first + row);
      ask_for(gone < 0 ? sum : behind.state.first + gone);
    }
  }
  // Some of the rows that are updated together, with their gradients.
  struct Some {
    int count = 0;
    int64_t rows[kTogether], places[kTogether];
    const float* grads[kTogether];
    void take(int64_t row, int64_t place, const float* grad, bool is_one) {
      rows[count] = row, places[count] = place, grads[count] = grad;
      count += is_one;  // without a branch
    }
  };
  void apply_all(const int64_t* at, const float* const* grads, int count, float* memory) const {
    Some gone, held_before, entering, conflicts;
    for (int r = 0; r < count; r++) {
      const int64_t u = at[r], out = left[u];
      gone.take(out, places[u], slot(places[u]), out >= 0);
      held_before.take(rows[u], places[u], grads[r], out == kHit);
      entering.take(rows[u], places[u], grads[r], out >= kFree);
      conflicts.take(rows[u], places[u], grads[r], out == kNoWay);
    }
    for (int r = 0; r < gone.count; r++) copy_state(arrays.behind, gone.rows[r], arrays.state, gone.places[r]);
    behind.keep_all(gone.rows, gone.grads, gone.count);
    for (int r = 0; r < entering.count; r++) copy_state(arrays.state, entering.places[r], arrays.behind, entering.rows[r]);
    if (is_wide<D>() && behind.is_usual()) {
      enter_and_add(entering);
    } else {
      for (int r = 0; r < entering.count; r++)
        read_row<D, kFormat>(behind.kept(entering.rows[r]), nullptr, held.dim, slot(entering.places[r]));
      held.apply_all(entering.places, entering.grads, entering.count, memory);
    }
    held.apply_all(held_before.places, held_before.grads, held_before.count, memory);
    if (conflicts.count) behind.apply_all(conflicts.rows, conflicts.grads, conflicts.count, memory);
  }
  // Decodes rows and adds what the rule says, in registers.
  void enter_and_add(const Some& entering) const {
#if ZIGGURAT_WIDE
    float factors[kTogether];
    step_factors<D, kTogether>(held.state, 0, entering.places, entering.grads, entering.count, held.rule, factors);
    for (int r = 0; r < entering.count; r++)
      wide_add_to_decoded<D, kFormat>(behind.kept(entering.rows[r]), entering.grads[r], factors[r], slot(entering.places[r]));
#endif
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
