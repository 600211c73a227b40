// Fields of text and tables of keys. Twin of ziggurat/ops/text/reference.py, which defines it in numpy.
//
// Reading Criteo is: find 40 separators a line, hash 26 ids of eight characters, parse 13 integers, look the ids up.
// numpy needs a pass over memory for each of these steps; here a byte is touched once while it is in the L1 cache.
//
//     split      one walk over the block: where each field starts and how long it is, and, by the kind of its column, the
//                stable hash of an id (features/hashing.py) or the value of an integer of at most eight characters;
//                gives up at the first record with another number of fields (numpy then finds out which and why)
//     find, add  linear probing; a batch of 16 keys is prefetched before the first is compared; `add` counts as well
//     copy       fields one behind the other, as Arrow keeps texts
//
// Everything is exact, so both twins give the same bits. Plain C interface for ctypes, which drops Python's lock.

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "registers.h"

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kPointZero = '.' | '0' << 8;
constexpr int64_t kBatch = 16;  // keys whose slots are prefetched together
constexpr int64_t kTile = 32;   // records turned into columns together

inline uint64_t mix(uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9ull;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Eight bytes from `start` on; zeros behind the end.
inline uint64_t load_word(const uint8_t* data, int64_t start, int64_t size) {
  uint64_t word = 0;
  if (start + 8 <= size) {
    std::memcpy(&word, data + start, 8);
  } else {
    std::memcpy(&word, data + start, static_cast<size_t>(size - start));
  }
  return word;
}

// Which bytes of a word equal `wanted` (repeated eight times): one bit a byte, the first byte lowest.
inline uint64_t equal_bytes(uint64_t word, uint64_t wanted) {
  constexpr uint64_t kLow = 0x7F7F7F7F7F7F7F7Full;
  const uint64_t other = word ^ wanted;
  const uint64_t zero = ~(((other & kLow) + kLow) | other | kLow) >> 7;  // 1 in each byte of `other` that is 0
  return (zero * 0x0102040810204080ull) >> 56;
}

// Which of the 64 bytes from `block` on are separators; none behind the end.
inline uint64_t separators_in(const uint8_t* data, int64_t block, int64_t size, uint8_t delimiter) {
#ifdef __AVX2__
  if (block + 64 <= size) {
    const __m256i fields = _mm256_set1_epi8(static_cast<char>(delimiter)), lines = _mm256_set1_epi8('\n');
    uint64_t found[2];
    for (int64_t half = 0; half < 2; ++half) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + block + 32 * half));
      const __m256i hits = _mm256_or_si256(_mm256_cmpeq_epi8(bytes, fields), _mm256_cmpeq_epi8(bytes, lines));
      found[half] = static_cast<uint32_t>(_mm256_movemask_epi8(hits));
    }
    return found[0] | found[1] << 32;
  }
#endif
  constexpr uint64_t kOnes = 0x0101010101010101ull;
  uint64_t found = 0;
  for (int64_t i = 0; i < 8 && block + 8 * i < size; ++i) {
    const uint64_t word = load_word(data, block + 8 * i, size);
    found |= (equal_bytes(word, kOnes * delimiter) | equal_bytes(word, kOnes * '\n')) << (8 * i);
  }
  return found;
}

// Writes where the 64 bytes from `block` on have a separator, and up to 64 numbers more that mean nothing.
inline int64_t list_places(uint64_t found, int64_t block, int32_t* places) {
  const int64_t count = __builtin_popcountll(found);
#ifdef __AVX512VBMI2__
  alignas(64) static constexpr uint8_t kPlaces[64] = {
      0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
      32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};
  alignas(64) uint8_t packed[64];
  _mm512_store_si512(packed, _mm512_maskz_compress_epi8(found, _mm512_load_si512(kPlaces)));
  const __m512i base = _mm512_set1_epi32(static_cast<int32_t>(block));
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i wide = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(packed + i)));
    _mm512_storeu_si512(places + i, _mm512_add_epi32(wide, base));
  }
#else
  for (int64_t i = 0; i < count; ++i, found &= found - 1) places[i] = static_cast<int32_t>(block + __builtin_ctzll(found));
#endif
  return count;
}

// Not 0 if any of the eight bytes is no digit.
template <typename T>
inline T not_digits(T word) {
  const T digits = word - 0x3030303030303030ull;
  return ((word + 0x4646464646464646ull) | digits) & 0x8080808080808080ull;
}

