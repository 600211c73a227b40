// Scores of INT8 rows against queries, and the best k of them. See ziggurat/ops/scan/kernel.py for what and why.
//
// A row is 2 * plane_bytes numbers, each stored with 128 added: its upper four bits in one plane, its lower four in
// another. Byte j of a plane has number j in its lower half, number j + plane_bytes in its upper half. Dot products are
// exact in 32 bits; a score is (float)dot * scale + add, rounded after each operation (-ffp-contract=off), so every path
// gives the same bits.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "best.h"

namespace {

constexpr int64_t kFar = 4096;    // bytes of a plane that neighbouring rows are fetched ahead
constexpr int64_t kList = 256;    // rows that are listed before they are scored
constexpr float kLeastLargest = 1e-30f;
alignas(64) const float kZeros[kRows] = {};

struct Query {
    std::vector<int8_t> halves[2];  // numbers 0 ... plane_bytes - 1, and the rest; zeros up to plane_bytes + 64
    int32_t sum = 0;
    float scale = 0, norm = 0;
    int64_t plane_bytes = 0;
};

// False if a number is not finite.
bool quantize(const float* from, int64_t dim, int64_t plane_bytes, Query& query) {
    float largest = kLeastLargest;
    bool finite = true;
    for (int64_t d = 0; d < dim; ++d) {
        const float size = std::fabs(from[d]);
        finite &= size <= std::numeric_limits<float>::max();
        largest = size > largest ? size : largest;
    }
    if (!finite) return false;
    for (auto& half : query.halves) half.assign(plane_bytes + 64, 0);
    const float inverse = 127.0f / largest;
    int64_t squares = 0;
    query.sum = 0;
    for (int64_t d = 0; d < dim; ++d) {
        const int32_t code = static_cast<int32_t>(std::nearbyintf(from[d] * inverse));
        const int64_t half = d >= plane_bytes, at = d - half * plane_bytes;
        query.halves[half][at] = static_cast<int8_t>(code);
        query.sum += code;
        squares += code * code;
    }
    query.scale = largest / 127.0f;
    query.norm = std::sqrt(static_cast<float>(squares));
    query.plane_bytes = plane_bytes;
    return true;
}

// Which bits of the rows are read. Of the upper four alone, scores are twice as large: 15 / 2 stands for the lower four.
enum Bits { kUpper, kAll };

// Writes 16 scores; returns which of them are at least `least`, as bits. `lower` leads from a row's upper bits to its
// lower ones.
using Score = uint32_t (*)(const Query&, const uint8_t* const* rows, ptrdiff_t lower, const float* scales,
                           const float* add, float least, float* out);

inline int32_t dot_plain(const Query& query, const uint8_t* row) {
    int32_t dot = 0;
    for (int64_t j = 0; j < query.plane_bytes; ++j)
        dot += (row[j] & 15) * query.halves[0][j] + (row[j] >> 4) * query.halves[1][j];
    return dot;
}

template <Bits bits>
uint32_t score_plain(const Query& query, const uint8_t* const* rows, ptrdiff_t lower, const float* scales,
                     const float* add, float least, float* out) {
    uint32_t found = 0;
    for (int r = 0; r < kRows; ++r) {
        const int32_t dot = dot_plain(query, rows[r]);
        const int32_t exact = bits == kUpper ? 32 * dot - 241 * query.sum
                                             : 16 * dot + dot_plain(query, rows[r] + lower) - 128 * query.sum;
        const float scaled = static_cast<float>(exact) * scales[r];
        out[r] = scaled + add[r];
        found |= static_cast<uint32_t>(out[r] >= least) << r;
    }
    return found;
}

#if defined(ZIGGURAT_X86)
// 32 bytes of a row times both halves of the query, as sums of sixteen bits. vpmaddubsw saturates, but two products of a
// number below 16 and one of at most 127 are 3,810 at most, so eight of its results can be added up.
ZIGGURAT_AVX2 inline __m256i dots_of_chunk(__m256i codes, __m256i first, __m256i second) {
    const __m256i low = _mm256_set1_epi8(15);
    const __m256i of_first = _mm256_maddubs_epi16(_mm256_and_si256(codes, low), first);
    const __m256i of_second = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(codes, 4), low), second);
    return _mm256_add_epi16(of_first, of_second);
}

constexpr int64_t kChunk = 32;          // bytes of a row in a register of AVX2
constexpr int64_t kChunksIn16Bits = 4;  // two results of vpmaddubsw each

