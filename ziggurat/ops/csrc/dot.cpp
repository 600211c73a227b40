// Pairwise dot products of the fields of a sample, forward and backward. See ziggurat/ops/dot.py for what and why.
//
// x (B, F, D) and out (B, P = F(F-1)/2) are contiguous; F <= 64, D <= 128, D a multiple of the vector's lanes (the
// caller checks). Samples are independent: one thread computes a whole sample, so results do not depend on threads.
#include <cstdint>
#include <cstring>

#include "vector.h"

namespace {

constexpr int64_t kMaxFields = 64, kMaxDim = 128, kRows = 4;

// out[(i, j)] = <x_i, x_j> for i < j. Four rows i at a time against vectors of columns j of the transposed sample.
template <typename T>
void forward_sample(const T* x, T* out, int64_t num_fields, int64_t dim) {
    using V = Vector<T>;
    constexpr int64_t lanes = V::lanes;
    alignas(64) T columns[kMaxDim * kMaxFields];
    alignas(64) T products[kRows * kMaxFields];
    const int64_t padded = (num_fields + lanes - 1) / lanes * lanes;
    for (int64_t d = 0; d < dim; ++d) {
        T* row = columns + d * padded;
        for (int64_t i = 0; i < num_fields; ++i) row[i] = x[i * dim + d];
        for (int64_t i = num_fields; i < padded; ++i) row[i] = 0;
    }
    for (int64_t first = 0; first + 1 < num_fields; first += kRows) {
        const T* rows[kRows];
        for (int64_t r = 0; r < kRows; ++r) rows[r] = x + (first + r < num_fields ? first + r : num_fields - 1) * dim;
        int64_t c = (first + 1) / lanes * lanes;
        for (; c + 2 * lanes <= padded; c += 2 * lanes) {
            typename V::type low[kRows] = {}, high[kRows] = {};
            for (int64_t d = 0; d < dim; ++d) {
                const auto left = V::load(columns + d * padded + c), right = V::load(columns + d * padded + c + lanes);
                for (int64_t r = 0; r < kRows; ++r) {
                    low[r] += rows[r][d] * left;
                    high[r] += rows[r][d] * right;
                }
            }
            for (int64_t r = 0; r < kRows; ++r) {
                V::store(products + r * kMaxFields + c, low[r]);
                V::store(products + r * kMaxFields + c + lanes, high[r]);
            }
        }
        for (; c < padded; c += lanes) {
            typename V::type sums[kRows] = {};
            for (int64_t d = 0; d < dim; ++d) {
                const auto column = V::load(columns + d * padded + c);
                for (int64_t r = 0; r < kRows; ++r) sums[r] += rows[r][d] * column;
            }
            for (int64_t r = 0; r < kRows; ++r) V::store(products + r * kMaxFields + c, sums[r]);
        }
        for (int64_t i = first; i < first + kRows && i + 1 < num_fields; ++i) {
            const int64_t count = num_fields - 1 - i;
            std::memcpy(out, products + (i - first) * kMaxFields + i + 1, count * sizeof(T));
            out += count;
        }
    }
}

// grad_x_i = sum over j of s_ij x_j, s symmetric with 0 on the diagonal. Rows x vectors in registers.
template <typename T, int64_t rows, int64_t vectors>
void backward_block(const T* x, const T* s, T* out, int64_t num_fields, int64_t dim) {
    using V = Vector<T>;
    typename V::type sums[rows][vectors] = {};
    for (int64_t j = 0; j < num_fields; ++j) {
        typename V::type values[vectors];
        for (int64_t v = 0; v < vectors; ++v) values[v] = V::load(x + j * dim + v * V::lanes);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t v = 0; v < vectors; ++v) sums[r][v] += s[j * kMaxFields + r] * values[v];
    }
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t v = 0; v < vectors; ++v) V::store(out + r * dim + v * V::lanes, sums[r][v]);
}

template <typename T, int64_t vectors>
void backward_columns(const T* x, const T* s, T* out, int64_t num_fields, int64_t dim) {
    int64_t i = 0;
    for (; i + kRows <= num_fields; i += kRows)
        backward_block<T, kRows, vectors>(x, s + i, out + i * dim, num_fields, dim);
    for (; i < num_fields; ++i) backward_block<T, 1, vectors>(x, s + i, out + i * dim, num_fields, dim);
}

template <typename T>
void backward_sample(const T* x, const T* grad, T* out, int64_t num_fields, int64_t dim) {
    constexpr int64_t lanes = Vector<T>::lanes;
    alignas(64) T s[kMaxFields * kMaxFields];
    for (int64_t i = 0; i < num_fields; ++i) {
        const int64_t count = num_fields - 1 - i;
        s[i * kMaxFields + i] = 0;
        std::memcpy(s + i * kMaxFields + i + 1, grad, count * sizeof(T));
        for (int64_t j = 0; j < count; ++j) s[(i + 1 + j) * kMaxFields + i] = grad[j];
        grad += count;
    }
    int64_t c = 0;
    for (; c + 2 * lanes <= dim; c += 2 * lanes) backward_columns<T, 2>(x + c, s, out + c, num_fields, dim);
    for (; c < dim; c += lanes) backward_columns<T, 1>(x + c, s, out + c, num_fields, dim);
}

template <typename T>
void forward(const T* x, T* out, int64_t size, int64_t num_fields, int64_t dim, int64_t threads) {
    const int64_t pairs = num_fields * (num_fields - 1) / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < size; ++b) forward_sample(x + b * num_fields * dim, out + b * pairs, num_fields, dim);
}

template <typename T>
void backward(const T* x, const T* grad, T* out, int64_t size, int64_t num_fields, int64_t dim, int64_t threads) {
    const int64_t pairs = num_fields * (num_fields - 1) / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < size; ++b) {
        const int64_t at = b * num_fields * dim;
        backward_sample(x + at, grad + b * pairs, out + at, num_fields, dim);
    }
}

}  // namespace

extern "C" {

void ziggurat_dot_f32(const float* x, float* out, int64_t size, int64_t fields, int64_t dim, int64_t threads) {
    forward(x, out, size, fields, dim, threads);
}
void ziggurat_dot_f64(const double* x, double* out, int64_t size, int64_t fields, int64_t dim, int64_t threads) {
    forward(x, out, size, fields, dim, threads);
}
void ziggurat_dot_backward_f32(const float* x, const float* grad, float* out, int64_t size, int64_t fields,
                               int64_t dim, int64_t threads) {
    backward(x, grad, out, size, fields, dim, threads);
}
void ziggurat_dot_backward_f64(const double* x, const double* grad, double* out, int64_t size, int64_t fields,
                               int64_t dim, int64_t threads) {
    backward(x, grad, out, size, fields, dim, threads);
}
}
