// Vectors that lie anywhere in memory.
//
// A vector type that knows it (aligned(4), may_alias) forgets so as a template's argument. std::memcpy says it, too, but
// where no wider move than 16 bytes is thought to pay (GCC 12 for Haswell, Skylake, Zen 2 and 3) it copies a vector of 32
// in halves through the stack and waits for them there: sums of rows took two to three times as long.
#pragma once

namespace {

template <typename V>
struct Unaligned {
  V value;
} __attribute__((packed, may_alias));

template <typename V>
inline V load_unaligned(const void* from) {
  return static_cast<const Unaligned<V>*>(from)->value;
}
template <typename V>
inline void store_unaligned(void* to, V value) {
  static_cast<Unaligned<V>*>(to)->value = value;
}

}  // namespace
