// Scores of INT8 rows against queries, and the best k of them. See ziggurat/ops/scan.py for what and why.
//
// A row is `row_bytes` numbers (a multiple of 16), each stored with 128 added. Dot products are exact in 32 bits; a
// score is (float)dot * scale + add, rounded after each operation (-ffp-contract=off), so every path gives the same bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define ZIGGURAT_X86
#endif

namespace {

constexpr int kRows = 16;         // that are scored together
constexpr int64_t kFar = 8192;    // bytes that neighbouring rows are fetched ahead
constexpr int64_t kList = 256;    // rows that are listed before they are scored
constexpr float kLeastLargest = 1e-30f;
alignas(64) const float kZeros[kRows] = {};

struct Query {
    std::vector<int8_t> codes;    // row_bytes + 64, zeros behind `dim`
    std::vector<int16_t> wide;    // the same, for AVX2
    int32_t offset = 0;           // 128 times their sum: what the stored numbers have too much
    float scale = 0, norm = 0;
    int64_t row_bytes = 0;
};

// False if a number is not finite.
bool quantize(const float* from, int64_t dim, int64_t row_bytes, Query& query) {
    float largest = kLeastLargest;
    bool finite = true;
    for (int64_t d = 0; d < dim; ++d) {
        const float size = std::fabs(from[d]);
        finite &= size <= std::numeric_limits<float>::max();
        largest = size > largest ? size : largest;
    }
    if (!finite) return false;
    query.codes.assign(row_bytes + 64, 0);
    query.wide.assign(row_bytes + 64, 0);
    const float inverse = 127.0f / largest;
    int32_t sum = 0;
    int64_t squares = 0;
    for (int64_t d = 0; d < dim; ++d) {
        const int32_t code = static_cast<int32_t>(std::nearbyintf(from[d] * inverse));
        query.codes[d] = static_cast<int8_t>(code);
        query.wide[d] = static_cast<int16_t>(code);
        sum += code;
        squares += code * code;
    }
    query.offset = 128 * sum;
    query.scale = largest / 127.0f;
    query.norm = std::sqrt(static_cast<float>(squares));
    query.row_bytes = row_bytes;
    return true;
}

// Writes 16 scores; returns which of them are at least `least`, as bits.
using Score = uint32_t (*)(const Query&, const uint8_t* const*, const float*, const float*, float, float*);

uint32_t score_plain(const Query& query, const uint8_t* const* rows, const float* scales, const float* add,
                     float least, float* out) {
    uint32_t found = 0;
    for (int r = 0; r < kRows; ++r) {
        int32_t dot = 0;
        for (int64_t d = 0; d < query.row_bytes; ++d) dot += rows[r][d] * query.codes[d];
        const float scaled = static_cast<float>(dot - query.offset) * scales[r];
        out[r] = scaled + add[r];
        found |= static_cast<uint32_t>(out[r] >= least) << r;
    }
    return found;
}

#if defined(ZIGGURAT_X86)
#define ZIGGURAT_AVX2 __attribute__((target("avx2")))
#define ZIGGURAT_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

// Sums of pairs of 16-bit numbers are exact, unlike those of vpmaddubsw, which saturate.
ZIGGURAT_AVX2 uint32_t score_avx2(const Query& query, const uint8_t* const* rows, const float* scales,
                                  const float* add, float least, float* out) {
    alignas(32) int32_t dots[kRows];
    for (int r = 0; r < kRows; r += 4) {
        __m256i sums[4];
        for (int i = 0; i < 4; ++i) sums[i] = _mm256_setzero_si256();
        for (int64_t d = 0; d < query.row_bytes; d += 16) {
            const __m256i wide = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query.wide.data() + d));
            for (int i = 0; i < 4; ++i) {
                const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r + i] + d));
                sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(_mm256_cvtepu8_epi16(codes), wide));
            }
        }
        const __m256i pairs = _mm256_hadd_epi32(
            _mm256_hadd_epi32(sums[0], sums[1]), _mm256_hadd_epi32(sums[2], sums[3])
        );
        const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        _mm_store_si128(reinterpret_cast<__m128i*>(dots + r), four);
    }
    uint32_t found = 0;
    for (int r = 0; r < kRows; r += 8) {
        const __m256i exact = _mm256_sub_epi32(
            _mm256_load_si256(reinterpret_cast<const __m256i*>(dots + r)), _mm256_set1_epi32(query.offset)
        );
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(scales + r));
        const __m256 scores = _mm256_add_ps(scaled, _mm256_loadu_ps(add + r));
        _mm256_storeu_ps(out + r, scores);
        const __m256 is_enough = _mm256_cmp_ps(scores, _mm256_set1_ps(least), _CMP_GE_OQ);
        found |= static_cast<uint32_t>(_mm256_movemask_ps(is_enough)) << r;
    }
    return found;
}