// The last bytes of a row that do not fill a register, a multiple of eight; nothing behind the row is read.
ZIGGURAT_AVX2 inline __m256i load_rest(const uint8_t* from, int64_t bytes) {
    const auto* whole = reinterpret_cast<const __m128i*>(from);
    if (bytes == 8) return _mm256_zextsi128_si256(_mm_loadl_epi64(whole));
    const __m128i lower = _mm_loadu_si128(whole);
    return _mm256_set_m128i(bytes > 16 ? _mm_loadl_epi64(whole + 1) : _mm_setzero_si128(), lower);
}

template <int64_t chunks>  // of 32 bytes; 0: any number, and a last one that is not full
ZIGGURAT_AVX2 inline __m256i sums_of_row(const Query& query, const uint8_t* row) {
    const auto load = [](const void* from) __attribute__((always_inline, target("avx2"))) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(from));
    };
    const int8_t *first = query.halves[0].data(), *second = query.halves[1].data();
    const __m256i ones = _mm256_set1_epi16(1);
    if (chunks) {
        static_assert(chunks <= kChunksIn16Bits, "sums of sixteen bits would overflow");
        __m256i sums = dots_of_chunk(load(row), load(first), load(second));
        for (int64_t at = kChunk; at < chunks * kChunk; at += kChunk)
            sums = _mm256_add_epi16(sums, dots_of_chunk(load(row + at), load(first + at), load(second + at)));
        return _mm256_madd_epi16(sums, ones);
    }
    __m256i sums = _mm256_setzero_si256();
    int64_t at = 0;
    for (; at + kChunk <= query.plane_bytes; at += kChunk) {
        const __m256i dots = dots_of_chunk(load(row + at), load(first + at), load(second + at));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(dots, ones));
    }
    if (at < query.plane_bytes) {
        const __m256i codes = load_rest(row + at, query.plane_bytes - at);
        const __m256i dots = dots_of_chunk(codes, load(first + at), load(second + at));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(dots, ones));
    }
    return sums;
}

// The dot products of eight rows, in their order.
template <int64_t chunks>
ZIGGURAT_AVX2 inline __m256i dots_of_8_rows(const Query& query, const uint8_t* const* rows, ptrdiff_t plane) {
    __m256i fours[2];  // lanes of 128 bits: a half of the sums of rows 0 to 3, and the other half; then rows 4 to 7
    for (int i = 0; i < 2; ++i) {
        __m256i sums[4];
        for (int r = 0; r < 4; ++r) sums[r] = sums_of_row<chunks>(query, rows[4 * i + r] + plane);
        const __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(sums[0], sums[1]), _mm256_unpackhi_epi32(sums[0], sums[1]));
        const __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(sums[2], sums[3]), _mm256_unpackhi_epi32(sums[2], sums[3]));
        fours[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(fours[0], fours[1], 0x20),
                            _mm256_permute2x128_si256(fours[0], fours[1], 0x31));
}

template <int64_t chunks, Bits bits>
ZIGGURAT_AVX2 uint32_t score_avx2(const Query& query, const uint8_t* const* rows, ptrdiff_t lower, const float* scales,
                                  const float* add, float least, float* out) {
    uint32_t found = 0;
    for (int r = 0; r < kRows; r += 8) {
        __m256i exact = _mm256_slli_epi32(dots_of_8_rows<chunks>(query, rows + r, 0), bits == kAll ? 4 : 5);
        if (bits == kAll) exact = _mm256_add_epi32(exact, dots_of_8_rows<chunks>(query, rows + r, lower));
        exact = _mm256_sub_epi32(exact, _mm256_set1_epi32((bits == kAll ? 128 : 241) * query.sum));
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(exact), _mm256_loadu_ps(scales + r));
        const __m256 scores = _mm256_add_ps(scaled, _mm256_loadu_ps(add + r));
        _mm256_storeu_ps(out + r, scores);
        const __m256 is_enough = _mm256_cmp_ps(scores, _mm256_set1_ps(least), _CMP_GE_OQ);
        found |= static_cast<uint32_t>(_mm256_movemask_ps(is_enough)) << r;
    }
    return found;
}

// Vectors in pairs to half as many: lanes of 128 bits with sums of one vector and of the other.
ZIGGURAT_VNNI inline void add_pairs(__m512i* v, int num) {
    for (int i = 0; i < num / 2; ++i)
        v[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < num / 4; ++i)
        v[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]),
                                _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
}

