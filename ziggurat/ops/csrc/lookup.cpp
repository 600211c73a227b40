// Embedding lookup and exact row-wise update on a CPU. Twin of ziggurat/ops/lookup/reference.py, which defines it.
//
// A lookup is one read of a row by a (sample, field). The update of a step has to sum the gradients of all lookups of
// a row before it applies the rule once. Each table (or, if it has many lookups, each residue class of its rows) is a
// *task*:
//
//     gather    keys = (row << 32 | where the lookup's gradient starts), padding left out
//     sort      stable radix sort by row; 8 bytes a lookup, stays in the L1 or L2 cache
//     walk      over runs of equal rows: sum the run's gradients in order, apply the rule, next run;
//               rows, state and gradients of later runs are prefetched, since every one is a cache miss
//
// A row belongs to exactly one task and a run is summed in the order of the batch, so neither the number of threads
// nor their timing changes a bit of the result. Sums and squares use 8 fixed lanes (GCC vector extensions: AVX2,
// AVX-512, NEON or scalar code, the same additions in the same order) and the build sets -ffp-contract=off, so the
// processor does not change a bit either.
//
// Plain C interface, called through ctypes: no torch headers, so it compiles in seconds and serves every torch version.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "lookup/parts.h"
#include "lookup/rules.h"

