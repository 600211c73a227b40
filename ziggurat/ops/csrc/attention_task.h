// One head of one sequence: its rows as the products want them, what each query sees, its scores and biases.
#pragma once
#include <algorithm>
#include <limits>
#include <vector>

#include "attention.h"

namespace ziggurat_attention {

constexpr int64_t kBlock = 64, kBand = 48, kSlack = 64;  // columns and rows of a block; zeros behind w_pos and its gradient

// e^x to 2 units in the last place for |x| < 87; beyond that e^±87. NaN stays NaN.
template <typename W>
inline typename W::V exponential(typename W::V x) {
    typedef typename W::V V;
    typedef typename W::I I;
    x = x < -87.0f ? V{} - 87.0f : x;
    x = x > 87.0f ? V{} + 87.0f : x;
    const V shifted = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: the integer stands in the low bits
    const V n = shifted - 12582912.0f;
    const V r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (V)((I)p + ((I)shifted << 23));
}

template <typename W>
inline typename W::V sigmoid(typename W::V x) {
    return 1.0f / (1.0f + exponential<W>(-x));
}

#if defined(ZIGGURAT_AVX512_BF16)
// 2^t for numbers that are rounded to BF16 next: relative error below 1e-4.
inline __m512 rough_power(__m512 t) {
    const __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(t, n);
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(5.5504109e-2f), _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(_mm512_fmadd_ps(_mm512_mul_ps(f, f), _mm512_set1_ps(9.6181291e-3f), p), f,
                        _mm512_set1_ps(6.9314718e-1f));
    return _mm512_scalef_ps(_mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f)), n);
}
#endif

// e^x as exactly as the products of M are.
template <typename M>
inline typename M::Wide::V weight_of(typename M::Wide::V x) {
#if defined(ZIGGURAT_AVX512_BF16)
    if constexpr (M::halves) return (typename M::Wide::V)rough_power((__m512)(x * 1.44269504f));
#endif
    return exponential<typename M::Wide>(x);
}

// 1 / (1 + e^−x), the same.
template <typename M>
inline typename M::Wide::V gate_of(typename M::Wide::V x) {
#if defined(ZIGGURAT_AVX512_BF16)
    if constexpr (M::halves)
        return (typename M::Wide::V)_mm512_rcp14_ps(
            _mm512_add_ps(rough_power((__m512)(x * -1.44269504f)), _mm512_set1_ps(1.0f)));
#endif
    return sigmoid<typename M::Wide>(x);
}

// What a score is multiplied with in the pointwise forms: a step (ReLU), or a sigmoid (SiLU).
template <typename M>
inline typename M::Wide::V gate_in(const Problem& problem, typename M::Wide::V x) {
    typedef typename M::Wide::V V;
    return problem.relu ? (x > V{} ? V{} + 1.0f : V{}) : gate_of<M>(x);
}

inline float one_exponential(float x) { return exponential<Four>(Four::V{x, x, x, x})[0]; }

inline float one_gate(const Problem& problem, float score) {
    return problem.relu ? (score > 0 ? 1.0f : 0.0f) : 1 / (1 + one_exponential(-score));
}

template <typename M, typename Source>
inline typename M::In convert(Source x) {
    if constexpr (M::halves) return x;
    else if constexpr (sizeof(Source) == 2) return from_bfloat16(x);
    else return x;
}

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) { return from_bfloat16(x); }
inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) { *to = to_bfloat16(x); }

// Rows of one head of one sequence.
template <typename Source>
struct Rows {
    const Source* first;
    int64_t stride, count, width;
    const Source* operator[](int64_t r) const { return first + r * stride; }
};

template <typename M>
using Units = std::vector<typename M::Unit>;
template <typename M>
using Numbers = std::vector<typename M::In>;

// Memory that a thread keeps from task to task: fresh pages would cost a tenth of the time.
template <typename T, int number>
std::vector<T>& kept() {
    static thread_local std::vector<T> memory;
    return memory;
}

