// Numbers in shared memory that processes of one machine wait for; see ziggurat/parallel/exchange/host_memory.py.

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

std::atomic<uint32_t>* word(uint64_t address) { return reinterpret_cast<std::atomic<uint32_t>*>(address); }

static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free, "futex words");

}  // namespace

extern "C" {

// Everything written before is seen by whoever sees the new number.
void ziggurat_word_set(uint64_t address, uint32_t value) {
  word(address)->store(value, std::memory_order_release);
  syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Add one and return the sum.
uint32_t ziggurat_word_add(uint64_t address) {
  return word(address)->fetch_add(1, std::memory_order_acq_rel) + 1;
}

uint32_t ziggurat_word_get(uint64_t address) { return word(address)->load(std::memory_order_acquire); }

// Wait until the number is `value` or beyond (numbers wrap around); 0 if that takes longer than `timeout_ms`.
int32_t ziggurat_word_wait(uint64_t address, uint32_t value, int64_t timeout_ms) {
  timespec end;
  clock_gettime(CLOCK_MONOTONIC, &end);
  const int64_t end_ns = end.tv_sec * 1000000000LL + end.tv_nsec + timeout_ms * 1000000LL;
  while (true) {
    const uint32_t seen = word(address)->load(std::memory_order_acquire);
    if (static_cast<int32_t>(seen - value) >= 0) return 1;
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    const int64_t left_ns = end_ns - (now.tv_sec * 1000000000LL + now.tv_nsec);
    if (left_ns <= 0) return 0;
    const timespec left = {static_cast<time_t>(left_ns / 1000000000LL), static_cast<long>(left_ns % 1000000000LL)};
    syscall(SYS_futex, address, FUTEX_WAIT, seen, &left, nullptr, 0);
  }
}
}
