// Which rows a set-associative cache holds, for compiled code: see ziggurat/ops/row_cache/ways.py, which defines it.
#pragma once
#include <cstdint>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kWays = 32;

// Division by a number that stays the same: by a multiplication where both fit 32 bits (Lemire, Kaser and Kurz,
// "Faster remainder by direct computation", 2019).
struct Divider {
  uint64_t divisor, factor;
  explicit Divider(int64_t d) : divisor(d), factor(d > 1 && d < (int64_t{1} << 32) ? ~uint64_t{0} / d + 1 : 0) {}
  uint64_t operator()(uint64_t x) const {
    if (factor && x >> 32 == 0) return static_cast<unsigned __int128>(factor) * x >> 64;
    return divisor == 1 ? x : x / divisor;
  }
};

struct Ways {
  int64_t num_sets;
  int32_t* tags;    // (num_sets, kWays): row / num_sets, or -1 for a way that is free
  int32_t* stamps;  // (num_sets, kWays): the step that last touched it
  int32_t* counts;    // (num_rows,): steps that touched a row; nullptr where the oldest row leaves
  int32_t* measures;  // (num_sets, kWays): counts of the rows that are held; nullptr with counts
  void prefetch(int64_t set) const {
    for (int64_t way = set * kWays; way < (set + 1) * kWays; way += 16) {
      __builtin_prefetch(tags + way);
      __builtin_prefetch(stamps + way, 1);
    }
  }
};

// Bit w is set if way w of a set has the tag.
inline uint32_t matches(const int32_t* tags, int32_t tag) {
#if defined(__AVX512F__)
  const __m512i wanted = _mm512_set1_epi32(tag);
  const __mmask16 low = _mm512_cmpeq_epi32_mask(wanted, _mm512_loadu_si512(tags));
  const __mmask16 high = _mm512_cmpeq_epi32_mask(wanted, _mm512_loadu_si512(tags + 16));
  return static_cast<uint32_t>(high) << 16 | low;
#elif defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi32(tag);
  uint32_t found = 0;
  for (int part = 0; part < 4; part++) {
    const __m256i have = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tags) + part);
    const int bits = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(have, wanted)));
    found |= static_cast<uint32_t>(bits) << (8 * part);
  }
  return found;
#else
  uint32_t found = 0;
  for (int w = 0; w < kWays; w++) found |= static_cast<uint32_t>(tags[w] == tag) << w;
  return found;
#endif
}

struct Found {
  int64_t place, set;  // place: -1 if the row is not held
};

inline __attribute__((always_inline)) Found find(const int32_t* tags, const Divider& sets, int64_t row) {
  const int64_t tag = sets(row), set = row - tag * static_cast<int64_t>(sets.divisor);
  const uint32_t found = matches(tags + set * kWays, static_cast<int32_t>(tag));
  return {found ? set * kWays + __builtin_ctz(found) : -1, set};
}

}  // namespace