// Right-hand side whose lanes are rows: [block of 64 rows][unit of the width][64].
template <typename M, typename Source>
void pack_lanes(const Rows<Source>& rows, Units<M>& to) {
    const int64_t steps = (rows.width + M::pair - 1) / M::pair, blocks = (rows.count + kBlock - 1) / kBlock;
    to.assign(blocks * steps * kBlock, 0);
    for (int64_t row = 0; row < rows.count; ++row) {
        const Source* from = rows[row];
        typename M::Unit* out = to.data() + row / kBlock * steps * kBlock + row % kBlock;
        for (int64_t p = 0; p < rows.width / M::pair; ++p)
            out[p * kBlock] = M::join(convert<M>(from[M::pair * p]), convert<M>(from[M::pair * p + M::pair - 1]));
        if (rows.width % M::pair) out[(steps - 1) * kBlock] = M::join(convert<M>(from[rows.width - 1]), 0);
    }
}

// Right-hand side whose lanes are the width: [unit of rows][width, padded to 16].
template <typename M, typename Source>
void pack_pairs(const Rows<Source>& rows, Units<M>& to) {
    const int64_t padded = round_up(rows.width, 16), count = round_up(rows.count, kBlock);
    to.assign(count / M::pair * padded, 0);
    for (int64_t p = 0; p * M::pair < rows.count; ++p) {
        const bool whole = p * M::pair + M::pair <= rows.count;
        const Source *even = rows[p * M::pair], *odd = rows[whole ? p * M::pair + M::pair - 1 : p * M::pair];
        typename M::Unit* out = to.data() + p * padded;
        if (whole)
            for (int64_t c = 0; c < rows.width; ++c) out[c] = M::join(convert<M>(even[c]), convert<M>(odd[c]));
        else
            for (int64_t c = 0; c < rows.width; ++c) out[c] = M::join(convert<M>(even[c]), 0);
    }
}

// Left-hand side, row by row, the width padded to whole units.
template <typename M, typename Source>
void pack_rows(const Rows<Source>& rows, Numbers<M>& to) {
    const int64_t padded = round_up(rows.width, M::pair);
    to.assign(rows.count * padded, 0);
    for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t c = 0; c < rows.width; ++c) to[r * padded + c] = convert<M>(rows[r][c]);
}

// Left-hand side, transposed: [width][rows, padded to bands].
template <typename M, typename Source>
void pack_columns(const Rows<Source>& rows, Numbers<M>& to) {
    const int64_t padded = round_up(rows.count, kBand);
    to.assign(rows.width * padded, 0);
    for (int64_t r = 0; r < rows.count; ++r)
        for (int64_t c = 0; c < rows.width; ++c) to[c * padded + r] = convert<M>(rows[r][c]);
}

// Buckets of 16 durations at once, and their weights, by permutations of tables that lie in registers. A duration's
// logarithm, right to 0.002 of a bucket, names its bucket or the one above; where that one begins decides.
struct BucketTables {
    int64_t size = 0;  // 0: none, since there are more than 128 buckets or no such instructions
    int32_t last = 0;
    alignas(64) float begins[128], weights[128];

    // For buckets up to `highest`.
    void fill(const Problem& problem, int32_t highest) {
#if defined(ZIGGURAT_BUCKET_TABLES)
        if (highest >= 127) return;
        size = highest < 63 ? 64 : 128, last = (int32_t)problem.buckets - 1;
        for (int64_t b = 0; b < size; ++b) {
            const bool is_there = b < problem.buckets;
            begins[b] = b == 0 ? 0.0f : is_there ? problem.bucket_begins[b - 1] : std::numeric_limits<float>::infinity();
            weights[b] = is_there ? problem.w_time[b] : 0.0f;
        }
#endif
    }

#if defined(ZIGGURAT_BUCKET_TABLES)
    __m512 find(const float* table, __m512i index) const {
        const auto of = [&](int64_t at) {
            return _mm512_permutex2var_ps(_mm512_load_ps(table + at), index, _mm512_load_ps(table + at + 16));
        };
        const __mmask16 is_second = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        __m512 found = _mm512_mask_blend_ps(is_second, of(0), of(32));
        if (size == 128)
            found = _mm512_mask_blend_ps(_mm512_test_epi32_mask(index, _mm512_set1_epi32(64)), found,
                                         _mm512_mask_blend_ps(is_second, of(64), of(96)));
        return found;
    }

