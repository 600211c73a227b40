// Rows of one file, read and written on a few threads: see ziggurat/ops/row_file/reference.py, which defines the layout.
//
// Rows come sorted. Neighbours in the file become one task, tasks are taken by threads from a counter, and each task is
// one preadv or pwritev of whole units (pages), as direct I/O wants. A write reads its units first, unless it replaces
// them whole, so two writes at once must not share a unit: the caller writes from one thread at a time.

#include <fcntl.h>
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kTaskBytes = 128 << 10;  // the most that one call reads or writes

struct Layout {
  int64_t payload_bytes, row_bytes, rows_per_unit, unit_bytes;
  int64_t unit(int64_t row) const { return row / rows_per_unit; }
  int64_t offset_in_unit(int64_t row) const { return row % rows_per_unit * row_bytes; }
};

struct Task {
  int64_t first, last;  // rows[first … last), in adjacent units
};

uint32_t tag_of(int64_t row, const uint8_t* payload, int64_t bytes) {
  uint64_t hash = 0x9E3779B97F4A7C15ull ^ static_cast<uint64_t>(row);
  for (int64_t at = 0; at < bytes; at += 4) {
    uint32_t word;
    std::memcpy(&word, payload + at, 4);
    hash = (hash ^ word) * 0xBF58476D1CE4E5B9ull;
    hash ^= hash >> 29;
  }
  uint32_t tag = static_cast<uint32_t>(hash >> 32);
  return tag ? tag : 1;
}

std::vector<Task> tasks_of(const Layout& layout, const int64_t* rows, int64_t n) {
  std::vector<Task> tasks;
  for (int64_t i = 0; i < n; ++i) {
    int64_t unit = layout.unit(rows[i]);
    if (!tasks.empty()) {
      Task& task = tasks.back();
      int64_t first = layout.unit(rows[task.first]), last = layout.unit(rows[i - 1]);
      if (unit <= last + 1 && (unit - first + 1) * layout.unit_bytes <= std::max(kTaskBytes, layout.unit_bytes)) {
        task.last = i + 1;
        continue;
      }
    }
    tasks.push_back({i, i + 1});
  }
  return tasks;
}

// Move bytes between a buffer and the file, whole; 0 or the number of the error. A file that ends early is zeros.
int64_t transfer(int fd, uint8_t* data, int64_t bytes, int64_t offset, bool writes) {
  while (bytes > 0) {
    iovec piece{data, static_cast<size_t>(bytes)};
    ssize_t done = writes ? pwritev(fd, &piece, 1, offset) : preadv(fd, &piece, 1, offset);
    if (done < 0) {
      if (errno == EINTR) continue;
      return errno;
    }
    if (done == 0) {
      if (writes) return EIO;
      std::memset(data, 0, static_cast<size_t>(bytes));
      return 0;
    }
    data += done, offset += done, bytes -= done;
  }
  return 0;
}

// Threads with small stacks, which a limit on memory counts whole. One that cannot be started, or gets no buffer, leaves
// its tasks to the others; the caller's own is always there.
template <typename Loop>
void beside(const Loop& loop, int64_t num_threads, std::vector<pthread_t>& started) {
  constexpr size_t kStackBytes = 256 << 10;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, kStackBytes);
  const auto run = [](void* given) -> void* {
    (*static_cast<const Loop*>(given))();
    return nullptr;
  };
  for (int64_t i = 0; i < num_threads; ++i) {
    pthread_t thread;
    if (pthread_create(&thread, &attributes, run, const_cast<Loop*>(&loop)) != 0) break;
    started.push_back(thread);
  }
  pthread_attr_destroy(&attributes);
}

