// The k best of many scored positions, without a sort of all and without branches that depend on scores.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define ZIGGURAT_X86
#define ZIGGURAT_AVX2 __attribute__((target("avx2")))
#define ZIGGURAT_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#endif

namespace {

constexpr int kRows = 16;  // that are scored together

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

// Adds the keys of those of sixteen scores whose bits are set and that are above `least`; returns how many there are then.
inline int64_t append(uint32_t found, const float* scores, const uint32_t* positions, uint64_t least, uint64_t* keys,
                      int64_t count) {
    for (; found; found &= found - 1) {
        const int r = __builtin_ctz(found);
        const uint64_t key = key_of(scores[r], positions[r]);
        keys[count] = key;
        count += key > least;
    }
    return count;
}

// Moves the keys above a pivot to the front of `keys`, the others to `others`; returns how many are above. No branch
// depends on a key: a wrong guess of the processor costs more than ten keys.
inline int64_t partition(uint64_t* keys, int64_t count, uint64_t pivot, uint64_t* others) {
    int64_t larger = 0;
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t key = keys[i];
        keys[larger] = key;
        others[i - larger] = key;
        larger += key > pivot;
    }
    return larger;
}

#if defined(ZIGGURAT_X86)
ZIGGURAT_VNNI int64_t append_vnni(uint32_t found, const float* scores, const uint32_t* positions, uint64_t least,
                                  uint64_t* keys, int64_t count) {
    const __m512i bits = _mm512_loadu_si512(scores);
    const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(bits, 31), _mm512_set1_epi32(INT32_MIN));
    const __m512i upper = _mm512_xor_si512(bits, flip);
    const __m512i lower = _mm512_xor_si512(_mm512_loadu_si512(positions), _mm512_set1_epi32(-1));
    for (int half = 0; half < 2; ++half) {
        const __m256i high = half ? _mm512_extracti64x4_epi64(upper, 1) : _mm512_castsi512_si256(upper);
        const __m256i low = half ? _mm512_extracti64x4_epi64(lower, 1) : _mm512_castsi512_si256(lower);
        const __m512i own =
            _mm512_or_si512(_mm512_slli_epi64(_mm512_cvtepu32_epi64(high), 32), _mm512_cvtepu32_epi64(low));
        const __mmask8 wanted = _mm512_mask_cmpgt_epu64_mask(found >> 8 * half, own, _mm512_set1_epi64(least));
        _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi64(wanted, own));
        count += __builtin_popcount(wanted);
    }
    return count;
}

ZIGGURAT_VNNI int64_t partition_vnni(uint64_t* keys, int64_t count, uint64_t pivot, uint64_t* others) {
    int64_t larger = 0, rest = 0;
    for (int64_t i = 0; i < count; i += 8) {
        const __mmask8 some = count - i < 8 ? (1u << (count - i)) - 1 : 0xff;
        const __m512i own = _mm512_loadu_si512(keys + i);
        const __mmask8 above = _mm512_mask_cmpgt_epu64_mask(some, own, _mm512_set1_epi64(pivot));
        _mm512_storeu_si512(others + rest, _mm512_maskz_compress_epi64(some & ~above, own));
        rest += __builtin_popcount(some & ~above);
        _mm512_storeu_si512(keys + larger, _mm512_maskz_compress_epi64(above, own));
        larger += __builtin_popcount(above);
    }
    return larger;
}
#else
constexpr auto append_vnni = append;
constexpr auto partition_vnni = partition;
#endif

// The k largest keys: everything above the smallest of them is kept in a buffer, which is cut to k when it is full.
class Best {
   public:
    void start(int64_t k, bool is_wide) {
        k_ = k;
        is_wide_ = is_wide;
        room_ = 3 * k + 8 * kRows;
        if (static_cast<int64_t>(keys_.size()) < room_ + kRows) keys_.resize(room_ + kRows), others_.resize(room_ + kRows);
        count_ = 0;
        least_key_ = 0;
        least = -std::numeric_limits<float>::infinity();
    }
    inline void offer(uint32_t found, const float* scores, const uint32_t* positions) {
        count_ = (is_wide_ ? append_vnni : append)(found, scores, positions, least_key_, keys_.data(), count_);
        if (count_ > room_ - kRows) cut();
    }
    int64_t keep() {  // of the best, in no order
        if (count_ > k_) cut();
        return count_;
    }
    int64_t finish() {
        keep();
        if (count_ > kMostRanked) {
            std::sort(keys_.begin(), keys_.begin() + count_, std::greater<uint64_t>());
            return count_;
        }
        for (int64_t i = 0; i < count_; ++i) {
            const uint64_t key = keys_[i];
            int64_t rank = 0;
            for (int64_t j = 0; j < count_; ++j) rank += keys_[j] > key;
            others_[rank] = key;
        }
        std::swap(keys_, others_);
        return count_;
    }
    uint64_t key(int64_t i) const { return keys_[i]; }
    float least;  // a score below it cannot be among the best

   private:
    static constexpr int64_t kMostRanked = 300, kFewSorted = 24;

    // Quickselect: the k largest keys to the front. Keys differ, so the middle one of three is not the largest.
    void cut() {
        int64_t begin = 0, end = count_;  // the k-th is among these
        while (end - begin > kFewSorted) {
            uint64_t* own = keys_.data() + begin;
            const int64_t num = end - begin;
            const uint64_t a = own[0], b = own[num / 2], c = own[num - 1];
            const uint64_t pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
            const int64_t larger = (is_wide_ ? partition_vnni : partition)(own, num, pivot, others_.data());
            std::memcpy(own + larger, others_.data(), (num - larger) * sizeof(uint64_t));
            if (begin + larger >= k_)
                end = begin + larger;
            else
                begin += larger;
        }
        std::sort(keys_.begin() + begin, keys_.begin() + end, std::greater<uint64_t>());
        count_ = k_;
        least_key_ = keys_[k_ - 1];
        least = score_of_key(least_key_);
    }
    std::vector<uint64_t> keys_, others_;
    int64_t k_ = 0, room_ = 0, count_ = 0;
    uint64_t least_key_ = 0;
    bool is_wide_ = false;
};

}  // namespace