namespace {

// ---------------------------------------------------------------- the gradient of the output, as the walk wants it

// Divides mean-pooled fields by the lengths of their lists, from grad to out (which may be the same memory).
int64_t divide_means(const Part& part, int64_t dim, const float* grad, float* out, int num_threads) {
  std::atomic<int64_t> status{kOk};
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
  for (int64_t b = 0; b < part.batch_size; b++) {
    for (int64_t s = 0; s < part.num_slots; s++) {
      const Slot& slot = part.slots[s];
      float factor = 1.0f;
      if (slot.kind == kMean) {
        const int64_t* offsets = part.offsets + slot.index * part.batch_size + b;
        if (offsets[1] < offsets[0]) status.store(kBadOffsets);
        factor = 1.0f / static_cast<float>(std::max<int64_t>(1, offsets[1] - offsets[0]));
      }
      const int64_t first = b * part.width + slot.column;
      for (int64_t d = 0; d < dim; d++) out[first + d] = grad[first + d] * factor;
    }
  }
  return status.load();
}

// ---------------------------------------------------------------- tasks: gather and sort the lookups of a table

struct Field {  // one slot of one part, reading the task's table
  const Part* part;
  const Slot* slot;
  uint32_t base;  // where the part's gradient starts, if all parts' lay one after the other
};

struct Table {
  int64_t first_row = 0, num_rows = 0, num_lookups = 0;
  std::vector<Field> fields;
};

struct Task {
  Table table;
  uint32_t residue = 0, modulus = 1;  // the table's rows with row mod modulus = residue; a power of two
  std::vector<uint64_t> keys, scratch;
  int64_t count = 0, num_unique = 0, first_unique = 0;
};

struct Workspace {
  std::vector<Task> tasks;
  int64_t num_tasks = 0;
  std::vector<Part> parts;
  std::vector<uint64_t> starts;  // of each part's gradient, as in Field::base
};

// A table with more lookups than a task should have is split, so that its keys fit the L2 cache and a step with few
// tables still has about kTasks tasks for the threads to share.
constexpr int64_t kMinTaskLookups = 4096, kMaxTaskLookups = 32768, kTasks = 16, kMaxModulus = 64;

int64_t count_lookups(const Part& part, const Slot& slot) {
  if (slot.kind == kSingle) return part.batch_size;
  return part.offsets[(slot.index + 1) * part.batch_size] - part.offsets[slot.index * part.batch_size];
}

// The split depends on the numbers of lookups alone, never on the number of threads.
int64_t plan_tasks(Workspace& work, const Part* parts, int64_t num_parts) {
  work.parts.assign(parts, parts + num_parts);
  work.starts.clear();
  uint64_t start = 0;
  for (const Part& part : work.parts) {
    work.starts.push_back(start);
    start += static_cast<uint64_t>(part.batch_size) * part.width;
  }
  std::vector<Table> tables;
  for (size_t p = 0; p < work.parts.size(); p++) {
    const Part& part = work.parts[p];
    for (int64_t s = 0; s < part.num_slots; s++) {
      const Slot& slot = part.slots[s];
      const int64_t count = count_lookups(part, slot);
      if (count < 0 || count > std::max(part.num_values, part.batch_size)) return kBadOffsets;
      auto table = std::find_if(tables.begin(), tables.end(),
                                [&](const Table& known) { return known.first_row == slot.first_row; });
      if (table == tables.end()) table = tables.insert(table, {slot.first_row, slot.num_rows, 0, {}});
      table->fields.push_back({&part, &slot, static_cast<uint32_t>(work.starts[p])});
      table->num_lookups += count;
    }
  }
  int64_t total = 0;
  for (const Table& table : tables) total += table.num_lookups;
  const int64_t limit = std::clamp(total / kTasks, kMinTaskLookups, kMaxTaskLookups);
  std::stable_sort(tables.begin(), tables.end(),
                   [](const Table& a, const Table& b) { return a.num_lookups > b.num_lookups; });  // long ones first
  work.num_tasks = 0;
  for (const Table& table : tables) {
    int64_t modulus = 1;
    while (modulus < kMaxModulus && table.num_lookups > modulus * limit && table.num_rows > modulus) modulus *= 2;
    for (int64_t residue = 0; residue < modulus; residue++) {
      if (work.num_tasks == static_cast<int64_t>(work.tasks.size())) work.tasks.emplace_back();
      Task& task = work.tasks[work.num_tasks++];  // keeps its buffers from the last step
      task.table = table;
      task.modulus = static_cast<uint32_t>(modulus);
      task.residue = static_cast<uint32_t>(residue);
    }
  }
  return kOk;
}

// Calls visit(row, where the gradient starts, whether the task has it) for every lookup of the task's table.
template <class Visit>
int64_t for_each_lookup(const Task& task, Visit visit) {
  const uint64_t num_rows = task.table.num_rows;
  const uint32_t mask = task.modulus - 1;
  for (const Field& field : task.table.fields) {
    const Part& part = *field.part;
    const Slot& slot = *field.slot;
    const bool single = slot.kind == kSingle;
    const int64_t first = slot.index * part.batch_size;
    const int64_t* rows = single ? part.single + first : part.values;
    const int64_t* offsets = part.offsets + first;
    const int64_t end = single ? part.batch_size : std::min(offsets[part.batch_size], part.num_values);
    uint32_t source = field.base + static_cast<uint32_t>(slot.column);
    for (int64_t b = 0; b < part.batch_size; b++, source += static_cast<uint32_t>(part.width)) {
      const int64_t from = single ? b : offsets[b], to = single ? b + 1 : offsets[b + 1];
      if (from < 0 || from > to || to > end) return kBadOffsets;  // so there are never more than count_lookups
      for (int64_t p = from; p < to; p++) {
        const uint64_t row = rows[p];
        if (row >= num_rows) return kRowOutOfBounds;
        visit(row, source, row != 0 && (row & mask) == task.residue);
      }
    }
  }
  return kOk;
}

constexpr int kMaxDigit = 11, kMaxPasses = 3;  // 33 bits, rows have at most 31

// Stable radix sort by the `digit · passes` bits from `low` up, lowest digit first. Returns where the result lies.
template <int passes>
uint64_t* radix_sort(uint64_t* keys, uint64_t* scratch, int64_t count, int low, int digit) {
  const uint32_t mask = (1u << digit) - 1;
  uint32_t counts[passes][1 << kMaxDigit];
  for (int pass = 0; pass < passes; pass++) std::memset(counts[pass], 0, sizeof(uint32_t) << digit);
  for (int64_t i = 0; i < count; i++) {
    const uint64_t row = keys[i] >> low;
    for (int pass = 0; pass < passes; pass++) counts[pass][row >> (pass * digit) & mask]++;
  }
  for (int pass = 0; pass < passes; pass++) {
    uint32_t* next = counts[pass];
    uint32_t total = 0;
    for (uint32_t value = 0; value <= mask; value++) {
      const uint32_t here = next[value];
      next[value] = total;
      total += here;
    }
    for (int64_t i = 0; i < count; i++) scratch[next[keys[i] >> (low + pass * digit) & mask]++] = keys[i];
    std::swap(keys, scratch);
  }
  return keys;
}

// Fills task.keys with the task's lookups, sorted by row. Rows of a task agree in the residue's bits.
int64_t sort_task(Task& task) {
  int64_t count = task.table.num_lookups;
  if (task.modulus > 1) {
    count = 0;
    const int64_t status = for_each_lookup(task, [&](uint64_t, uint32_t, bool mine) { count += mine; });
    if (status != kOk) return status;
  }
  if (static_cast<int64_t>(task.keys.size()) <= count) {
    task.keys.resize(count + count / 4 + 1);  // one more, for the key that a skipped lookup leaves
    task.scratch.resize(task.keys.size());
  }
  uint64_t* keys = task.keys.data();
  count = 0;
  const int64_t status = for_each_lookup(task, [&](uint64_t row, uint32_t source, bool mine) {
    keys[count] = row << 32 | source;
    count += mine;
  });
  if (status != kOk) return status;
  task.count = count;
  int shift = 0, bits = 1;
  while ((1u << shift) < task.modulus) shift++;
  while ((task.table.num_rows - 1) >> (bits + shift)) bits++;
  const int passes = (bits + kMaxDigit - 1) / kMaxDigit, digit = (bits + passes - 1) / passes, low = 32 + shift;
  const auto sort = passes == 1 ? radix_sort<1> : passes == 2 ? radix_sort<2> : radix_sort<kMaxPasses>;
  if (sort(keys, task.scratch.data(), count, low, digit) != keys) task.keys.swap(task.scratch);
  task.num_unique = 0;
  uint64_t last = 0;  // padding, which no key has
  for (int64_t i = 0; i < count; i++, last = task.keys[i - 1] >> 32) task.num_unique += task.keys[i] >> 32 != last;
  return kOk;
}

// ---------------------------------------------------------------- walk: sum runs of equal rows, apply the rule

// Where a gradient lies in memory. With several parts the number counts through their gradients one after the other.
struct Gradients {
  const Workspace& work;
  const float* first;
  explicit Gradients(const Workspace& w) : work(w), first(w.parts.size() == 1 ? w.parts[0].grad : nullptr) {}
  inline const float* at(uint32_t source) const {
    if (first) return first + source;
    size_t part = work.parts.size() - 1;
    while (work.starts[part] > source) part--;
    return work.parts[part].grad + (source - work.starts[part]);
  }
};

// Calls visit(row, gradient) for every distinct row in rising order; touch(row) asks for a row's memory in advance.
template <int D, class Touch, class Visit>
void walk(const Task& task, const Gradients& gradients, int64_t dim, float* memory, Touch touch, Visit visit) {
  const int64_t ahead = (D ? D : dim) <= 32 ? 16 : 8;
  const uint64_t* keys = task.keys.data();
  const int64_t count = task.count;
  const auto prefetch = [&](int64_t i) {
    if (i >= count) return;
    prefetch_row<D>(gradients.at(static_cast<uint32_t>(keys[i])), dim);
    touch(static_cast<int64_t>(keys[i] >> 32));
  };
  for (int64_t i = 0; i < std::min(ahead, count); i++) prefetch(i);
  Sum<D> sum(memory, dim);
  for (int64_t i = 0; i < count;) {
    const uint64_t row = keys[i] >> 32;
    const float* grad = gradients.at(static_cast<uint32_t>(keys[i]));
    prefetch(i + ahead);
    if (++i < count && keys[i] >> 32 == row) {
      sum.set(grad);
      do {
        prefetch(i + ahead);
        sum.add(gradients.at(static_cast<uint32_t>(keys[i])));
      } while (++i < count && keys[i] >> 32 == row);
      sum.write(memory);
      grad = memory;
    }
    visit(static_cast<int64_t>(row), grad);
  }
}

template <int D>
inline void touch_row(float* weight, const State& state, int64_t row, int64_t dim, const Rule& rule) {
  const int64_t size = D ? D : dim;
  prefetch_row<D>(weight + row * size, dim);
  if (rule.kind == kRowwiseAdagrad) __builtin_prefetch(state.first + row);
  if (rule.kind == kAdam) {
    prefetch_row<D>(state.first + row * size, dim);
    prefetch_row<D>(state.second + row * size, dim);
  }
}

template <int D>
int64_t update(Workspace& work, float* weight, const State& state, int64_t dim, const Rule& rule, int num_threads) {
  const int64_t size = D ? D : dim;
  const Gradients gradients(work);
  std::atomic<int64_t> status{kOk};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  {
    std::vector<float> sum(2 * dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work.num_tasks; t++) {
      Task& task = work.tasks[t];
      const int64_t result = sort_task(task);
      if (result != kOk) {
        status.store(result);
        continue;
      }
      const int64_t first = task.table.first_row;
      walk<D>(
          task, gradients, dim, sum.data(), [&](int64_t row) { touch_row<D>(weight, state, first + row, dim, rule); },
          [&](int64_t row, const float* grad) {
            apply_row<D>(weight + (first + row) * size, state, first + row, grad, dim, rule, sum.data() + dim);
          });
    }
  }
  return status.load();
}

// The distinct rows of sorted tasks, in the order of `sum_rows`.
void sorted_rows(const Workspace& work, int64_t* rows, int num_threads) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  for (int64_t t = 0; t < work.num_tasks; t++) {
    const Task& task = work.tasks[t];
    uint64_t last = 0;  // padding, which no key has
    for (int64_t i = 0, next = task.first_unique; i < task.count; last = task.keys[i++] >> 32)
      if (task.keys[i] >> 32 != last) rows[next++] = task.table.first_row + static_cast<int64_t>(task.keys[i] >> 32);
  }
}

