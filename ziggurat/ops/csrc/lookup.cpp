// Embedding lookup and exact row-wise update on a CPU. Twin of ziggurat/ops/lookup/reference.py, which defines it.
//
// A lookup is one read of a row by a (sample, field). The update of a step has to sum the gradients of all lookups of
// a row before it applies the rule once. Each table (or, if it has many lookups and threads share them, some residue
// classes of its rows) is a *task*:
//
//     gather    keys = (row << 32 | where the lookup's gradient starts), padding left out
//     sort      stable radix sort by residue and row; 8 bytes a lookup
//     walk      over runs of equal rows: sum the run's gradients in order, apply the rule, next run;
//               rows, state and gradients of later runs are prefetched, since every one is a cache miss
//
// A row belongs to exactly one task and a run is summed in the order of the batch, so neither the number of threads
// nor their timing changes a bit of the result. Sums and squares use 8 fixed lanes (GCC vector extensions: AVX2,
// AVX-512, NEON or scalar code, the same additions in the same order) and the build sets -ffp-contract=off, so the
// processor does not change a bit either.
//
// Plain C interface, called through ctypes: no torch headers, so it compiles in seconds and serves every torch version.

#include "lookup/walk.h"

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

// ---------------------------------------------------------------- sorted tasks

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

// Rows of which the u-th lies at places[u] of the weights and of the state.
template <int D>
struct PlacedRows {
  FloatRows<D> rows;
  const int64_t* places;
  static constexpr int kTogether = 1;
  void touch(int64_t u) const { rows.touch(places[u]); }
  void apply_all(const int64_t* at, const float* const* grads, int count, float* memory) const {
    for (int r = 0; r < count; r++) rows.apply(places[at[r]], grads[r], memory);
  }
};

template <int D>
void sum_rows(Workspace& work, int64_t dim, int64_t* rows, float* sums, int num_threads) {
  const int64_t size = D ? D : dim;
  const Gradients gradients(work);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  {
    std::vector<float> memory(dim);
    float* sum = memory.data();
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work.num_tasks; t++) {
      const Task& task = work.tasks[t];
      int64_t next = task.first_unique;
      walk<D>(
          task, gradients, dim, sum, [](int64_t) {},
          [&](int64_t row, const float* grad) {
            rows[next] = task.table.first_row + row;
            std::memcpy(sums + next * size, grad, size * sizeof(float));
            next++;
          });
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
  const int64_t status = plan_tasks(work, parts, num_parts, int(num_threads));
  if (status != kOk) return status;
  const State state{state_first, state_second};
#define UPDATE(D) update<D>(work, FloatRows<D>{weight, state, dim, *rule}, dim, int(num_threads))
  FOR_DIM(dim, UPDATE)
}

// First half of summing: sorts, and returns in *num_unique how many distinct rows there are.
int64_t ziggurat_sort(void* workspace, const Part* parts, int64_t num_parts, int64_t* num_unique, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const int64_t planned = plan_tasks(work, parts, num_parts, int(num_threads));
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
#define UPDATE_PLACES(D) \
  update_sorted<D>(work, PlacedRows<D>{{weight, state, dim, *rule}, places}, dim, int(num_threads))
  FOR_DIM(dim, UPDATE_PLACES)
}

void ziggurat_apply(float* weight, float* state_first, float* state_second, int64_t dim, const int64_t* rows,
                    const float* sums, int64_t num_unique, const Rule* rule, int64_t num_threads) {
  const State state{state_first, state_second};
#define APPLY(D) apply_sums<D>(FloatRows<D>{weight, state, dim, *rule}, dim, rows, sums, num_unique, int(num_threads))
  FOR_DIM(dim, APPLY)
}

}  // extern "C"