    // Add the weights of 16 durations to scores, and say which buckets they are in.
    void add(float* s, int64_t at, const int64_t* times, int32_t* buckets) const {
        const __m512i when = _mm512_set1_epi64(at);
        const auto apart = [&](int64_t from) {
            return _mm512_cvtepi64_ps(_mm512_abs_epi64(_mm512_sub_epi64(when, _mm512_loadu_si512(times + from))));
        };
        const __m512 size = _mm512_max_ps(_mm512_insertf32x8(_mm512_castps256_ps512(apart(0)), apart(8), 1),
                                          _mm512_set1_ps(1.0f));
        const __m512 m = _mm512_getmant_ps(size, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
        __m512 p = _mm512_fmadd_ps(m, _mm512_set1_ps(0.15270028f), _mm512_set1_ps(-1.02680491f));
        p = _mm512_fmadd_ps(_mm512_fmadd_ps(p, m, _mm512_set1_ps(3.01116215f)), m, _mm512_set1_ps(-2.13623207f));
        p = _mm512_fmadd_ps(_mm512_add_ps(_mm512_getexp_ps(size), p), _mm512_set1_ps(2.3028145f), _mm512_set1_ps(0.02f));
        const __m512i above = _mm512_min_epi32(_mm512_cvttps_epi32(p), _mm512_set1_epi32(last));
        const __mmask16 is_below = _mm512_cmp_ps_mask(size, find(begins, above), _CMP_LT_OQ);
        const __m512i bucket = _mm512_mask_sub_epi32(above, is_below, above, _mm512_set1_epi32(1));
        _mm512_storeu_si512(buckets, bucket);
        _mm512_storeu_ps(s, _mm512_add_ps(_mm512_loadu_ps(s), find(weights, bucket)));
    }
#endif
};

// The head of a sequence: its rows, what each of its queries sees, its times and biases. Positions count from the start of
// the sequence; columns from the first key that is there, `key_start`.
template <typename M, typename Source>
struct Task {
    typedef typename M::Wide W;
    typedef typename W::V V;
    typedef typename W::I I;
    const Problem& problem;
    int64_t head, length, asked, first_key, first_query;
    int64_t query_start, key_start, end;  // positions of the first query and key, and where the history ends
    int64_t history;                      // columns that are no targets
    Rows<Source> q, k, v;
    std::vector<int32_t> low, high;  // interval of each query
    std::vector<int64_t> times;
    bool times_rise = true;
    BucketTables tables;

    Task(const Problem& all, int64_t sequence, int64_t of_head) : problem(all), head(of_head) {
        first_key = all.offsets[sequence], first_query = all.query_offsets[sequence];
        length = all.offsets[sequence + 1] - first_key, asked = all.query_offsets[sequence + 1] - first_query;
        query_start = all.lengths ? all.query_starts[sequence] : length - asked;
        key_start = all.lengths ? all.key_starts[sequence] : 0;
        end = (all.lengths ? all.lengths[sequence] : length) - (all.targets ? all.targets[sequence] : 0);
        history = std::clamp<int64_t>(end - key_start, 0, length);
        q = {row_of(all.q, all.q_stride, first_query), all.q_stride[0], asked, all.dim};
        k = {row_of(all.k, all.k_stride, first_key), all.k_stride[0], length, all.dim};
        v = {row_of(all.v, all.v_stride, first_key), all.v_stride[0], length, all.value_dim};
        see();
        if (all.w_time && asked && length) read_times();
    }