// `update` of sorted tasks, where the u-th distinct row lies at places[u] of the weights and of the state.
template <int D>
void update_places(Workspace& work, float* weight, const State& state, int64_t dim, const int64_t* places,
                   const Rule& rule, int num_threads) {
  const int64_t size = D ? D : dim;
  const Gradients gradients(work);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  {
    std::vector<float> sum(2 * dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work.num_tasks; t++) {
      const Task& task = work.tasks[t];
      const int64_t* here = places + task.first_unique;
      const int64_t* ahead = here - 1;
      int64_t last = 0;
      const auto touch = [&](int64_t row) {  // once for every lookup, in their order
        if (row != last) touch_row<D>(weight, state, *++ahead, dim, rule);
        last = row;
      };
      walk<D>(task, gradients, dim, sum.data(), touch, [&](int64_t, const float* grad) {
        const int64_t place = *here++;
        apply_row<D>(weight + place * size, state, place, grad, dim, rule, sum.data() + dim);
      });
    }
  }
}

template <int D>
void sum_rows(Workspace& work, int64_t dim, int64_t* rows, float* sums, int num_threads) {
  const int64_t size = D ? D : dim;
  const Gradients gradients(work);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  {
    std::vector<float> sum(dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work.num_tasks; t++) {
      const Task& task = work.tasks[t];
      int64_t next = task.first_unique;
      walk<D>(
          task, gradients, dim, sum.data(), [](int64_t) {},
          [&](int64_t row, const float* grad) {
            rows[next] = task.table.first_row + row;
            std::memcpy(sums + next * size, grad, size * sizeof(float));
            next++;
          });
    }
  }
}