template <typename T>
inline T eight_digits(T digits_word) {
  T pairs = digits_word - 0x3030303030303030ull;
  pairs = pairs * 10 + (pairs >> 8);
  const T upper = (pairs & 0x000000FF000000FFull) * 0x000F424000000064ull;
  const T lower = ((pairs >> 16) & 0x000000FF000000FFull) * 0x0000271000000001ull;
  return (upper + lower) >> 32;
}

// The hash of a text of any length.
inline uint64_t hash(const uint8_t* data, int64_t size, uint64_t word, int64_t start, uint64_t length) {
  uint64_t sum = 0, position = kGolden;
  if (length) {
    const uint64_t unused = length < 8 ? 64 - 8 * length : 0;
    sum = mix((word & (~0ull >> unused)) ^ mix(position));
    for (uint64_t i = 8; i < length; i += 8) {
      position += kGolden;
      const uint64_t rest = length - i < 8 ? 64 - 8 * (length - i) : 0;
      sum += mix((load_word(data, start + static_cast<int64_t>(i), size) & (~0ull >> rest)) ^ mix(position));
    }
  }
  return mix(sum + (length + 1) * kGolden);
}

inline bool ends_in_point_zero(const uint8_t* data, int32_t start, int32_t length) {
  const uint8_t* end = data + start + length;
  return length >= 2 && end[-1] == '0' && end[-2] == '.';
}

constexpr int64_t kLanes = kRegisterBytes / 8;  // numbers at a time
using Words = uint64_t __attribute__((vector_size(8 * kLanes)));
using Signed = int64_t __attribute__((vector_size(8 * kLanes)));
using Doubles = double __attribute__((vector_size(8 * kLanes)));

// One column of a tile. The rest of a tile that is not full is rubbish, and ignored.
struct TileColumn {
  Words words[kTile / kLanes];    // the first eight bytes of each field
  Words lengths[kTile / kLanes];
  Words values[kTile / kLanes];   // hashes, or the bits of numbers
  Words flags[kTile / kLanes];    // not 0 where a field is not simple
};