    const Source* row_of(const void* all, const int64_t* stride, int64_t row) const {
        return static_cast<const Source*>(all) + row * stride[0] + head * stride[1];
    }

    // Of a tensor without gaps: rows of `heads` times `width`.
    template <typename T>
    T* plain_row(T* all, int64_t row, int64_t width) const {
        return all + (row * problem.heads + head) * width;
    }

    void see() {
        low.resize(asked), high.resize(asked);
        const int64_t context = std::min(problem.context, end), shift = std::max<int64_t>(context - 1, 0);
        for (int64_t r = 0; r < asked; ++r) {
            const int64_t i = position(r), last = i < context ? end : std::min(i + 1, end);
            const int64_t first = std::min(i, end) - problem.reach;
            high[r] = column(last);
            low[r] = column(problem.reach && i >= context && first > shift ? first : 0);
        }
    }

    int64_t position(int64_t r) const { return query_start + r; }
    int64_t column(int64_t at) const { return std::clamp<int64_t>(at - key_start, 0, history); }

    // The column of a query itself, and whether it is a target whose key is there.
    int64_t own(int64_t r) const { return position(r) - key_start; }
    bool is_target(int64_t r) const { return position(r) >= end && own(r) >= 0 && own(r) < length; }

    // Relative to it, w_pos begins at the first column.
    int64_t distance(int64_t r) const { return key_start - std::min(position(r), end); }

    void read_times() {
        times.resize(round_up(length, kBlock), problem.key_times[first_key + length - 1]);
        std::copy_n(problem.key_times + first_key, length, times.data());
        times_rise = std::is_sorted(times.begin(), times.end());
        if constexpr (M::lanes == 16) fill_tables();
    }

    // Tables for the buckets that the times of this task reach.
    void fill_tables() {
        const int64_t* asked_at = problem.query_times + first_query;
        const auto [first, last] = std::minmax_element(times.begin(), times.end());
        const auto [earliest, latest] = std::minmax_element(asked_at, asked_at + asked);
        tables.fill(problem, std::max(bucket(*latest, *first), bucket(*earliest, *last)));
    }

    int32_t bucket(int64_t asked_at, int64_t time) const {
        const int64_t difference = asked_at - time;
        const float size = std::max((float)(difference < 0 ? -difference : difference), 1.0f);
        int32_t bits;
        std::memcpy(&bits, &size, 4);
        const int32_t cell = (bits >> 20) - (127 << 3);
        return problem.cell_bucket[cell] + (size >= problem.cell_next[cell]);
    }

    bool has_bias() const { return problem.w_pos || problem.w_time; }

    // What products are still to be multiplied with: biases are added to scaled scores.
    float factor() const { return has_bias() ? 1.0f : problem.scale; }

    // Products of a query with columns [begin, end) of a block become scores, unless there is no bias (see `factor`).
    void add_biases(float* s, int64_t r, int64_t block, int64_t begin, int64_t end, int32_t* buckets) const {
        if (!has_bias()) return;
        for (int64_t c = begin; c < end; ++c) s[c] *= problem.scale;
        if (problem.w_pos) {
            const float* of = problem.w_pos + (problem.positions - 1) / 2 + block + distance(r);
            for (int64_t c = begin; c < end; ++c) s[c] += of[c];
        }
        if (!problem.w_time) return;
        const int64_t at = problem.query_times[first_query + r];
#if defined(ZIGGURAT_BUCKET_TABLES)
        if (tables.size) {
            for (int64_t c = begin; c < end; c += 16) tables.add(s + c, at, times.data() + block + c, buckets + c);
            return;
        }
#endif
        for (int64_t c = begin; c < end; c += 16) {
            const int64_t* of = times.data() + block + c;
            if (times_rise && at >= of[15]) add_falling(s + c, at, of, bucket(at, of[0]), bucket(at, of[15]), buckets + c);
            else
                for (int64_t l = 0; l < 16; ++l) buckets[c + l] = bucket(at, of[l]), s[c + l] += problem.w_time[buckets[c + l]];
        }
    }