template <int D>
void apply(float* weight, const State& state, int64_t dim, const int64_t* rows, const float* sums, int64_t num_unique,
           const Rule& rule, int num_threads) {
  const int64_t size = D ? D : dim;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<float> scaled(dim);
#pragma omp for schedule(static)
    for (int64_t u = 0; u < num_unique; u++) {
      if (u + kAhead < num_unique) touch_row<D>(weight, state, rows[u + kAhead], dim, rule);
      apply_row<D>(weight + rows[u] * size, state, rows[u], sums + u * size, dim, rule, scaled.data());
    }
  }
}

}  // namespace

// ---------------------------------------------------------------- the C interface

extern "C" {

void* ziggurat_workspace_new() { return new Workspace(); }
void ziggurat_workspace_delete(void* work) { delete static_cast<Workspace*>(work); }

int64_t ziggurat_lookup(const float* weight, const Part* part, int64_t dim, void* out, int64_t out_is_bfloat16,
                        int64_t num_threads) {
#define LOOKUP(D)                                                                                      \
  (out_is_bfloat16 ? lookup<D>(Floats<D>{weight, dim}, *part, dim, static_cast<uint16_t*>(out), int(num_threads)) \
                   : lookup<D>(Floats<D>{weight, dim}, *part, dim, static_cast<float*>(out), int(num_threads)))
  FOR_DIM(dim, LOOKUP)
}

int64_t ziggurat_divide_means(const Part* part, int64_t dim, const float* grad, float* out, int64_t num_threads) {
  return divide_means(*part, dim, grad, out, int(num_threads));
}

// Sum and apply. The parts' gradients have less than 2^32 numbers together, the tables less than 2^31 rows.
int64_t ziggurat_update(void* workspace, const Part* parts, int64_t num_parts, float* weight, float* state_first,
                        float* state_second, int64_t dim, const Rule* rule, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const int64_t status = plan_tasks(work, parts, num_parts);
  if (status != kOk) return status;
  const State state{state_first, state_second};
#define UPDATE(D) update<D>(work, weight, state, dim, *rule, int(num_threads))
  FOR_DIM(dim, UPDATE)
}

// First half of summing: sorts, and returns in *num_unique how many distinct rows there are.
int64_t ziggurat_sort(void* workspace, const Part* parts, int64_t num_parts, int64_t* num_unique, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const int64_t planned = plan_tasks(work, parts, num_parts);
  if (planned != kOk) return planned;
  std::atomic<int64_t> status{kOk};
#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
  for (int64_t t = 0; t < work.num_tasks; t++) {
    const int64_t result = sort_task(work.tasks[t]);
    if (result != kOk) status.store(result);
  }
  if (status.load() != kOk) return status.load();
  int64_t total = 0;
  for (int64_t t = 0; t < work.num_tasks; t++) {
    work.tasks[t].first_unique = total;
    total += work.tasks[t].num_unique;
  }
  *num_unique = total;
  return kOk;
}

// Second half, right after the first: writes rows (U,) and sums (U, dim).
void ziggurat_sum(void* workspace, int64_t dim, int64_t* rows, float* sums, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
#define SUM(D) sum_rows<D>(work, dim, rows, sums, int(num_threads))
  FOR_DIM(dim, SUM)
}

// Between both halves, or in place of the second: writes the distinct rows (U,).
void ziggurat_sorted_rows(const void* workspace, int64_t* rows, int64_t num_threads) {
  sorted_rows(*static_cast<const Workspace*>(workspace), rows, int(num_threads));
}

// In place of the second half: sums and applies, where the u-th row lies at places[u].
void ziggurat_update_places(void* workspace, float* weight, float* state_first, float* state_second, int64_t dim,
                            const int64_t* places, const Rule* rule, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const State state{state_first, state_second};
#define UPDATE_PLACES(D) update_places<D>(work, weight, state, dim, places, *rule, int(num_threads))
  FOR_DIM(dim, UPDATE_PLACES)
}

void ziggurat_apply(float* weight, float* state_first, float* state_second, int64_t dim, const int64_t* rows,
                    const float* sums, int64_t num_unique, const Rule* rule, int64_t num_threads) {
  const State state{state_first, state_second};
#define APPLY(D) apply<D>(weight, state, dim, rows, sums, num_unique, *rule, int(num_threads))
  FOR_DIM(dim, APPLY)
}

}  // extern "C"