template <typename Work>
int64_t on_threads(const std::vector<Task>& tasks, int64_t buffer_bytes, int64_t num_threads, Work work) {
  std::atomic<size_t> next{0};
  std::atomic<int64_t> error{0};
  auto loop = [&]() -> bool {
    uint8_t* buffer = static_cast<uint8_t*>(std::aligned_alloc(kPage, static_cast<size_t>(buffer_bytes)));
    if (!buffer) return false;
    for (size_t i = next++; i < tasks.size() && !error; i = next++) {
      int64_t code = work(tasks[i], buffer);
      if (code) error = code;
    }
    std::free(buffer);
    return true;
  };
  const int64_t wanted = std::min<int64_t>(num_threads, (static_cast<int64_t>(tasks.size()) + 3) / 4);
  std::vector<pthread_t> threads;
  threads.reserve(static_cast<size_t>(std::max<int64_t>(wanted, 1)));
  beside(loop, wanted - 1, threads);
  if (!loop() && threads.empty()) error = ENOMEM;
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  if (next < tasks.size() && !error) error = ENOMEM;  // nobody had a buffer
  return error;
}

}  // namespace

extern "C" {

// states: 0 never written, 1 as written, 2 damaged. Returns 0, or errno.
int64_t ziggurat_read_rows(int fd, int64_t payload_bytes, int64_t row_bytes, int64_t rows_per_unit, int64_t unit_bytes,
                           const int64_t* rows, int64_t n, uint8_t* out, uint8_t* states, int64_t num_threads) {
  Layout layout{payload_bytes, row_bytes, rows_per_unit, unit_bytes};
  int64_t buffer = std::max(kTaskBytes, unit_bytes);
  return on_threads(tasks_of(layout, rows, n), buffer, num_threads, [&](const Task& task, uint8_t* data) -> int64_t {
    int64_t first = layout.unit(rows[task.first]), last = layout.unit(rows[task.last - 1]);
    int64_t code = transfer(fd, data, (last - first + 1) * unit_bytes, first * unit_bytes, false);
    if (code) return code;
    for (int64_t i = task.first; i < task.last; ++i) {
      const uint8_t* row = data + (layout.unit(rows[i]) - first) * unit_bytes + layout.offset_in_unit(rows[i]);
      uint32_t tag;
      std::memcpy(&tag, row + payload_bytes, 4);
      std::memcpy(out + i * payload_bytes, row, static_cast<size_t>(payload_bytes));
      states[i] = tag == 0 ? 0 : tag == tag_of(rows[i], row, payload_bytes) ? 1 : 2;
    }
    return 0;
  });
}

int64_t ziggurat_write_rows(int fd, int64_t payload_bytes, int64_t row_bytes, int64_t rows_per_unit, int64_t unit_bytes,
                            const int64_t* rows, int64_t n, const uint8_t* values, int64_t num_threads) {
  Layout layout{payload_bytes, row_bytes, rows_per_unit, unit_bytes};
  int64_t buffer = std::max(kTaskBytes, unit_bytes);
  return on_threads(tasks_of(layout, rows, n), buffer, num_threads, [&](const Task& task, uint8_t* data) -> int64_t {
    int64_t first = layout.unit(rows[task.first]), last = layout.unit(rows[task.last - 1]);
    int64_t bytes = (last - first + 1) * unit_bytes;
    bool is_whole = task.last - task.first == (last - first + 1) * rows_per_unit;
    if (is_whole) {
      std::memset(data, 0, static_cast<size_t>(bytes));
    } else {
      int64_t code = transfer(fd, data, bytes, first * unit_bytes, false);
      if (code) return code;
    }
    for (int64_t i = task.first; i < task.last; ++i) {
      uint8_t* row = data + (layout.unit(rows[i]) - first) * unit_bytes + layout.offset_in_unit(rows[i]);
      std::memcpy(row, values + i * payload_bytes, static_cast<size_t>(payload_bytes));
      uint32_t tag = tag_of(rows[i], row, payload_bytes);
      std::memcpy(row + payload_bytes, &tag, 4);
    }
    return transfer(fd, data, bytes, first * unit_bytes, true);
  });
}

}  // extern "C"
