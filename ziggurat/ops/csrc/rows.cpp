// Rows in columns: placed in another order, gathered into a batch, hashed for the ledger. ziggurat/ops/rows.py says what
// each function computes. Nothing is allocated and no lock is held: several threads may call at once.

#include <cstdint>
#include <cstring>

#include "memory.h"

namespace {

constexpr int64_t kTileRows = 128;  // of a run that all columns pass before the next ones: a tile stays in the cache
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

template <typename T>
void place(const uint8_t* from, uint8_t* to, const int32_t* places, int64_t size, bool all) {
  const T* source = reinterpret_cast<const T*>(from);
  T* target = reinterpret_cast<T*>(to);
  if (all) {
    for (int64_t i = 0; i < size; ++i) target[places[i]] = source[i];
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    if (places[i] >= 0) target[places[i]] = source[i];
  }
}

template <typename From, typename To>
void copy(const uint8_t* from, uint8_t* to, int64_t stride, int64_t size) {
  const From* source = reinterpret_cast<const From*>(from);
  if (stride == static_cast<int64_t>(sizeof(To))) {
    To* target = reinterpret_cast<To*>(to);
    for (int64_t i = 0; i < size; ++i) target[i] = static_cast<To>(source[i]);
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    *reinterpret_cast<To*>(to) = static_cast<To>(source[i]);
    to += stride;
  }
}

// Asks for the first rows of a run: runs are short, and each begins elsewhere.
void prefetch(const uint8_t* const* columns, const int64_t* widths, int64_t num_columns, const int64_t* run) {
  for (int64_t column = 0; column < num_columns; ++column) {
    const uint8_t* begin = columns[column] + run[1] * widths[column];
    const int64_t size = run[2] * widths[column];
    ask_for(begin);
    for (int64_t at = 64; at < size && at < 256; at += 64) ask_for(begin + at);
  }
}

}  // namespace

extern "C" {

// Row i of each column goes to row places[i] of its target; rows with a negative place are left out.
// from, to: (num_columns,) where each begins; widths: bytes of a value.
void ziggurat_place_rows(int64_t num_columns, const uint8_t* const* from, uint8_t* const* to, const int64_t* widths,
                         const int32_t* places, int64_t size) {
  int32_t signs = 0;
  for (int64_t i = 0; i < size; ++i) signs |= places[i];
  for (int64_t column = 0; column < num_columns; ++column) {
    const int64_t width = widths[column];
    if (width == 4) {
      place<uint32_t>(from[column], to[column], places, size, signs >= 0);
    } else if (width == 8) {
      place<uint64_t>(from[column], to[column], places, size, signs >= 0);
    } else {
      for (int64_t i = 0; i < size; ++i) {
        if (places[i] < 0) continue;
        std::memcpy(to[column] + places[i] * width, from[column] + i * width, static_cast<size_t>(width));
      }
    }
  }
}

// Runs of rows, one behind the other, into a batch.
// runs: (num_runs, 3) source, first row, rows. from: (num_sources, num_columns) where each column begins.
// widths: bytes of a value; to: where the first row's goes; out_widths: bytes of it there (8 for 4: widened, sign and
// all); strides: bytes from one row's to the next.
void ziggurat_gather_rows(int64_t num_runs, const int64_t* runs, int64_t num_columns, const uint8_t* const* from,
                          const int64_t* widths, uint8_t* const* to, const int64_t* out_widths,
                          const int64_t* strides) {
  int64_t row = 0;
  for (int64_t run = 0; run < num_runs; ++run) {
    const uint8_t* const* columns = from + runs[3 * run] * num_columns;
    int64_t first = runs[3 * run + 1], left = runs[3 * run + 2];
    if (run + 1 < num_runs) prefetch(from + runs[3 * run + 3] * num_columns, widths, num_columns, runs + 3 * run + 3);
    while (left > 0) {
      const int64_t size = left < kTileRows ? left : kTileRows;
      for (int64_t column = 0; column < num_columns; ++column) {
        const int64_t width = widths[column], stride = strides[column];
        const uint8_t* source = columns[column] + first * width;
        uint8_t* target = to[column] + row * stride;
        if (width == 4 && out_widths[column] == 8) {
          copy<int32_t, int64_t>(source, target, stride, size);
        } else if (width == 4) {
          copy<uint32_t, uint32_t>(source, target, stride, size);
        } else if (width == stride) {
          std::memcpy(target, source, static_cast<size_t>(size * width));
        } else {
          for (int64_t i = 0; i < size; ++i) std::memcpy(target + i * stride, source + i * width, static_cast<size_t>(width));
        }
      }
      first += size;
      row += size;
      left -= size;
    }
  }
}

// Lists, one behind the other, widened. starts: (size,) number of a chunk in the upper 24 bits, place in it in the lower
// 40; offsets: (size + 1,) where each list goes; chunks: where each chunk of values begins.
void ziggurat_gather_lists(int64_t size, const int64_t* starts, const int64_t* offsets, const int32_t* const* chunks,
                           int64_t* to) {
  for (int64_t i = 0; i < size; ++i) {
    const int32_t* source = chunks[starts[i] >> 40] + (starts[i] & ((int64_t{1} << 40) - 1));
    int64_t* target = to + offsets[i];
    const int64_t length = offsets[i + 1] - offsets[i];
    for (int64_t k = 0; k < length; ++k) target[k] = source[k];
  }
}

// Where each of (size,) lists starts, one behind the other in values: where the one before does if that is equal.
void ziggurat_share_lists(const int32_t* values, const int64_t* offsets, int64_t size, int64_t* starts) {
  for (int64_t i = 0; i < size; ++i) {
    starts[i] = offsets[i];
    if (i == 0) continue;
    const int64_t length = offsets[i + 1] - offsets[i];
    if (length == offsets[i] - offsets[i - 1] &&
        std::memcmp(values + offsets[i], values + starts[i - 1], static_cast<size_t>(4 * length)) == 0) {
      starts[i] = starts[i - 1];
    }
  }
}

// The two hashes of the ledger of (size,) row ids: sums[0] depends on their order, sums[1] does not.
void ziggurat_hash_rows(const uint64_t* rows, int64_t size, uint64_t* sums) {
  uint64_t ordered = 0, total = 0;
  for (int64_t i = 0; i < size; ++i) {
    const uint64_t mixed = mix(rows[i] + kGolden);
    total += mixed;
    ordered += mix(mixed + static_cast<uint64_t>(i) * kGolden);
  }
  sums[0] = ordered;
  sums[1] = total;
}

}  // extern "C"
