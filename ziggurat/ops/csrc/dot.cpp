// Pairwise dot products of the fields of a sample, forward and backward. See ziggurat/ops/interactions/dot.py for what and why.
//
// x (B, F, D) and out (B, P = F(F-1)/2) are contiguous; F <= 64, D <= 128, D a multiple of the vector's lanes (the
// caller checks). Samples are independent: one thread computes a whole sample, so results do not depend on threads.
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define ZIGGURAT_AVX512_BF16
#endif
#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "bfloat16.h"
#include "vector.h"

namespace {

constexpr int64_t kMaxFields = 64, kMaxDim = 128, kRows = 4;

// to[d][i] = from[i][d], for i < rows and d < columns; to's rows have `stride` numbers, zeros after `rows`.
template <typename T>
void transpose(const T* from, T* to, int64_t rows, int64_t columns, int64_t stride) {
    for (int64_t d = 0; d < columns; ++d) {
        T* row = to + d * stride;
        for (int64_t i = 0; i < rows; ++i) row[i] = from[i * columns + d];
        for (int64_t i = rows; i < stride; ++i) row[i] = 0;
    }
}

#if defined(__AVX__)
// Eight by eight numbers of 32 bits in registers; they are moved, never computed with.
inline void transpose_block(const float* const from[8], float* to, int64_t stride) {
    __m256 r[8], s[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps(from[i]);
    for (int i = 0; i < 8; i += 2) {
        s[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        s[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(s[i], s[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(s[i], s[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(s[i + 1], s[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

template <>
void transpose<float>(const float* from, float* to, int64_t rows, int64_t columns, int64_t stride) {
    alignas(64) static const float zeros[8] = {};
    for (int64_t first = 0; first < stride; first += 8)
        for (int64_t d = 0; d < columns; d += 8) {
            const float* block[8];
            for (int64_t i = 0; i < 8; ++i) block[i] = first + i < rows ? from + (first + i) * columns + d : zeros;
            transpose_block(block, to + d * stride + first, stride);
        }
}
#endif

// out[(i, j)] = <x_i, x_j> for i < j. Four rows i at a time against vectors of columns j of the transposed sample.
template <typename T>
void forward_sample(const T* x, T* out, int64_t num_fields, int64_t dim) {
    using V = Vector<T>;
    constexpr int64_t lanes = V::lanes;
    alignas(64) T columns[kMaxDim * kMaxFields];
    alignas(64) T products[kRows * kMaxFields];
    const int64_t padded = (num_fields + lanes - 1) / lanes * lanes;
    transpose(x, columns, num_fields, dim, padded);
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

// ---- The whole input row of the network above: [the first piece | pairs | zeros], from pieces that lie apart.

// What ziggurat/ops/interactions/dot_interaction.py passes: `width` columns of each sample, in FP32 or bfloat16.
struct Piece {
    const void* from;
    void* gradient;  // contiguous, same dtype; forward: null
    int64_t width, stride, is_bfloat16;
};

void read_row(const void* from, int64_t at, int64_t width, bool is_bfloat16, float* to) {
    if (!is_bfloat16) {
        std::memcpy(to, static_cast<const float*>(from) + at, width * sizeof(float));
        return;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(from) + at;
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) *reinterpret_cast<Lanes*>(to + c) = load_bfloat16(halves + c);
    for (; c < width; ++c) to[c] = from_bfloat16(halves[c]);
}

void write_row(void* to, int64_t at, int64_t width, bool is_bfloat16, const float* from) {
    if (!is_bfloat16) {
        std::memcpy(static_cast<float*>(to) + at, from, width * sizeof(float));
        return;
    }
    uint16_t* halves = static_cast<uint16_t*>(to) + at;
    int64_t c = 0;
    for (; c + kLanes <= width; c += kLanes) store_bfloat16(halves + c, *reinterpret_cast<const Lanes*>(from + c));
    for (; c < width; ++c) halves[c] = to_bfloat16(from[c]);
}

// A sample's fields; with `rounded` each number is rounded to bfloat16, as autocast does.
void read_sample(const Piece* pieces, int64_t num_pieces, int64_t b, bool rounded, float* x) {
    for (int64_t p = 0; p < num_pieces; ++p) {
        const Piece& piece = pieces[p];
        read_row(piece.from, b * piece.stride, piece.width, piece.is_bfloat16, x);
        if (rounded && !piece.is_bfloat16) {
            int64_t c = 0;
            for (; c + kLanes <= piece.width; c += kLanes) {
                Halves halves;
                store_bfloat16(reinterpret_cast<uint16_t*>(&halves), *reinterpret_cast<const Lanes*>(x + c));
                *reinterpret_cast<Lanes*>(x + c) = load_bfloat16(reinterpret_cast<const uint16_t*>(&halves));
            }
            for (; c < piece.width; ++c) x[c] = from_bfloat16(to_bfloat16(x[c]));
        }
        x += piece.width;
    }
}

#if defined(ZIGGURAT_AVX512_BF16)
// The same two passes with the processor's products of bfloat16 pairs, summed in FP32: for D a multiple of 16.

// A sample's fields as bfloat16 numbers, rounded where they are not.
void read_halves(const Piece* pieces, int64_t num_pieces, int64_t b, uint16_t* x) {
    for (int64_t p = 0; p < num_pieces; ++p) {
        const Piece& piece = pieces[p];
        if (piece.is_bfloat16) {
            std::memcpy(x, static_cast<const uint16_t*>(piece.from) + b * piece.stride, piece.width * 2);
        } else {
            const float* from = static_cast<const float*>(piece.from) + b * piece.stride;
            int64_t c = 0;
            for (; c + 32 <= piece.width; c += 32)
                _mm512_storeu_si512(x + c, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + c + 16),
                                                                        _mm512_loadu_ps(from + c)));
            for (; c < piece.width; ++c) x[c] = to_bfloat16(from[c]);
        }
        x += piece.width;
    }
}

inline __m512 multiply_add(__m512 sum, uint32_t pair, __m512i pairs) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)), (__m512bh)pairs);
}

constexpr int64_t kWide = 16;

// Two numbers of a row, (x_i[d], x_i[d + 1]), are one of 32 bits; columns has them transposed.
void forward_sample_bf16(const uint16_t* x, float* out, int64_t num_fields, int64_t dim) {
    alignas(64) float columns[kMaxFields * kMaxDim / 2];
    alignas(64) float products[kRows * kMaxFields];
    const int64_t half = dim / 2, padded = (num_fields + kWide - 1) / kWide * kWide;
    transpose(reinterpret_cast<const float*>(x), columns, num_fields, half, padded);
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(x);
    for (int64_t first = 0; first + 1 < num_fields; first += kRows) {
        const uint32_t* from[kRows];
        for (int64_t r = 0; r < kRows; ++r)
            from[r] = pairs + (first + r < num_fields ? first + r : num_fields - 1) * half;
        int64_t c = (first + 1) / kWide * kWide;
        for (; c + 2 * kWide <= padded; c += 2 * kWide) {
            __m512 low[kRows], high[kRows];
            for (int64_t r = 0; r < kRows; ++r) low[r] = high[r] = _mm512_setzero_ps();
            for (int64_t d = 0; d < half; ++d) {
                const __m512i left = _mm512_load_si512(columns + d * padded + c);
                const __m512i right = _mm512_load_si512(columns + d * padded + c + kWide);
                for (int64_t r = 0; r < kRows; ++r) {
                    low[r] = multiply_add(low[r], from[r][d], left);
                    high[r] = multiply_add(high[r], from[r][d], right);
                }
            }
            for (int64_t r = 0; r < kRows; ++r) {
                _mm512_storeu_ps(products + r * kMaxFields + c, low[r]);
                _mm512_storeu_ps(products + r * kMaxFields + c + kWide, high[r]);
            }
        }
        for (; c < padded; c += kWide) {
            __m512 sums[kRows];
            for (int64_t r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_ps();
            for (int64_t d = 0; d < half; ++d) {
                const __m512i column = _mm512_load_si512(columns + d * padded + c);
                for (int64_t r = 0; r < kRows; ++r) sums[r] = multiply_add(sums[r], from[r][d], column);
            }
            for (int64_t r = 0; r < kRows; ++r) _mm512_storeu_ps(products + r * kMaxFields + c, sums[r]);
        }
        for (int64_t i = first; i < first + kRows && i + 1 < num_fields; ++i) {
            const int64_t count = num_fields - 1 - i;
            std::memcpy(out, products + (i - first) * kMaxFields + i + 1, count * sizeof(float));
            out += count;
        }
    }
}

template <int64_t rows>
void backward_block_bf16(const uint32_t* weights, int64_t stride, const __m512i* pairs, int64_t num_pairs,
                         int64_t vectors, float* out, int64_t dim) {
    int64_t v = 0;
    for (; v + 2 <= vectors; v += 2) {
        __m512 low[rows], high[rows];
        for (int64_t r = 0; r < rows; ++r) low[r] = high[r] = _mm512_setzero_ps();
        for (int64_t j = 0; j < num_pairs; ++j) {
            const __m512i left = pairs[j * vectors + v], right = pairs[j * vectors + v + 1];
            for (int64_t r = 0; r < rows; ++r) {
                low[r] = multiply_add(low[r], weights[r * stride + j], left);
                high[r] = multiply_add(high[r], weights[r * stride + j], right);
            }
        }
        for (int64_t r = 0; r < rows; ++r) {
            _mm512_storeu_ps(out + r * dim + v * kWide, low[r]);
            _mm512_storeu_ps(out + r * dim + (v + 1) * kWide, high[r]);
        }
    }
    for (; v < vectors; ++v) {
        __m512 sums[rows];
        for (int64_t r = 0; r < rows; ++r) sums[r] = _mm512_setzero_ps();
        for (int64_t j = 0; j < num_pairs; ++j)
            for (int64_t r = 0; r < rows; ++r)
                sums[r] = multiply_add(sums[r], weights[r * stride + j], pairs[j * vectors + v]);
        for (int64_t r = 0; r < rows; ++r) _mm512_storeu_ps(out + r * dim + v * kWide, sums[r]);
    }
}

// Fields go in pairs (x_j, x_{j+1}), the weights s_ij, s_i(j+1) beside each other; rows of zeros after the last field.
void backward_sample_bf16(const uint16_t* x, const uint16_t* grad, float* out, int64_t num_fields, int64_t dim) {
    const int64_t num_pairs = (num_fields + 1) / 2, vectors = dim / kWide, stride = 2 * num_pairs;
    const int64_t num_rows = (num_fields + kRows - 1) / kRows * kRows;
    alignas(64) uint16_t s[kMaxFields * kMaxFields];
    __m512i pairs[kMaxFields / 2 * kMaxDim / kWide];
    std::memset(s, 0, num_rows * stride * sizeof(uint16_t));
    for (int64_t i = 0; i < num_fields; ++i) {
        uint16_t* const row = s + i * stride;
        uint16_t* const column = s + i;
        for (int64_t j = i + 1; j < num_fields; ++j) {
            const uint16_t value = *grad++;
            row[j] = value;
            column[j * stride] = value;
        }
    }
    for (int64_t j = 0; j < num_pairs; ++j)
        for (int64_t v = 0; v < vectors; ++v) {
            const uint16_t* even = x + 2 * j * dim + v * kWide;
            const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
            __m512i high = _mm512_setzero_si512();
            if (2 * j + 1 < num_fields)
                high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + dim)));
            pairs[j * vectors + v] = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
        }
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(s);
    for (int64_t i = 0; i < num_rows; i += kRows)
        backward_block_bf16<kRows>(weights + i * num_pairs, num_pairs, pairs, num_pairs, vectors, out + i * dim, dim);
}
#endif

bool has_bf16_products(int64_t dim, bool are_bfloat16) {
#if defined(ZIGGURAT_AVX512_BF16)
    return are_bfloat16 && dim % kWide == 0;
#else
    return false;
#endif
}

}  // namespace

extern "C" {

// out (size, passed + P + padding): the first `passed` columns of the pieces, all pairs, zeros.
void ziggurat_dot_interaction(const Piece* pieces, int64_t num_pieces, void* out, int64_t out_is_bfloat16,
                              int64_t passed, int64_t padding, int64_t size, int64_t fields, int64_t dim,
                              int64_t threads) {
    const int64_t pairs = fields * (fields - 1) / 2, width = passed + pairs + padding;
    const bool in_pairs = has_bf16_products(dim, out_is_bfloat16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < size; ++b) {
        alignas(64) float x[kMaxFields * kMaxDim];
        alignas(64) float row[kMaxDim + kMaxFields * kMaxFields / 2 + 64];
#if defined(ZIGGURAT_AVX512_BF16)
        if (in_pairs) {
            uint16_t* halves = reinterpret_cast<uint16_t*>(x);
            read_halves(pieces, num_pieces, b, halves);
            for (int64_t c = 0; c < passed; ++c) row[c] = from_bfloat16(halves[c]);
            forward_sample_bf16(halves, row + passed, fields, dim);
        } else
#endif
        {
            read_sample(pieces, num_pieces, b, out_is_bfloat16, x);
            std::memcpy(row, x, passed * sizeof(float));
            forward_sample(x, row + passed, fields, dim);
        }
        for (int64_t c = passed + pairs; c < width; ++c) row[c] = 0;
        write_row(out, b * width, width, out_is_bfloat16, row);
    }
}

void ziggurat_dot_interaction_backward(const Piece* pieces, int64_t num_pieces, const void* grad,
                                       int64_t grad_is_bfloat16, int64_t passed, int64_t padding, int64_t size,
                                       int64_t fields, int64_t dim, int64_t threads) {
    const int64_t pairs = fields * (fields - 1) / 2, width = passed + pairs + padding;
    const bool in_pairs = has_bf16_products(dim, grad_is_bfloat16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t b = 0; b < size; ++b) {
        alignas(64) float x[kMaxFields * kMaxDim], out[kMaxFields * kMaxDim];
        alignas(64) float row[kMaxDim + kMaxFields * kMaxFields / 2 + 64];
        read_row(grad, b * width, in_pairs ? passed : width - padding, grad_is_bfloat16, row);
#if defined(ZIGGURAT_AVX512_BF16)
        if (in_pairs) {
            uint16_t* halves = reinterpret_cast<uint16_t*>(x);
            read_halves(pieces, num_pieces, b, halves);
            const uint16_t* of_pairs = static_cast<const uint16_t*>(grad) + b * width + passed;
            backward_sample_bf16(halves, of_pairs, out, fields, dim);
        } else
#endif
        {
            read_sample(pieces, num_pieces, b, grad_is_bfloat16, x);
            backward_sample(x, row + passed, out, fields, dim);
        }
        for (int64_t c = 0; c < passed; ++c) out[c] += row[c];
        const float* from = out;
        for (int64_t p = 0; p < num_pieces; ++p) {
            const Piece& piece = pieces[p];
            if (piece.gradient) write_row(piece.gradient, b * piece.width, piece.width, piece.is_bfloat16, from);
            from += piece.width;
        }
    }
}

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
