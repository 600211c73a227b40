// Asking for memory before it is needed.

#pragma once

namespace {

// Into the second-level cache: it waits for more lines at a time than the first, and memory is what a row waits for. The
// empty statement keeps compilers from taking a function that asks for memory for one without any effect (GCC removes
// calls of those).
inline void ask_for(const void* memory) {
  __builtin_prefetch(memory, 0, 2);
  asm volatile("");
}

}  // namespace