ZIGGURAT_VNNI inline __m512i add_lanes(__m512i first, __m512i second, bool is_last) {
    if (is_last)
        return _mm512_add_epi32(_mm512_shuffle_i32x4(first, second, 0x88), _mm512_shuffle_i32x4(first, second, 0xdd));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(first, second, 0x44), _mm512_shuffle_i32x4(first, second, 0xee));
}

ZIGGURAT_VNNI inline __m512i add_dots(__m512i sums, __m512i codes, __m512i first, __m512i second) {
    const __m512i low = _mm512_set1_epi8(15);
    sums = _mm512_dpbusd_epi32(sums, _mm512_and_si512(codes, low), first);
    return _mm512_dpbusd_epi32(sums, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low), second);
}

// Two rows of 32 bytes in a register: rows 0 to 3 with 4 to 7, and 8 to 11 with 12 to 15, so that sums come in order.
ZIGGURAT_VNNI inline __m512i dots_of_32_bytes(const Query& query, const uint8_t* const* rows, ptrdiff_t plane) {
    const auto load = [](const void* from) __attribute__((always_inline, target("avx512f"))) {
        return _mm256_loadu_si256(static_cast<const __m256i*>(from));
    };
    const __m512i first = _mm512_broadcast_i64x4(load(query.halves[0].data()));
    const __m512i second = _mm512_broadcast_i64x4(load(query.halves[1].data()));
    __m512i sums[8];
    for (int i = 0; i < 8; ++i) {
        const int r = i < 4 ? i : i + 4;
        const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(load(rows[r] + plane)), load(rows[r + 4] + plane), 1);
        sums[i] = add_dots(_mm512_setzero_si512(), codes, first, second);
    }
    add_pairs(sums, 8);
    return add_lanes(sums[0], sums[1], true);
}

template <int chunks>  // of 64 bytes; 0: any number, and a last one that is not full
ZIGGURAT_VNNI inline __m512i dots_of_chunks(const Query& query, const uint8_t* const* rows, ptrdiff_t plane) {
    __m512i sums[kRows];
    const int64_t full = chunks ? chunks : query.plane_bytes / 64;
    for (int r = 0; r < kRows; ++r) sums[r] = _mm512_setzero_si512();
    for (int64_t c = 0; c < full; ++c) {
        const __m512i first = _mm512_loadu_si512(query.halves[0].data() + 64 * c);
        const __m512i second = _mm512_loadu_si512(query.halves[1].data() + 64 * c);
        for (int r = 0; r < kRows; ++r)
            sums[r] = add_dots(sums[r], _mm512_loadu_si512(rows[r] + plane + 64 * c), first, second);
    }
    if (!chunks && query.plane_bytes % 64) {
        const __mmask64 rest = (1ull << query.plane_bytes % 64) - 1;
        const __m512i first = _mm512_loadu_si512(query.halves[0].data() + 64 * full);
        const __m512i second = _mm512_loadu_si512(query.halves[1].data() + 64 * full);
        for (int r = 0; r < kRows; ++r)
            sums[r] = add_dots(sums[r], _mm512_maskz_loadu_epi8(rest, rows[r] + plane + 64 * full), first, second);
    }
    add_pairs(sums, 16);
    return add_lanes(add_lanes(sums[0], sums[1], false), add_lanes(sums[2], sums[3], false), true);
}

enum Shape { kAny = 0, k64Bytes = 1, k32Bytes = 2 };

template <Shape shape>
ZIGGURAT_VNNI inline __m512i dots_vnni(const Query& query, const uint8_t* const* rows, ptrdiff_t plane) {
    if (shape == k32Bytes) return dots_of_32_bytes(query, rows, plane);
    return dots_of_chunks<shape == k64Bytes ? 1 : 0>(query, rows, plane);
}

template <Shape shape, Bits bits>
ZIGGURAT_VNNI uint32_t score_vnni(const Query& query, const uint8_t* const* rows, ptrdiff_t lower, const float* scales,
                                  const float* add, float least, float* out) {
    __m512i exact = _mm512_slli_epi32(dots_vnni<shape>(query, rows, 0), bits == kAll ? 4 : 5);
    if (bits == kAll) exact = _mm512_add_epi32(exact, dots_vnni<shape>(query, rows, lower));
    exact = _mm512_sub_epi32(exact, _mm512_set1_epi32((bits == kAll ? 128 : 241) * query.sum));
    const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_loadu_ps(scales));
    const __m512 scores = _mm512_add_ps(scaled, _mm512_loadu_ps(add));
    _mm512_storeu_ps(out, scores);
    return _mm512_cmp_ps_mask(scores, _mm512_set1_ps(least), _CMP_GE_OQ);
}
#endif