    // Times of 16 events that fall away from `at`: few buckets, from `first` down to `last`.
    void add_falling(float* s, int64_t at, const int64_t* of, int32_t first, int32_t last, int32_t* buckets) const {
        if (first == last) {
            for (int64_t l = 0; l < 16; ++l) s[l] += problem.w_time[last], buckets[l] = last;
            return;
        }
        float size[16], weight[16];
        for (int64_t l = 0; l < 16; ++l) size[l] = (float)(at - of[l]), weight[l] = problem.w_time[last], buckets[l] = last;
        for (int32_t b = last + 1; b <= first; ++b) {
            const float begins = problem.bucket_begins[b - 1], next = problem.w_time[b];
            for (int64_t l = 0; l < 16; ++l) {
                weight[l] = size[l] >= begins ? next : weight[l];
                buckets[l] = size[l] >= begins ? b : buckets[l];
            }
        }
        for (int64_t l = 0; l < 16; ++l) s[l] += weight[l];
    }

    // The score of a target for itself.
    float own_score(int64_t r, int32_t* of_bucket) const {
        const Source *left = q[r], *right = k[own(r)];
        float sum = 0;
        for (int64_t c = 0; c < problem.dim; ++c) sum += to_float(left[c]) * to_float(right[c]);
        sum *= problem.scale;
        if (problem.w_pos) sum += problem.w_pos[(problem.positions - 1) / 2];
        if (problem.w_time) {
            *of_bucket = bucket(problem.query_times[first_query + r], times[own(r)]);
            sum += problem.w_time[*of_bucket];
        }
        return sum;
    }

    // The columns of a block that some of the queries [first, last) see, from its begin, in steps of 16.
    bool columns(int64_t first, int64_t last, int64_t block, int64_t* begin, int64_t* end) const {
        int64_t lowest = length, highest = 0;
        for (int64_t r = first; r < last; ++r)
            lowest = std::min<int64_t>(lowest, low[r]), highest = std::max<int64_t>(highest, high[r]);
        *begin = std::max<int64_t>(lowest - block, 0) / 16 * 16;
        *end = round_up(std::min(highest - block, kBlock), 16);
        return *begin < *end;
    }

    static I lane_numbers(int64_t from) {
        I lanes;
        for (int64_t l = 0; l < M::lanes; ++l) lanes[l] = (int32_t)(from + l);
        return lanes;
    }

    I is_seen(int64_t r, int64_t column) const {
        const I lanes = lane_numbers(column);
        return (lanes >= low[r]) & (lanes < high[r]);
    }

    // Zero what a query does not see of columns [begin, end) of a block.
    V seen(V value, int64_t r, int64_t column) const {
        return (V)((I)value & is_seen(r, column));
    }

    bool sees_all(int64_t r, int64_t begin, int64_t end) const { return low[r] <= begin && end <= high[r]; }
};

template <typename M>
inline void narrow_row(const float* from, typename M::In* to, int64_t begin, int64_t end) {
#if defined(ZIGGURAT_AVX512_BF16)
    if constexpr (M::halves) {
        for (int64_t c = begin; c < end; c += 16)
            _mm256_storeu_si256((__m256i*)(to + c), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + c)));
        return;
    }
#endif
    for (int64_t c = begin; c < end; ++c) to[c] = M::narrow(from[c]);
}

template <typename M>
inline void join_rows(const float* even, const float* odd, typename M::Unit* to, int64_t begin, int64_t end) {
#if defined(ZIGGURAT_AVX512_BF16)
    if constexpr (M::halves) {
        for (int64_t c = begin; c < end; c += 16) {
            const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(even + c)));
            const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(odd + c)));
            _mm512_storeu_si512(to + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
        return;
    }
#endif
    for (int64_t c = begin; c < end; ++c) to[c] = M::join(M::narrow(even[c]), M::narrow(odd[c]));
}

}  // namespace ziggurat_attention