inline Words mix_all(Words z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9ull;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Hashes of texts of at most eight bytes; flags those that end in ".0".
inline void hash_short(TileColumn& column) {
  const Words ones = ~(Words{}), position = Words{} + mix(kGolden);
  for (int64_t i = 0; i < kTile / kLanes; ++i) {
    const Words length = column.lengths[i], word = column.words[i];
    const Words some = reinterpret_cast<Words>(length != 0);
    const Words sum = mix_all((word & (ones >> ((64 - 8 * length) & 63))) ^ position) & some;
    column.values[i] = mix_all(sum + (length + 1) * kGolden);
    const Words last_two = (word >> ((8 * length - 16) & 63)) & 0xFFFF;
    column.flags[i] = reinterpret_cast<Words>(length >= 2) & reinterpret_cast<Words>(last_two == kPointZero);
  }
}

// Numbers of integers of at most eight characters, NaN of empty fields; flags everything else.
inline void parse_integers(TileColumn& column) {
  const Words ones = ~(Words{}), zeros = Words{} + 0x3030303030303030ull;
  const Words nothing = reinterpret_cast<Words>(Doubles{} + std::numeric_limits<double>::quiet_NaN());
  for (int64_t i = 0; i < kTile / kLanes; ++i) {
    const Words length = column.lengths[i], word = column.words[i];
    const Words some = reinterpret_cast<Words>(length != 0);
    const Words minus = reinterpret_cast<Words>((word & 0xFF) == '-') & some;
    const Words digits = length + minus;  // a true comparison is -1
    const Words unused = (64 - 8 * digits) & 63;
    const Words padded = (word >> (minus & 8)) << unused | (zeros & ~(ones << unused));
    const Doubles size = __builtin_convertvector(reinterpret_cast<Signed>(eight_digits(padded)), Doubles);
    const Words number = reinterpret_cast<Words>(size) | (minus & 1ull << 63);
    column.values[i] = (number & some) | (nothing & ~some);
    const Words wrong = reinterpret_cast<Words>(not_digits(padded) != 0) | reinterpret_cast<Words>(digits - 1 >= 8);
    column.flags[i] = wrong & some;
  }
}

inline uint64_t key_of(uint64_t key) { return key ? key : 1; }  // 0 marks an empty slot

enum Kind : uint8_t { kOther = 0, kId = 1, kNumber = 2 };

// What a block becomes: one row a column. values: hashes or doubles, by kind. simple: 0 once a value did not fit.
struct Columns {
  const uint8_t* data;
  int64_t size, num_fields, num_records;
  const uint8_t* kinds;
  int32_t *starts, *lengths;
  uint64_t* values;
  uint8_t* simple;
};

// Records of a tile into columns. Writing columns record by record would touch 3 · num_fields pages a record.
// ends: where the fields end, row by row, behind the end of the record before. Returns the bytes of the longest record,
// or -1 if one does not end in a line feed.
template <bool kIsFull>
int64_t turn(const int32_t* ends, int64_t num_records, int64_t first, const Columns& to) {
  const int64_t size = kIsFull ? kTile : num_records;  // known to the compiler, but for the last tile
  const int64_t stride = to.num_fields;
  int64_t longest_record = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t begin = ends[i * stride], end = ends[(i + 1) * stride];
    if (to.data[end] != '\n') return -1;
    if (end - begin > longest_record) longest_record = end - begin;
  }
  TileColumn column{};
  uint64_t* words = reinterpret_cast<uint64_t*>(column.words);
  uint64_t* sizes = reinterpret_cast<uint64_t*>(column.lengths);
  uint64_t* values = reinterpret_cast<uint64_t*>(column.values);
  uint64_t* flags = reinterpret_cast<uint64_t*>(column.flags);
  const bool is_inside = ends[size * stride] + 8 < to.size;  // eight bytes can be read from everywhere
  for (int64_t field = 0; field < stride; ++field, ++ends) {
    const int64_t place = field * to.num_records + first;
    int32_t *__restrict starts = to.starts + place, *__restrict lengths = to.lengths + place;
    uint64_t longest = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t start = ends[i * stride] + 1;
      int32_t length = ends[i * stride + 1] - start;
      if (field == stride - 1 && length > 0 && to.data[start + length - 1] == '\r') --length;
      starts[i] = start;
      lengths[i] = length;
      sizes[i] = static_cast<uint64_t>(length);
      longest |= sizes[i];
    }
    if (to.kinds[field] == kOther) continue;
    if (is_inside) {
      for (int64_t i = 0; i < size; ++i) std::memcpy(words + i, to.data + starts[i], 8);
    } else {
      for (int64_t i = 0; i < size; ++i) words[i] = load_word(to.data, starts[i], to.size);
    }
    if (to.kinds[field] == kId) {
      hash_short(column);
      for (int64_t i = 0; longest > 8 && i < size; ++i) {
        if (lengths[i] <= 8) continue;
        values[i] = hash(to.data, to.size, words[i], starts[i], sizes[i]);
        flags[i] = ends_in_point_zero(to.data, starts[i], lengths[i]);
      }
    } else {
      parse_integers(column);
    }
    std::memcpy(to.values + place, values, static_cast<size_t>(size) * 8);
    uint64_t odd = 0;
    for (int64_t i = 0; i < size; ++i) odd |= flags[i];
    if (odd) to.simple[field] = 0;
  }
  return longest_record;
}

}  // namespace

extern "C" {

// How often a byte occurs.
int64_t ziggurat_count_byte(const uint8_t* data, int64_t size, uint8_t wanted) {
  int64_t count = 0, i = 0;
  for (; i + 128 <= size; i += 128) {  // few enough for a sum of bytes, which the compiler vectorises
    uint8_t some = 0;
    for (int64_t j = 0; j < 128; ++j) some = static_cast<uint8_t>(some + (data[i + j] == wanted));
    count += some;
  }
  for (; i < size; ++i) count += data[i] == wanted;
  return count;
}

// Splits a block of `num_records` lines (as many as it has line feeds) into columns.
// kinds: (num_fields,). starts, lengths, values: (num_fields, num_records). simple: (num_fields,), all 1.
// Returns the bytes of the longest record, its line feed included; -1 if a record has not num_fields fields.
int64_t ziggurat_split(const uint8_t* data, int64_t size, uint8_t delimiter, int64_t num_fields, int64_t num_records,
                       const uint8_t* kinds, int32_t* starts, int32_t* lengths, uint64_t* values, uint8_t* simple) {
  const Columns columns{data, size, num_fields, num_records, kinds, starts, lengths, values, simple};
  const int64_t full = kTile * num_fields;
  std::vector<int32_t> ends(static_cast<size_t>(1 + full + 64 + 64));
  ends[0] = -1;
  int64_t waiting = 0, record = 0, longest = 0;
  const auto turn_tile = [&](int64_t num) {  // every line feed ends a record: then no other field holds one
    const auto turn_it = num == kTile ? turn<true> : turn<false>;
    const int64_t found = record + num <= num_records ? turn_it(ends.data(), num, record, columns) : -1;
    record += num;
    waiting -= num * num_fields;
    std::memmove(ends.data(), ends.data() + num * num_fields, static_cast<size_t>(waiting + 1) * sizeof(int32_t));
    if (found > longest) longest = found;
    return found >= 0;
  };
  for (int64_t block = 0; block < size; block += 64) {
    waiting += list_places(separators_in(data, block, size, delimiter), block, ends.data() + 1 + waiting);
    while (waiting >= full) {
      if (!turn_tile(kTile)) return -1;
    }
  }
  if (waiting % num_fields || (waiting && !turn_tile(waiting / num_fields))) return -1;
  return record == num_records && ends[0] + 1 == size ? longest : -1;
}

// Fields one behind the other.
void ziggurat_copy(const uint8_t* data, const int32_t* starts, const int32_t* lengths, int64_t size, uint8_t* to) {
  for (int64_t i = 0; i < size; ++i) {
    std::memcpy(to, data + starts[i], static_cast<size_t>(lengths[i]));
    to += lengths[i];
  }
}

// The stable hash of each of `count` texts: text i is the bytes from offsets[i] up to offsets[i + 1] of `size` bytes.
void ziggurat_hash(const uint8_t* data, int64_t size, const int64_t* offsets, int64_t count, uint64_t* hashes) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = offsets[i];
    const uint64_t length = static_cast<uint64_t>(offsets[i + 1] - start);
    const uint64_t word = length ? load_word(data, start, size) : 0;
    hashes[i] = hash(data, size, word, start, length);
  }
}

