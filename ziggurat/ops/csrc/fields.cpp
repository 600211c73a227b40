// Linear combinations of fields, and a sum with layer norm. See ziggurat/ops/interactions/fields.py for what and why.
//
// All arrays are contiguous unless a stride is given. Sums over samples run in a fixed number of chunks, each by one
// thread, added in order: results do not depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vector.h"

namespace {

constexpr int64_t kRows = 4, kChunks = 16, kDepth = 64;

// out_r = sum over j of w[j * stride + r] x_j, for a block of rows r and vectors of columns, in registers.
template <typename T, int64_t rows, int64_t vectors>
void mix_block(const T* x, const T* w, T* out, int64_t inputs, int64_t stride, int64_t dim) {
    using V = Vector<T>;
    typename V::type sums[rows][vectors] = {};
    for (int64_t j = 0; j < inputs; ++j) {
        typename V::type values[vectors];
        for (int64_t v = 0; v < vectors; ++v) values[v] = V::load(x + j * dim + v * V::lanes);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < vectors; ++v) sums[r][v] += w[j * stride + r] * values[v];
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vectors; ++v) V::store(out + r * dim + v * V::lanes, sums[r][v]);
}

template <typename T, int64_t vectors>
void mix_columns(const T* x, const T* w, T* out, int64_t inputs, int64_t outputs, int64_t dim) {
    int64_t r = 0;
    for (; r + kRows <= outputs; r += kRows)
        mix_block<T, kRows, vectors>(x, w + r, out + r * dim, inputs, outputs, dim);
    for (; r < outputs; ++r) mix_block<T, 1, vectors>(x, w + r, out + r * dim, inputs, outputs, dim);
}

// out (B, outputs, dim) = w^T x with w (inputs, outputs) and x (B, inputs, dim).
template <typename T>
void mix(const T* x, const T* w, T* out, int64_t size, int64_t inputs, int64_t outputs, int64_t dim, int64_t threads) {
    constexpr int64_t lanes = Vector<T>::lanes;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < size; ++b) {
        const T* from = x + b * inputs * dim;
        T* to = out + b * outputs * dim;
        int64_t c = 0;
        for (; c + 2 * lanes <= dim; c += 2 * lanes) mix_columns<T, 2>(from + c, w, to + c, inputs, outputs, dim);
        for (; c < dim; c += lanes) mix_columns<T, 1>(from + c, w, to + c, inputs, outputs, dim);
    }
}

// total[j * padded + r] += sum over samples and d of x_j[d] g[(sample, d) * padded + r]; g is transposed and padded.
template <typename T, int64_t rows, int64_t vectors>
void outer_block(const T* x, const T* g, T* total, int64_t samples, int64_t between, int64_t dim, int64_t depth,
                 int64_t padded) {
    using V = Vector<T>;
    typename V::type sums[rows][vectors] = {};
    for (int64_t s = 0; s < samples; ++s, x += between)
        for (int64_t d = 0; d < depth; ++d, g += padded) {
            typename V::type values[vectors];
            for (int64_t v = 0; v < vectors; ++v) values[v] = V::load(g + v * V::lanes);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t v = 0; v < vectors; ++v) sums[r][v] += x[r * dim + d] * values[v];
        }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vectors; ++v) {
            T* at = total + r * padded + v * V::lanes;
            V::store(at, V::load(at) + sums[r][v]);
        }
}

// Gradient of w: (inputs, outputs) = sum over samples and columns of x[j] g[r]. Short fields go several samples a time.
template <typename T>
void mix_weight(const T* x, const T* g, T* out, int64_t size, int64_t inputs, int64_t outputs, int64_t dim,
                int64_t threads) {
    constexpr int64_t lanes = Vector<T>::lanes;
    const int64_t padded = (outputs + lanes - 1) / lanes * lanes, together = std::max<int64_t>(1, kDepth / dim);
    const int64_t between = inputs * dim;
    std::vector<T> totals(kChunks * inputs * padded, T(0));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
        T* total = totals.data() + chunk * inputs * padded;
        std::vector<T> turned(together * std::min(dim, kDepth) * padded, T(0));
        const int64_t end = (chunk + 1) * size / kChunks;
        for (int64_t b = chunk * size / kChunks; b < end; b += together)
            for (int64_t first = 0; first < dim; first += kDepth) {
                const int64_t depth = std::min(kDepth, dim - first), samples = std::min(together, end - b);
                for (int64_t s = 0; s < samples; ++s)
                    for (int64_t r = 0; r < outputs; ++r) {
                        const T* row = g + ((b + s) * outputs + r) * dim + first;
                        for (int64_t d = 0; d < depth; ++d) turned[(s * depth + d) * padded + r] = row[d];
                    }
                const T* from = x + b * between + first;
                for (int64_t c = 0; c < padded;) {
                    const bool wide = c + 2 * lanes <= padded;
                    const T* columns = turned.data() + c;
                    for (int64_t j = 0; j < inputs;) {
                        const bool block = j + kRows <= inputs;
                        T* at = total + j * padded + c;
                        const T* rows = from + j * dim;
                        if (block && wide)
                            outer_block<T, kRows, 2>(rows, columns, at, samples, between, dim, depth, padded);
                        else if (block)
                            outer_block<T, kRows, 1>(rows, columns, at, samples, between, dim, depth, padded);
                        else if (wide)
                            outer_block<T, 1, 2>(rows, columns, at, samples, between, dim, depth, padded);
                        else
                            outer_block<T, 1, 1>(rows, columns, at, samples, between, dim, depth, padded);
                        j += block ? kRows : 1;
                    }
                    c += wide ? 2 * lanes : lanes;
                }
            }
    }
    for (int64_t j = 0; j < inputs; ++j)
        for (int64_t r = 0; r < outputs; ++r) {
            T sum = 0;
            for (int64_t chunk = 0; chunk < kChunks; ++chunk) sum += totals[(chunk * inputs + j) * padded + r];
            out[j * outputs + r] = sum;
        }
}

