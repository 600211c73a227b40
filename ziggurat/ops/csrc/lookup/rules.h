// The update rules, for one row. They define what ziggurat/ops/lookup/reference.py does for many.
#pragma once
#include "parts.h"

namespace {

struct State {
  float* first;   // row-wise Adagrad's sum (R,), or Adam's first moment (R, D)
  float* second;  // Adam's second moment (R, D)
};

// Asks for the state of a row in advance.
template <int D>
inline void touch_state(const State& state, int64_t row, int64_t dim, const Rule& rule) {
  const int64_t size = D ? D : dim;
  if (rule.kind == kRowwiseAdagrad) ask_for(state.first + row);
  if (rule.kind == kAdam) {
    prefetch_row<D>(state.first + row * size, dim);
    prefetch_row<D>(state.second + row * size, dim);
  }
}

template <int D>
inline float mean_square(const float* grad, int64_t dim) {
  const int64_t size = D ? D : dim;
  Lanes squares = {0};
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) squares += load(grad + d) * load(grad + d);
  float total = add_up(squares);
  for (; D == 0 && d < size; d++) total += grad[d] * grad[d];
  return total / static_cast<float>(size);
}

// What the gradient of a row is multiplied by in SGD and row-wise Adagrad, whose sum it moves on.
template <int D>
inline float step_factor(const State& state, int64_t row, const float* grad, int64_t dim, const Rule& rule) {
  if (rule.kind != kRowwiseAdagrad) return -rule.learning_rate;
  const float accumulated = state.first[row] + mean_square<D>(grad, dim);
  state.first[row] = accumulated;
  return -rule.learning_rate / (std::sqrt(accumulated) + rule.eps);
}

// The same for up to kCount rows, first_row + at[r]: sums first, so that no root waits for another row's.
template <int D, int kCount>
inline void step_factors(const State& state, int64_t first_row, const int64_t* at, const float* const* grads, int count,
                         const Rule& rule, float* factors) {
  if (rule.kind != kRowwiseAdagrad) {
    std::fill(factors, factors + count, -rule.learning_rate);
    return;
  }
  float sums[kCount] = {};
  for (int r = 0; r < count; r++) sums[r] = state.first[first_row + at[r]] + mean_square<D>(grads[r], D);
  for (int r = 0; r < count; r++) state.first[first_row + at[r]] = sums[r];
  for (int r = 0; r < kCount; r++) sums[r] = -rule.learning_rate / (std::sqrt(sums[r]) + rule.eps);  // the others: any
  std::copy(sums, sums + count, factors);
}

// The rule for one row, as in the formulas of ziggurat/ops/table_optimizers/. `w` are its numbers, `row` its place in
// the state; `scaled` has room for one row.
template <int D>
inline void apply_row(float* w, const State& state, int64_t row, const float* grad, int64_t dim, const Rule& rule,
                      float* scaled) {
  const int64_t size = D ? D : dim;
  if (rule.scale != 1.0f || rule.weight_decay != 0.0f) {
    for (int64_t d = 0; d < size; d++) scaled[d] = grad[d] * rule.scale + rule.weight_decay * w[d];
    grad = scaled;
  }
  if (rule.kind == kAdam) {
    const float factor = -rule.learning_rate;
    float *a = state.first + row * size, *v = state.second + row * size;
    for (int64_t d = 0; d < size; d++) {
      a[d] += (1.0f - rule.beta1) * (grad[d] - a[d]);
      v[d] += (1.0f - rule.beta2) * (grad[d] * grad[d] - v[d]);
      w[d] += factor * (a[d] / (std::sqrt(v[d]) + rule.eps));
    }
    return;
  }
  const float factor = step_factor<D>(state, row, grad, dim, rule);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) store(w + d, load(w + d) + factor * load(grad + d));
  for (; D == 0 && d < size; d++) w[d] += factor * grad[d];
}

// ---------------------------------------------------------------- rows that are numbers

template <int D>
struct FloatRows {
  float* weight;
  State state;
  int64_t dim;
  const Rule& rule;
  int64_t first_row = 0;  // of the table that rows are counted in
  static constexpr int kTogether = 1;
  FloatRows table(int64_t first) const { return {weight, state, dim, rule, first}; }
  void touch(int64_t row) const {
    prefetch_row<D>(weight + (first_row + row) * (D ? D : dim), dim);
    touch_state<D>(state, first_row + row, dim, rule);
  }
  void apply(int64_t row, const float* grad, float* memory) const {
    apply_row<D>(weight + (first_row + row) * (D ? D : dim), state, first_row + row, grad, dim, rule, memory);
  }
  void apply_all(const int64_t* at, const float* const* grads, int count, float* memory) const {
    for (int r = 0; r < count; r++) apply(at[r], grads[r], memory);
  }
};

}  // namespace
