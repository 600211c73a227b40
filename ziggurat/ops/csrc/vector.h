// Eight floats or four doubles, as the compiler's vectors: a processor without such registers gets the same results.
#pragma once
#include <cstdint>

#include "unaligned.h"

template <typename T>
struct Vector {
    typedef T type __attribute__((vector_size(32)));
    static constexpr int64_t lanes = 32 / sizeof(T);
    static type load(const T* from) { return load_unaligned<type>(from); }
    static void store(T* to, type value) { store_unaligned(to, value); }
};