template <typename T>
T total_of(typename Vector<T>::type value) {
    T sum = 0;
    for (int64_t i = 0; i < Vector<T>::lanes; ++i) sum += value[i];
    return sum;
}

// normal = (s - mean(s)) / sqrt(var(s) + eps) over dim, out = normal * weight + bias, where s is the sum of `kept` and
// the field out of `first` (the first `split` fields of a sample) or `second` (the others).
template <typename T>
void sum_norm(const T* first, const T* second, const T* kept, const T* weight, const T* bias, T* out, T* normal,
              T* scales, int64_t size, int64_t fields, int64_t split, int64_t dim, double eps, int64_t threads) {
    using V = Vector<T>;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < size; ++b)
        for (int64_t f = 0; f < fields; ++f) {
            const T* add = f < split ? first + (b * split + f) * dim : second + (b * (fields - split) + f - split) * dim;
            const int64_t at = (b * fields + f) * dim;
            T* to = normal + at;
            typename V::type sums = {}, squares = {};
            for (int64_t d = 0; d < dim; d += V::lanes) {
                const auto value = V::load(add + d) + V::load(kept + at + d);
                V::store(to + d, value);
                sums += value;
            }
            const T mean = total_of<T>(sums) / T(dim);
            for (int64_t d = 0; d < dim; d += V::lanes) {
                const auto value = V::load(to + d) - mean;
                squares += value * value;
            }
            const T scale = T(1) / std::sqrt(total_of<T>(squares) / T(dim) + T(eps));
            scales[b * fields + f] = scale;
            for (int64_t d = 0; d < dim; d += V::lanes) {
                const auto value = (V::load(to + d) - mean) * scale;
                V::store(to + d, value);
                V::store(out + at + d, value * V::load(weight + d) + V::load(bias + d));
            }
        }
}

// Gradients of the sum, of weight and of bias.
template <typename T>
void sum_norm_backward(const T* grad, const T* normal, const T* scales, const T* weight, T* out, T* weight_grad,
                       T* bias_grad, int64_t size, int64_t fields, int64_t dim, int64_t threads) {
    using V = Vector<T>;
    std::vector<T> totals(kChunks * 2 * dim, T(0));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
        T *weights = totals.data() + chunk * 2 * dim, *biases = weights + dim;
        for (int64_t row = chunk * size / kChunks * fields; row < (chunk + 1) * size / kChunks * fields; ++row) {
            const int64_t at = row * dim;
            typename V::type plain = {}, along = {};
            for (int64_t d = 0; d < dim; d += V::lanes) {
                const auto g = V::load(grad + at + d), x = V::load(normal + at + d);
                const auto scaled = g * V::load(weight + d);
                plain += scaled;
                along += scaled * x;
                V::store(weights + d, V::load(weights + d) + g * x);
                V::store(biases + d, V::load(biases + d) + g);
            }
            const T mean = total_of<T>(plain) / T(dim), slope = total_of<T>(along) / T(dim), scale = scales[row];
            for (int64_t d = 0; d < dim; d += V::lanes) {
                const auto scaled = V::load(grad + at + d) * V::load(weight + d);
                V::store(out + at + d, (scaled - mean - V::load(normal + at + d) * slope) * scale);
            }
        }
    }
    for (int64_t d = 0; d < dim; ++d) {
        weight_grad[d] = bias_grad[d] = 0;
        for (int64_t chunk = 0; chunk < kChunks; ++chunk) {
            weight_grad[d] += totals[chunk * 2 * dim + d];
            bias_grad[d] += totals[(chunk * 2 + 1) * dim + d];
        }
    }
}

}  // namespace

#define ZIGGURAT_FIELDS(T, suffix)                                                                                    \
    void ziggurat_mix_##suffix(const T* x, const T* w, T* out, int64_t size, int64_t inputs, int64_t outputs,        \
                               int64_t dim, int64_t threads) {                                                       \
        mix(x, w, out, size, inputs, outputs, dim, threads);                                                         \
    }                                                                                                                 \
    void ziggurat_mix_weight_##suffix(const T* x, const T* g, T* out, int64_t size, int64_t inputs, int64_t outputs, \
                                      int64_t dim, int64_t threads) {                                                \
        mix_weight(x, g, out, size, inputs, outputs, dim, threads);                                                  \
    }                                                                                                                 \
    void ziggurat_sum_norm_##suffix(const T* first, const T* second, const T* kept, const T* weight, const T* bias,  \
                                    T* out, T* normal, T* scales, int64_t size, int64_t fields, int64_t split,       \
                                    int64_t dim, double eps, int64_t threads) {                                      \
        sum_norm(first, second, kept, weight, bias, out, normal, scales, size, fields, split, dim, eps, threads);    \
    }                                                                                                                 \
    void ziggurat_sum_norm_backward_##suffix(const T* grad, const T* normal, const T* scales, const T* weight,       \
                                             T* out, T* weight_grad, T* bias_grad, int64_t size, int64_t fields,     \
                                             int64_t dim, int64_t threads) {                                         \
        sum_norm_backward(grad, normal, scales, weight, out, weight_grad, bias_grad, size, fields, dim, threads);    \
    }

extern "C" {
ZIGGURAT_FIELDS(float, f32)
ZIGGURAT_FIELDS(double, f64)
}
