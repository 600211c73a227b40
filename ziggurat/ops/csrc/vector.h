// Eight floats or four doubles, as the compiler's vectors: a processor without such registers gets the same results.
#pragma once
#include <cstdint>
#include <cstring>

template <typename T>
struct Vector {
    typedef T type __attribute__((vector_size(32)));
    static constexpr int64_t lanes = 32 / sizeof(T);
    static type load(const T* from) {
        type value;
        std::memcpy(&value, from, sizeof(value));
        return value;
    }
    static void store(T* to, type value) { std::memcpy(to, &value, sizeof(value)); }
};