// The number of each key, -1 for keys that are not in the table of 2^bits slots.
void ziggurat_find(const uint64_t* table, const int32_t* table_numbers, int64_t bits, const uint64_t* keys, int64_t size,
                   int32_t* numbers) {
  const int64_t shift = 64 - bits;
  const uint64_t mask = (1ull << bits) - 1;
  for (int64_t begin = 0; begin < size; begin += kBatch) {
    const int64_t end = begin + kBatch < size ? begin + kBatch : size;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t slot = key_of(keys[i]) >> shift;
      __builtin_prefetch(table + slot);
      __builtin_prefetch(table_numbers + slot);
    }
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t key = key_of(keys[i]);
      uint64_t slot = key >> shift;
      while (table[slot] != key && table[slot] != 0) slot = (slot + 1) & mask;
      numbers[i] = table[slot] == key ? table_numbers[slot] : -1;
    }
  }
}

// Numbers the keys, putting in those that are not in the table, which must have room. A key is left out where
// `missing` (may be null) is not 0: its number is -1. `counts` (may be null) takes how often each number came; `places`
// takes where in `keys` each new one stands. Ends before the key that would be one more than `most` new ones; `done`
// takes how many keys that were. Returns how many were new; the first of them gets number `next`.
int64_t ziggurat_add(uint64_t* table, int32_t* table_numbers, int64_t bits, const uint64_t* keys, const uint8_t* missing,
                     int64_t size, int64_t next, int64_t most, int64_t* counts, int32_t* numbers, int64_t* places,
                     int64_t* done) {
  const int64_t shift = 64 - bits;
  const uint64_t mask = (1ull << bits) - 1;
  *done = 0;
  int64_t num_new = 0;
  bool is_full = false;
  for (int64_t begin = 0; begin < size && !is_full; begin += kBatch) {
    int64_t end = begin + kBatch < size ? begin + kBatch : size;
    for (int64_t i = begin; i < end; ++i) {
      const uint64_t slot = key_of(keys[i]) >> shift;
      __builtin_prefetch(table + slot, 1);
      __builtin_prefetch(table_numbers + slot, 1);
    }
    for (int64_t i = begin; i < end; ++i) {
      if (missing && missing[i]) {
        numbers[i] = -1;
        continue;
      }
      const uint64_t key = key_of(keys[i]);
      uint64_t slot = key >> shift;
      while (table[slot] != key && table[slot] != 0) slot = (slot + 1) & mask;
      if (table[slot] == 0) {
        if (num_new == most) {
          is_full = true;
          end = i;
          break;
        }
        table[slot] = key;
        table_numbers[slot] = static_cast<int32_t>(next + num_new);
        places[num_new++] = i;
      }
      numbers[i] = table_numbers[slot];
      if (counts) __builtin_prefetch(counts + numbers[i], 1);
    }
    for (int64_t i = begin; counts && i < end; ++i) {
      if (numbers[i] >= 0) ++counts[numbers[i]];
    }
    *done = end;
  }
  return num_new;
}

}  // extern "C"
