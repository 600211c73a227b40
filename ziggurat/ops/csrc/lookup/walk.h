// The walk over a task's sorted lookups: sum runs of equal rows, apply the rule to each row, once. See lookup.cpp.
#pragma once
#include "rules.h"
#include "tasks.h"

namespace {

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

// Calls visit(row, gradient) for every distinct row in rising order; touch(row) asks for a row's memory in advance. A sum
// of several gradients is left in `room`, which visit may move on: it is read anew for each row.
template <int D, class Touch, class Visit>
void walk(const Task& task, const Gradients& gradients, int64_t dim, float* const& room, Touch touch, Visit visit) {
  const int64_t ahead = (D ? D : dim) <= 32 ? 16 : 8;
  const uint64_t* keys = task.keys.data();
  const int64_t count = task.count;
  const auto prefetch = [&](int64_t i) {
    if (i >= count) return;
    prefetch_row<D>(gradients.at(static_cast<uint32_t>(keys[i])), dim);
    touch(static_cast<int64_t>(keys[i] >> 32));
  };
  for (int64_t i = 0; i < std::min(ahead, count); i++) prefetch(i);
  std::vector<float> memory(D ? 0 : dim);
  Sum<D> sum(memory.data(), dim);
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
      sum.write(room);
      grad = room;
    }
    visit(static_cast<int64_t>(row), grad);
  }
}

// Rows of a walk that are applied together: what one row waits for (a root, a division, its ends) is then done for
// others in the meantime.
template <class Rows>
struct Together {
  const Rows& rows;
  int64_t dim;
  float *sums, *more;  // for so many rows each
  float* room;
  int count = 0;
  int64_t places[Rows::kTogether];
  const float* grads[Rows::kTogether];
  Together(const Rows& r, int64_t size, float* memory)
      : rows(r), dim(size), sums(memory), more(memory + Rows::kTogether * size), room(memory) {}
  void take(int64_t row, const float* grad) {
    places[count] = row;
    grads[count] = grad;
    room = sums + ++count * dim;
    if (count == Rows::kTogether) finish();
  }
  void finish() {
    rows.apply_all(places, grads, count, more);
    count = 0;
    room = sums;
  }
};

constexpr int64_t kRowsAhead = 8;
constexpr int64_t kMoreRows = 3;  // of memory that `apply` is given

// Sorts and walks every task. `rows` are those of the storage, whatever they are kept as: `table(first)` counts them from
// a table's first one, `touch(row)` asks for a row's memory, and `apply_all(rows, gradients, count, memory)` applies the
// rule to up to kTogether rows, with memory for kTogether + kMoreRows of them.
template <int D, class Rows>
int64_t update(Workspace& work, const Rows& rows, int64_t dim, int num_threads) {
  const Gradients gradients(work);
  std::atomic<int64_t> status{kOk};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  {
    std::vector<float> memory((2 * Rows::kTogether + kMoreRows) * dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work.num_tasks; t++) {
      Task& task = work.tasks[t];
      const int64_t result = sort_task(task);
      if (result != kOk) {
        status.store(result);
        continue;
      }
      const Rows table = rows.table(task.table.first_row);
      Together<Rows> together(table, dim, memory.data());
      walk<D>(
          task, gradients, dim, together.room, [&](int64_t row) { table.touch(row); },
          [&](int64_t row, const float* grad) { together.take(row, grad); });
      together.finish();
    }
  }
  return status.load();
}

// Walks tasks that are sorted. `rows` are the distinct rows of all tasks, counted in their order: `touch(u)` asks for the
// memory of one, and `apply_all` is as above.
template <int D, class Rows>
void update_sorted(const Workspace& work, const Rows& rows, int64_t dim, int num_threads) {
  const Gradients gradients(work);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1 && work.num_tasks > 1)
  {
    std::vector<float> memory((2 * Rows::kTogether + kMoreRows) * dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < work.num_tasks; t++) {
      const Task& task = work.tasks[t];
      int64_t next = task.first_unique;
      const int64_t end = next + task.num_unique;
      for (int64_t u = next; u < std::min(next + kRowsAhead, end); u++) rows.touch(u);
      Together<Rows> together(rows, dim, memory.data());
      walk<D>(
          task, gradients, dim, together.room, [](int64_t) {},
          [&](int64_t, const float* grad) {
            if (next + kRowsAhead < end) rows.touch(next + kRowsAhead);
            together.take(next++, grad);
          });
      together.finish();
    }
  }
}

// The rule for (U,) distinct rows with their sums.
template <int D, class Rows>
void apply_sums(const Rows& rows, int64_t dim, const int64_t* places, const float* sums, int64_t num_unique,
                int num_threads) {
  const int64_t size = D ? D : dim;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    std::vector<float> memory(3 * dim);
#pragma omp for schedule(static)
    for (int64_t u = 0; u < num_unique; u++) {
      if (u + kAhead < num_unique) rows.touch(places[u + kAhead]);
      rows.apply(places[u], sums + u * size, memory.data());
    }
  }
}

}  // namespace