enum Path : int64_t { kPlain = 0, kAvx2 = 1, kVnni = 2 };

template <Bits bits>
Score score_of(int64_t path, int64_t plane_bytes) {
#if defined(ZIGGURAT_X86)
    if (path == kVnni) {
        if (plane_bytes == 32) return score_vnni<k32Bytes, bits>;
        if (plane_bytes == 64) return score_vnni<k64Bytes, bits>;
        return score_vnni<kAny, bits>;
    }
    if (path == kAvx2) {
        if (plane_bytes == kChunk) return score_avx2<1, bits>;
        if (plane_bytes == 2 * kChunk) return score_avx2<2, bits>;
        return score_avx2<0, bits>;
    }
#endif
    return score_plain<bits>;
}

struct StoredRows {  // as Rows in rows.py
    const uint8_t* upper;
    const uint8_t* lower;
    const float* scales;
};

struct Rows : StoredRows {
    int64_t plane_bytes;

    ptrdiff_t to_lower() const { return lower - upper; }
    template <Bits bits>
    inline void fetch(int64_t first, int64_t num) const {  // into the second-level cache
        for (int64_t at = 0; at < num * plane_bytes; at += 64) {
            __builtin_prefetch(upper + first * plane_bytes + at, 0, 2);
            if (bits == kAll) __builtin_prefetch(lower + first * plane_bytes + at, 0, 2);
        }
        __builtin_prefetch(scales + first, 0, 2);
    }
};

struct Tables {  // as _Tables in rows.py
    StoredRows stored_rows, stored_centroids;
    const int64_t* offsets;
    const float* centroid_reach;
    int64_t num_rows, plane_bytes, dim, num_clusters;

    Rows rows() const { return {stored_rows, plane_bytes}; }
    Rows centroids() const { return {stored_centroids, plane_bytes}; }
};

struct Scratch {
    Query query;
    Best best, candidates, clusters;
    std::vector<float> reach;
    std::vector<uint64_t> order;
};

// How rows of one table are scored for one query, and where the best of them go.
template <Bits bits>
struct Scan {
    Score score;
    const Query& query;
    Rows table;
    Best& best;

    // Neighbouring rows; those behind them that come next are fetched meanwhile.
    void range(const float* add, int64_t begin, int64_t end, int64_t next) {
        const uint8_t* rows[kRows];
        uint32_t positions[kRows];
        alignas(64) float scores[kRows], scales[kRows], adds[kRows] = {};
        const int64_t bytes = table.plane_bytes, ahead = kFar / bytes;
        for (int64_t at = begin; at < end; at += kRows) {
            const int64_t num = std::min<int64_t>(kRows, end - at);
            const uint8_t* first = table.upper + at * bytes;
            for (int64_t r = 0; r < kRows; ++r) rows[r] = first + std::min(r, num - 1) * bytes;
            table.fetch<bits>(at + ahead < end ? at + ahead : next + at + ahead - end, kRows);
            const float *scale = table.scales + at, *plus = add ? add + at : kZeros;
            if (num < kRows) {
                for (int64_t r = 0; r < num; ++r) scales[r] = scale[r], adds[r] = plus[r];
                for (int64_t r = num; r < kRows; ++r) scales[r] = 0;
                scale = scales, plus = adds;
            }
            uint32_t found = score(query, rows, table.to_lower(), scale, plus, best.least, scores);
            found &= (num < kRows ? 1u << num : 1u << kRows) - 1;
            if (!found) continue;
            for (int r = 0; r < kRows; ++r) positions[r] = static_cast<uint32_t>(at) + r;
            best.offer(found, scores, positions);
        }
    }
};

// Rows of a list. They are fetched when they are listed and scored when half a list more has been fetched.
template <Bits bits>
class Listed {
   public:
    explicit Listed(const Scan<bits>& scan) : scan_(scan) {}
    inline void add(uint32_t position) {
        scan_.table.template fetch<bits>(position, 1);
        list_[count_++] = position;
        if (count_ == kList) {
            score(kList / 2);
            std::memcpy(list_, list_ + kList / 2, kList / 2 * sizeof(uint32_t));
            count_ = kList / 2;
        }
    }
    // List those of the rows begin ... end that pass the mask; returns how many.
    int64_t add_passing(const uint64_t* mask, int64_t begin, int64_t end) {
        int64_t passed = 0;
        for (int64_t word = begin / 64; word * 64 < end; ++word) {
            uint64_t bits_of_word = mask[word];
            if (word == begin / 64) bits_of_word &= ~0ull << begin % 64;
            if (end - word * 64 < 64) bits_of_word &= (1ull << (end - word * 64)) - 1;
            passed += __builtin_popcountll(bits_of_word);
            for (; bits_of_word; bits_of_word &= bits_of_word - 1)
                add(static_cast<uint32_t>(word * 64 + __builtin_ctzll(bits_of_word)));
        }
        return passed;
    }
    void finish() { score(count_), count_ = 0; }