// Sixteen vectors of sixteen numbers to the vector of their sums: pairs, fours, then lanes of 128 bits.
ZIGGURAT_VNNI inline __m512i sum_each(__m512i* v) {
    for (int i = 0; i < 8; ++i)
        v[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i)
        v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 2; ++i)
        v[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x44),
                                _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xee));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(v[0], v[1], 0x88), _mm512_shuffle_i32x4(v[0], v[1], 0xdd));
}

template <int chunks>  // of 64 numbers; 0: any number, and a last one that is not full
ZIGGURAT_VNNI uint32_t score_vnni(const Query& query, const uint8_t* const* rows, const float* scales,
                                  const float* add, float least, float* out) {
    __m512i sums[kRows];
    const int64_t full = chunks ? chunks : query.row_bytes / 64;
    for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_si512();
    for (int64_t c = 0; c < full; ++c) {
        const __m512i codes = _mm512_loadu_si512(query.codes.data() + 64 * c);
        for (int r = 0; r < kRows; ++r)
            sums[r] = _mm512_dpbusd_epi32(sums[r], _mm512_loadu_si512(rows[r] + 64 * c), codes);
    }
    if (!chunks && query.row_bytes % 64) {
        const __mmask64 rest = (1ull << query.row_bytes % 64) - 1;
        const __m512i codes = _mm512_loadu_si512(query.codes.data() + 64 * full);
        for (int r = 0; r < kRows; ++r)
            sums[r] = _mm512_dpbusd_epi32(sums[r], _mm512_maskz_loadu_epi8(rest, rows[r] + 64 * full), codes);
    }
    const __m512i exact = _mm512_sub_epi32(sum_each(sums), _mm512_set1_epi32(query.offset));
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(scales));
    const __m512 scores = _mm512_add_ps(scaled, _mm512_loadu_ps(add));
    _mm512_storeu_ps(out, scores);
    return _mm512_cmp_ps_mask(scores, _mm512_set1_ps(least), _CMP_GE_OQ);
}
#endif

enum Path : int64_t { kPlain = 0, kAvx2 = 1, kVnni = 2 };

Score score_of(int64_t path, int64_t row_bytes) {
#if defined(ZIGGURAT_X86)
    if (path == kVnni) {
        if (row_bytes == 64) return score_vnni<1>;
        if (row_bytes == 128) return score_vnni<2>;
        return score_vnni<0>;
    }
    if (path == kAvx2) return score_avx2;
#endif
    return score_plain;
}

// Score and position as one number: a larger one is the better score, or the same and the smaller position.
inline uint64_t key_of(float score, uint32_t position) {
    uint32_t bits;
    std::memcpy(&bits, &score, 4);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(~position);
}

inline float score_of_key(uint64_t key) {
    uint32_t bits = static_cast<uint32_t>(key >> 32);
    bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
    float score;
    std::memcpy(&score, &bits, 4);
    return score;
}

// The k largest keys: everything above the smallest of them is kept in a buffer, which is cut to k when it is full.
class Best {
   public:
    void start(int64_t k) {
        k_ = k;
        room_ = std::max<int64_t>(k + 64, 3 * k);
        if (static_cast<int64_t>(keys_.size()) < room_) keys_.resize(room_);
        count_ = 0;
        least_key_ = 0;
        least = -std::numeric_limits<float>::infinity();
    }
    inline void offer(float score, uint32_t position) {
        const uint64_t key = key_of(score, position);
        if (key <= least_key_) return;
        keys_[count_++] = key;
        if (count_ == room_) cut();
    }
    int64_t finish() {
        if (count_ > k_) cut();
        std::sort(keys_.begin(), keys_.begin() + count_, std::greater<uint64_t>());
        return count_;
    }
    uint64_t key(int64_t i) const { return keys_[i]; }
    float least;  // a score below it cannot be among the best

   private:
    void cut() {
        std::nth_element(keys_.begin(), keys_.begin() + k_ - 1, keys_.begin() + count_, std::greater<uint64_t>());
        count_ = k_;
        least_key_ = keys_[k_ - 1];
        least = score_of_key(least_key_);
    }
    std::vector<uint64_t> keys_;
    int64_t k_ = 0, room_ = 0, count_ = 0;
    uint64_t least_key_ = 0;
};

struct Rows {
    const uint8_t* codes;
    const float* scales;
    int64_t bytes;
};

struct Scratch {
    Query query;
    Best best, clusters;
    std::vector<float> bias;
    std::vector<uint64_t> order;
};

inline void offer_found(uint32_t found, const float* scores, const uint32_t* positions, uint32_t first, Best& best) {
    while (found) {
        const int r = __builtin_ctz(found);
        found &= found - 1;
        best.offer(scores[r], positions ? positions[r] : first + r);
    }
}

