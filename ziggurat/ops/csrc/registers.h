// How wide the registers of this processor are: GCC keeps vectors that are wider in memory, and takes them apart with
// every operation. Sums over a graph took nine to fifteen times as long so, products of packed weights up to six.
#pragma once
#include <cstdint>

#if defined(__AVX512F__)
constexpr int64_t kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kRegisterBytes = 32;
#else
constexpr int64_t kRegisterBytes = 16;
#endif