   private:
    void score(int64_t count) {
        const uint8_t* rows[kRows];
        alignas(64) float scores[kRows], scales[kRows];
        const Rows& table = scan_.table;
        for (int64_t at = 0; at < count; at += kRows) {
            const int64_t num = std::min<int64_t>(kRows, count - at);
            for (int64_t r = 0; r < kRows; ++r) {
                const int64_t position = list_[at + std::min(r, num - 1)];
                rows[r] = table.upper + position * table.plane_bytes;
                scales[r] = table.scales[position];
            }
            uint32_t found = scan_.score(scan_.query, rows, table.to_lower(), scales, kZeros, scan_.best.least, scores);
            found &= (1u << num) - 1;
            if (found) scan_.best.offer(found, scores, list_ + at);
        }
    }
    Scan<bits> scan_;
    uint32_t list_[kList];
    int64_t count_ = 0;
};

template <Bits bits>
void best_clusters(const Tables& tables, Score score, int64_t path, int64_t num, Scratch& scratch) {
    scratch.clusters.start(num, path == kVnni);
    Scan<bits> scan{score, scratch.query, tables.centroids(), scratch.clusters};
    scan.range(scratch.reach.data(), 0, tables.num_clusters, 0);
    const int64_t found = scratch.clusters.finish();
    scratch.order.resize(found);
    for (int64_t i = 0; i < found; ++i) scratch.order[i] = static_cast<uint32_t>(~scratch.clusters.key(i));
}

// What is searched for one query: the nearest clusters, or the rows of a list.
struct Clusters {
    const Tables& tables;
    const uint64_t* mask;
    int64_t probes, least, path;

    // Clusters are chosen by upper bits where candidates are, so only a table without a choice may skip them.
    int64_t most_rows() const {
        return probes >= tables.num_clusters ? tables.num_rows : std::numeric_limits<int64_t>::max();
    }
    template <Bits bits>
    void search(Scan<bits> scan, Scratch& scratch) const {
        Listed<bits> listed(scan);
        if (probes >= tables.num_clusters) {  // all rows: the order of clusters does not matter
            const int64_t begin = tables.offsets[0], end = tables.offsets[tables.num_clusters];
            if (mask)
                listed.add_passing(mask, begin, end);
            else
                scan.range(nullptr, begin, end, begin);
            listed.finish();
            return;
        }
        scratch.reach.resize(tables.num_clusters);
        const float norm = (bits == kUpper ? 2 : 1) * scratch.query.norm;
        for (int64_t c = 0; c < tables.num_clusters; ++c)
            scratch.reach[c] = norm * tables.centroid_reach[c];
        int64_t passed = 0;
        best_clusters<bits>(tables, scan.score, path, probes, scratch);
        for (int64_t i = 0; i < tables.num_clusters && (i < probes || passed < least); ++i) {
            if (i == probes) best_clusters<bits>(tables, scan.score, path, tables.num_clusters, scratch);
            const int64_t cluster = scratch.order[i], begin = tables.offsets[cluster], end = tables.offsets[cluster + 1];
            const bool is_last = i + 1 == static_cast<int64_t>(scratch.order.size());
            const int64_t next = is_last ? end : tables.offsets[scratch.order[i + 1]];
            if (mask) {
                __builtin_prefetch(mask + next / 64);
                passed += listed.add_passing(mask, begin, end);
            } else {
                scan.range(nullptr, begin, end, next);
                passed += end - begin;
            }
        }
        listed.finish();
    }
};

struct List {
    const int64_t* rows;  // none: all
    int64_t count;

    int64_t most_rows() const { return count; }
    template <Bits bits>
    void search(Scan<bits> scan, Scratch&) const {
        if (!rows) return scan.range(nullptr, 0, count, 0);
        Listed<bits> listed(scan);
        for (int64_t i = 0; i < count; ++i) listed.add(static_cast<uint32_t>(rows[i]));
        listed.finish();
    }
};