// Neighbouring rows.
void score_range(Score score, const Query& query, const Rows& table, const float* add, int64_t begin, int64_t end,
                 Best& best, int64_t next) {
    const uint8_t* rows[kRows];
    alignas(64) float scores[kRows], scales[kRows], adds[kRows] = {};
    for (int64_t at = begin; at < end; at += kRows) {
        const int64_t num = std::min<int64_t>(kRows, end - at);
        const uint8_t* first = table.codes + at * table.bytes;
        for (int64_t r = 0; r < kRows; ++r) rows[r] = first + std::min(r, num - 1) * table.bytes;
        const int64_t far = at + kFar / table.bytes < end ? at + kFar / table.bytes : next + at + kFar / table.bytes - end;
        const uint8_t* ahead = table.codes + far * table.bytes;
        for (int64_t i = 0; i < kRows * table.bytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        __builtin_prefetch(table.scales + far, 0, 2);
        const float *scale = table.scales + at, *plus = add ? add + at : kZeros;
        if (num < kRows) {
            for (int64_t r = 0; r < num; ++r) scales[r] = scale[r], adds[r] = plus[r];
            for (int64_t r = num; r < kRows; ++r) scales[r] = 0;
            scale = scales, plus = adds;
        }
        uint32_t found = score(query, rows, scale, plus, best.least, scores);
        found &= (num < kRows ? 1u << num : 1u << kRows) - 1;
        if (found) offer_found(found, scores, nullptr, static_cast<uint32_t>(at), best);
    }
}

// Rows of a list. They are fetched when they are listed and scored when half a list more has been fetched.
class Listed {
   public:
    Listed(Score score, const Query& query, const Rows& table, Best& best)
        : score_(score), query_(query), table_(table), best_(best) {}
    inline void add(uint32_t position) {
        const uint8_t* row = table_.codes + position * table_.bytes;
        for (int64_t at = 0; at < table_.bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
        __builtin_prefetch(table_.scales + position, 0, 2);
        list_[count_++] = position;
        if (count_ == kList) {
            score(kList / 2);
            std::memcpy(list_, list_ + kList / 2, kList / 2 * sizeof(uint32_t));
            count_ = kList / 2;
        }
    }
    void finish() { score(count_), count_ = 0; }

   private:
    void score(int64_t count) {
        const uint8_t* rows[kRows];
        alignas(64) float scores[kRows], scales[kRows];
        for (int64_t at = 0; at < count; at += kRows) {
            const int64_t num = std::min<int64_t>(kRows, count - at);
            for (int64_t r = 0; r < kRows; ++r) {
                const int64_t position = list_[at + std::min(r, num - 1)];
                rows[r] = table_.codes + position * table_.bytes;
                scales[r] = table_.scales[position];
            }
            uint32_t found = score_(query_, rows, scales, kZeros, best_.least, scores);
            found &= (1u << num) - 1;
            if (found) offer_found(found, scores, list_ + at, 0, best_);
        }
    }
    Score score_;
    const Query& query_;
    const Rows& table_;
    Best& best_;
    uint32_t list_[kList];
    int64_t count_ = 0;
};

// List those of the rows begin ... end that pass the mask; returns how many.
int64_t list_passing(const uint64_t* mask, int64_t begin, int64_t end, Listed& listed) {
    int64_t passed = 0;
    for (int64_t word = begin / 64; word * 64 < end; ++word) {
        uint64_t bits = mask[word];
        if (word == begin / 64) bits &= ~0ull << begin % 64;
        if (end - word * 64 < 64) bits &= (1ull << (end - word * 64)) - 1;
        passed += __builtin_popcountll(bits);
        for (; bits; bits &= bits - 1) listed.add(static_cast<uint32_t>(word * 64 + __builtin_ctzll(bits)));
    }
    return passed;
}

struct Tables {  // as _Tables in scan.py
    const uint8_t* codes;
    const float* scales;
    const int64_t* offsets;
    const uint8_t* centroid_codes;
    const float* centroid_scales;
    const float* centroid_bias;
    int64_t num_rows, row_bytes, dim, num_clusters;
};

void best_clusters(const Tables& tables, Score score, int64_t num, Scratch& scratch) {
    scratch.clusters.start(num);
    const Rows centroids = {tables.centroid_codes, tables.centroid_scales, tables.row_bytes};
    score_range(score, scratch.query, centroids, scratch.bias.data(), 0, tables.num_clusters, scratch.clusters,
                0);
    const int64_t found = scratch.clusters.finish();
    scratch.order.resize(found);
    for (int64_t i = 0; i < found; ++i) scratch.order[i] = static_cast<uint32_t>(~scratch.clusters.key(i));
}

void search_clusters(const Tables& tables, Score score, const uint64_t* mask, int64_t probes, int64_t least,
                     Scratch& scratch) {
    const Rows rows = {tables.codes, tables.scales, tables.row_bytes};
    Listed listed(score, scratch.query, rows, scratch.best);
    probes = std::max<int64_t>(probes, 1);
    if (probes >= tables.num_clusters) {  // all rows: the order of clusters does not matter
        const int64_t begin = tables.offsets[0], end = tables.offsets[tables.num_clusters];
        if (mask)
            list_passing(mask, begin, end, listed);
        else
            score_range(score, scratch.query, rows, nullptr, begin, end, scratch.best, begin);
        listed.finish();
        return;
    }
    scratch.bias.resize(tables.num_clusters);
    for (int64_t c = 0; c < tables.num_clusters; ++c)
        scratch.bias[c] = scratch.query.norm * tables.centroid_bias[c];
    int64_t passed = 0;
    best_clusters(tables, score, probes, scratch);
    for (int64_t i = 0; i < tables.num_clusters && (i < probes || passed < least); ++i) {
        if (i == probes) best_clusters(tables, score, tables.num_clusters, scratch);
        const int64_t cluster = scratch.order[i], begin = tables.offsets[cluster], end = tables.offsets[cluster + 1];
        const bool is_last = i + 1 == static_cast<int64_t>(scratch.order.size());
        const int64_t next = is_last ? end : tables.offsets[scratch.order[i + 1]];
        if (mask) __builtin_prefetch(mask + next / 64);
        if (mask) {
            passed += list_passing(mask, begin, end, listed);
        } else {
            score_range(score, scratch.query, rows, nullptr, begin, end, scratch.best, next);
            passed += end - begin;
        }
    }
    listed.finish();
}

void write_best(int64_t k, Scratch& scratch, float* scores, int64_t* positions) {
    const int64_t found = scratch.best.finish();
    for (int64_t i = 0; i < found; ++i) {
        scores[i] = score_of_key(scratch.best.key(i)) * scratch.query.scale;
        positions[i] = static_cast<uint32_t>(~scratch.best.key(i));
    }
    for (int64_t i = found; i < k; ++i) {
        scores[i] = -std::numeric_limits<float>::infinity();
        positions[i] = -1;
    }
}

}  // namespace

extern "C" {

// The widest path that this processor has.
int64_t ziggurat_scan_path() {
#if defined(ZIGGURAT_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        return kVnni;
    if (__builtin_cpu_supports("avx2")) return kAvx2;
#endif
    return kPlain;
}

// Both return the number of the first query that is not finite, or -1.
int64_t ziggurat_scan_clusters(const Tables* tables, const float* queries, int64_t num_queries, const uint64_t* const* masks,
                               const int64_t* probes, int64_t probes_stride,
                               const int64_t* least, int64_t least_stride, int64_t k, float* scores,
                               int64_t* positions, int64_t path, int64_t threads) {
    const Score score = score_of(path, tables->row_bytes);
    int64_t bad = num_queries;
#pragma omp parallel num_threads(threads) if (threads > 1 && num_queries > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic) reduction(min : bad)
        for (int64_t q = 0; q < num_queries; ++q) {
            if (!quantize(queries + q * tables->dim, tables->dim, tables->row_bytes, scratch.query)) {
                bad = std::min(bad, q);
                continue;
            }
            scratch.best.start(k);
            const uint64_t* mask = masks ? masks[q] : nullptr;
            search_clusters(*tables, score, mask, probes[q * probes_stride], least[q * least_stride], scratch);
            write_best(k, scratch, scores + q * k, positions + q * k);
        }
    }
    return bad == num_queries ? -1 : bad;
}

int64_t ziggurat_scan_rows(const Tables* tables, const float* queries, int64_t num_queries, const int64_t* const* lists,
                           const int64_t* counts, int64_t k, float* scores, int64_t* positions, int64_t path,
                           int64_t threads) {
    const Score score = score_of(path, tables->row_bytes);
    const Rows rows = {tables->codes, tables->scales, tables->row_bytes};
    int64_t bad = num_queries;
#pragma omp parallel num_threads(threads) if (threads > 1 && num_queries > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic) reduction(min : bad)
        for (int64_t q = 0; q < num_queries; ++q) {
            if (!quantize(queries + q * tables->dim, tables->dim, tables->row_bytes, scratch.query)) {
                bad = std::min(bad, q);
                continue;
            }
            scratch.best.start(k);
            if (!lists[q]) score_range(score, scratch.query, rows, nullptr, 0, counts[q], scratch.best, 0);
            Listed listed(score, scratch.query, rows, scratch.best);
            for (int64_t i = 0; lists[q] && i < counts[q]; ++i) listed.add(static_cast<uint32_t>(lists[q][i]));
            listed.finish();
            write_best(k, scratch, scores + q * k, positions + q * k);
        }
    }
    return bad == num_queries ? -1 : bad;
}
}
