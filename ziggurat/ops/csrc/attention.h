// What ziggurat/ops/attention/cpp.py hands over, in this order; and small matrix products in registers.
#pragma once
#include <cstdint>
#include <cstring>

#include "bfloat16.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define ZIGGURAT_AVX512_BF16
#endif
#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define ZIGGURAT_BUCKET_TABLES
#endif
#if defined(ZIGGURAT_AVX512_BF16) || defined(ZIGGURAT_BUCKET_TABLES)
#include <immintrin.h>
#endif

namespace ziggurat_attention {

struct Problem {  // as _Problem in cpp.py
    const void *q, *k, *v, *out, *grad;  // rows of `heads` times `dim`, FP32 or BF16
    const float* lse;
    void* result;
    float* lse_result;
    void *dq, *dk, *dv;
    float* dw;  // (sequences, heads, positions + buckets)
    const int64_t *offsets, *query_offsets, *targets, *query_times, *key_times;
    const float *w_pos, *w_time;
    const int32_t* cell_bucket;
    const float *cell_next, *bucket_begins;
    const int64_t *query_starts, *key_starts, *lengths;  // of parts of sequences; null: queries are the last of all keys
    int64_t q_stride[2], k_stride[2], v_stride[2];  // of a row and of a head, in elements
    int64_t sequences, heads, dim, value_dim, positions, buckets, context, reach, softmax, bf16, threads, relu;
    float scale, inverse;
};

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Vectors of four, eight and sixteen numbers, of any alignment; a name each, since templates forget the alignment.
struct Four {
    typedef float V __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(16), aligned(4), may_alias));
    static constexpr int64_t lanes = 4, vectors = 2;
};
struct Eight {
    typedef float V __attribute__((vector_size(32), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(32), aligned(4), may_alias));
    static constexpr int64_t lanes = 8, vectors = 2;
};
struct Sixteen {
    typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
    typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
    static constexpr int64_t lanes = 16, vectors = 4;
};

// Products in FP32: a unit of a right-hand side is one number, so k steps are k numbers.
template <typename W>
struct Plain {
    typedef W Wide;
    typedef typename W::V V;
    typedef float In;
    typedef float Unit;
    static constexpr int64_t pair = 1, lanes = W::lanes, vectors = W::vectors;
    static constexpr bool halves = false;
    static float narrow(float x) { return x; }
    static Unit join(float first, float) { return first; }

    template <int R, int N>
    static void tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
                     bool add) {
        V sum[R][N];
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sum[r][n] = add ? *(const V*)(c + r * ldc + n * lanes) : V{};
        for (int64_t p = 0; p < k; ++p) {
            V right[N];
            for (int n = 0; n < N; ++n) right[n] = *(const V*)(b + p * ldb + n * lanes);
            for (int r = 0; r < R; ++r)
                for (int n = 0; n < N; ++n) sum[r][n] += a[r * lda + p] * right[n];
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) *(V*)(c + r * ldc + n * lanes) = sum[r][n];
    }
};

#if defined(ZIGGURAT_AVX512_BF16)
// Products of BF16 pairs with sums in FP32 (vdpbf16ps): a unit is two numbers that follow each other along k.
struct Pairs {
    typedef Sixteen Wide;
    typedef uint16_t In;
    typedef uint32_t Unit;
    static constexpr int64_t pair = 2, lanes = 16, vectors = 4;
    static constexpr bool halves = true;
    static uint16_t narrow(float x) { return to_bfloat16(x); }
    static Unit join(uint16_t first, uint16_t second) { return first | (uint32_t)second << 16; }

    template <int R, int N>
    static void tile(const uint16_t* a, int64_t lda, const uint32_t* b, int64_t ldb, float* c, int64_t ldc, int64_t k,
                     bool add) {
        __m512 sum[R][N];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n)
                sum[r][n] = add ? _mm512_loadu_ps(c + r * ldc + n * 16) : _mm512_setzero_ps();
        for (int64_t p = 0; p < k; ++p) {
            __m512i right[N];
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) right[n] = _mm512_loadu_si512(b + p * ldb + n * 16);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                int32_t two;
                std::memcpy(&two, a + r * lda + 2 * p, 4);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], left, (__m512bh)right[n]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) _mm512_storeu_ps(c + r * ldc + n * 16, sum[r][n]);
    }
};
#endif

constexpr int kRows = 6;  // of a register tile

template <typename M, int R, int N>
inline void one_tile(int64_t rows, int64_t wide, const typename M::In* a, int64_t lda, const typename M::Unit* b,
                     int64_t ldb, float* c, int64_t ldc, int64_t k, bool add) {
    if constexpr (R > 1)
        if (rows < R) return one_tile<M, R - 1, N>(rows, wide, a, lda, b, ldb, c, ldc, k, add);
    if constexpr (N > 1)
        if (wide < N) return one_tile<M, R, N - 1>(rows, wide, a, lda, b, ldb, c, ldc, k, add);
    M::template tile<R, N>(a, lda, b, ldb, c, ldc, k, add);
}

// c (rows × columns) = or += a (rows × k units, row by row) · b (k rows of units, lanes side by side).
template <typename M>
void multiply(const typename M::In* a, int64_t lda, const typename M::Unit* b, int64_t ldb, float* c, int64_t ldc,
              int64_t rows, int64_t k, int64_t columns, bool add) {
    for (int64_t n = 0; n < columns; n += M::vectors * M::lanes)
        for (int64_t r = 0; r < rows; r += kRows)
            one_tile<M, kRows, (int)M::vectors>(rows - r, (columns - n) / M::lanes, a + r * lda, lda, b + n, ldb,
                                                c + r * ldc + n, ldc, k, add);
}

}  // namespace ziggurat_attention