struct Asked {  // as _Asked in kernel.py
    const float* queries;
    int64_t num_queries, k, candidates;  // candidates of the upper bits; 0: all bits of all rows are read
    float* scores;
    int64_t* positions;
    int64_t path, threads;
    const int64_t *probes, *least;  // of each query; none: those of all
    int64_t probes_of_all, least_of_all;
    const uint64_t* const* masks;  // of each query; none: all rows may be found
};

// `numbers`: what the rows are called; none: by their positions.
void write_best(int64_t k, Scratch& scratch, const int64_t* numbers, float* scores, int64_t* positions) {
    const int64_t found = scratch.best.finish();
    for (int64_t i = 0; i < found; ++i) {
        const uint32_t position = ~scratch.best.key(i);
        scores[i] = score_of_key(scratch.best.key(i)) * scratch.query.scale;
        positions[i] = numbers ? numbers[position] : position;
    }
    for (int64_t i = found; i < k; ++i) {
        scores[i] = -std::numeric_limits<float>::infinity();
        positions[i] = -1;
    }
}

// Searches for every query what `of(q)` says in the tables `tables_of(q)`; the number of the first query that is not
// finite, or -1.
template <typename TablesOf, typename Of>
int64_t search_each(const Asked& asked, TablesOf tables_of, Of of, const int64_t* const* numbers = nullptr) {
    int64_t bad = asked.num_queries;
#pragma omp parallel num_threads(asked.threads) if (asked.threads > 1 && asked.num_queries > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic) reduction(min : bad)
        for (int64_t q = 0; q < asked.num_queries; ++q) {
            const Tables& tables = tables_of(q);
            const Score upper = score_of<kUpper>(asked.path, tables.plane_bytes);
            const Score all = score_of<kAll>(asked.path, tables.plane_bytes);
            if (!quantize(asked.queries + q * tables.dim, tables.dim, tables.plane_bytes, scratch.query)) {
                bad = std::min(bad, q);
                continue;
            }
            scratch.best.start(asked.k, asked.path == kVnni);
            const Scan<kAll> last{all, scratch.query, tables.rows(), scratch.best};
            // Where all rows are candidates, their upper bits need not be looked at.
            if (asked.candidates && std::max(asked.candidates, asked.k) < of(q).most_rows()) {
                scratch.candidates.start(std::max(asked.candidates, asked.k), asked.path == kVnni);
                of(q).search(Scan<kUpper>{upper, scratch.query, tables.rows(), scratch.candidates}, scratch);
                Listed<kAll> listed(last);
                for (int64_t i = 0, num = scratch.candidates.keep(); i < num; ++i)
                    listed.add(static_cast<uint32_t>(~scratch.candidates.key(i)));
                listed.finish();
            } else {
                of(q).search(last, scratch);
            }
            const int64_t* names = numbers ? numbers[q] : nullptr;
            write_best(asked.k, scratch, names, asked.scores + q * asked.k, asked.positions + q * asked.k);
        }
    }
    return bad == asked.num_queries ? -1 : bad;
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

int64_t ziggurat_scan_clusters(const Tables* tables, const Asked* asked) {
    const auto tables_of = [=](int64_t) -> const Tables& { return *tables; };
    return search_each(*asked, tables_of, [=](int64_t q) {
        const int64_t probes = asked->probes ? asked->probes[q] : asked->probes_of_all;
        const int64_t least = asked->least ? asked->least[q] : asked->least_of_all;
        const uint64_t* mask = asked->masks ? asked->masks[q] : nullptr;
        return Clusters{*tables, mask, std::max<int64_t>(probes, 1), least, asked->path};
    });
}

int64_t ziggurat_scan_rows(const Tables* tables, const int64_t* const* lists, const int64_t* counts,
                           const Asked* asked) {
    const auto tables_of = [=](int64_t) -> const Tables& { return *tables; };
    return search_each(*asked, tables_of, [=](int64_t q) { return List{lists[q], counts[q]}; });
}

// All rows of a table of its own for each query; `numbers[q]` are the names of these rows.
int64_t ziggurat_scan_tables(const Tables* const* tables, const int64_t* const* numbers, const Asked* asked) {
    const auto tables_of = [=](int64_t q) -> const Tables& { return *tables[q]; };
    return search_each(*asked, tables_of, [=](int64_t q) { return List{nullptr, tables[q]->num_rows}; }, numbers);
}
}
