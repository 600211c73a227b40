// A map from 64-bit ids to rows that admits and evicts. Twin of ziggurat/ops/growing/reference.py, which defines it.
//
//     slots   (S,) uint32   linear probing; 0 is empty, else row + 1 in the lower bits and a tag of the id's hash above
//     rows    (R,) 13 bytes: the id, the step of its last use, how often it was used; in one cache line, mostly
//
// A look-up reads one slot and, where the tag agrees, one row: 32 ids are prefetched together. There are 4/3 slots a row,
// so a chain is short; an id that goes leaves no mark, because the slots after it move up.
//
// Victims are found 1/64 of the rows at a time, by radix selection over (frequency, last): no memory beyond a histogram.

#include <algorithm>
#include <cstdint>
#include <vector>

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr int64_t kBatch = 32;
constexpr int64_t kSketchHashes = 4;
constexpr uint32_t kMost = 255;  // where frequencies and sightings stop counting

// Order of the numbers: ziggurat/ops/growing/state.py.
enum Number { kUsed, kQueueNext, kQueueEnd, kScanStep };
enum Evict : int64_t { kNever = 0, kLeastFrequent = 1, kOldest = 2 };

#pragma pack(push, 1)
struct Row {
  uint64_t key;
  int32_t last;
  uint8_t frequency;
};
#pragma pack(pop)

struct Map {
  int64_t capacity, num_slots, row_bits, queue_size, evict;
  uint32_t* slots;
  Row* rows;
  int64_t* numbers;
  int32_t* queue;
};

inline uint64_t mix(uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9ull;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

inline int64_t scaled(uint64_t hash, int64_t size) {
  return static_cast<int64_t>((static_cast<unsigned __int128>(hash) * static_cast<uint64_t>(size)) >> 64);
}

inline uint64_t hash_of(uint64_t key) { return mix(key + kGolden); }
inline uint32_t tag_of(const Map& map, uint64_t hash) { return static_cast<uint32_t>(hash << map.row_bits); }
inline uint32_t row_mask(const Map& map) { return static_cast<uint32_t>((1ull << map.row_bits) - 1); }
inline int64_t row_in(const Map& map, uint32_t slot) { return static_cast<int64_t>(slot & row_mask(map)) - 1; }
inline int64_t next_place(const Map& map, int64_t place) { return place + 1 == map.num_slots ? 0 : place + 1; }

// From `place` on: the first slot that is empty or has the tag.
inline int64_t candidate(const Map& map, int64_t place, uint32_t tag) {
  const uint32_t rows = row_mask(map);
  while (map.slots[place] && (map.slots[place] & ~rows) != tag) place = next_place(map, place);
  return place;
}

// The place of a key, given its first candidate; of an empty slot where it is not there.
inline int64_t settle(const Map& map, int64_t place, uint32_t tag, uint64_t key) {
  while (map.slots[place] && map.rows[row_in(map, map.slots[place])].key != key) {
    place = candidate(map, next_place(map, place), tag);
  }
  return place;
}

inline void insert(Map& map, uint64_t key, int64_t row) {
  const uint64_t hash = hash_of(key);
  int64_t place = scaled(hash, map.num_slots);
  while (map.slots[place]) place = next_place(map, place);
  map.slots[place] = tag_of(map, hash) | static_cast<uint32_t>(row + 1);
}

inline void erase(Map& map, uint64_t key) {
  const uint64_t hash = hash_of(key);
  const uint32_t tag = tag_of(map, hash);
  int64_t hole = settle(map, candidate(map, scaled(hash, map.num_slots), tag), tag, key);
  for (int64_t place = next_place(map, hole); map.slots[place]; place = next_place(map, place)) {
    __builtin_prefetch(map.rows + row_in(map, map.slots[place]));  // their homes are asked for below
  }
  const auto distance = [&map](int64_t from, int64_t to) { return to >= from ? to - from : to - from + map.num_slots; };
  for (int64_t place = next_place(map, hole); map.slots[place]; place = next_place(map, place)) {
    const int64_t home = scaled(hash_of(map.rows[row_in(map, map.slots[place])].key), map.num_slots);
    if (distance(home, place) >= distance(hole, place)) {
      map.slots[hole] = map.slots[place];
      hole = place;
    }
  }
  map.slots[hole] = 0;
}

// Rows of ids, -1 where there is none; with `kUse` rows that are found count as used at `step`.
template <bool kUse>
void find(Map& map, const uint64_t* ids, int64_t num_ids, int32_t step, int64_t* rows) {
  uint64_t hashes[kBatch];
  int64_t places[kBatch];
  for (int64_t first = 0; first < num_ids; first += kBatch) {
    const int64_t size = std::min(kBatch, num_ids - first);
    for (int64_t i = 0; i < size; ++i) {
      hashes[i] = hash_of(ids[first + i]);
      __builtin_prefetch(map.slots + scaled(hashes[i], map.num_slots));
    }
    for (int64_t i = 0; i < size; ++i) {
      places[i] = candidate(map, scaled(hashes[i], map.num_slots), tag_of(map, hashes[i]));
      if (const uint32_t slot = map.slots[places[i]]) {
        const int64_t row = row_in(map, slot);
        __builtin_prefetch(map.rows + row, kUse);
        __builtin_prefetch(&map.rows[row].frequency, kUse);  // perhaps in the next line
      }
    }
    for (int64_t i = 0; i < size; ++i) {
      const uint32_t slot = map.slots[settle(map, places[i], tag_of(map, hashes[i]), ids[first + i])];
      const int64_t row = row_in(map, slot);
      rows[first + i] = row;
      if (kUse && row >= 0) {
        map.rows[row].frequency = static_cast<uint8_t>(std::min<uint32_t>(kMost, map.rows[row].frequency + 1u));
        map.rows[row].last = step;
      }
    }
  }
}

// What is small goes first.
inline uint64_t rank_of(const Map& map, int64_t row) {
  const uint64_t last = static_cast<uint32_t>(map.rows[row].last);
  return map.evict == kLeastFrequent ? static_cast<uint64_t>(map.rows[row].frequency) << 32 | last : last;
}

// Fills the queue with the rows that go first, in order; rows used at `step` or later stay out.
void scan(Map& map, int32_t step) {
  const int64_t num_rows = map.numbers[kUsed];
  uint64_t prefix = 0, known = 0;  // ranks below `prefix` (in its known bits) are all taken
  int64_t wanted = map.queue_size;
  std::vector<int64_t> histogram(1 << 16);
  for (int shift = 32; shift >= 0; shift -= 16) {
    std::fill(histogram.begin(), histogram.end(), 0);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (map.rows[row].last >= step) continue;
      const uint64_t rank = rank_of(map, row);
      if ((rank & known) == prefix) ++histogram[rank >> shift & 0xFFFF];
    }
    uint64_t digit = 0;
    while (digit < 0xFFFF && histogram[digit] < wanted) wanted -= histogram[digit++];
    prefix |= digit << shift;
    known |= 0xFFFFull << shift;
  }
  std::vector<std::pair<uint64_t, int32_t>> found;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (map.rows[row].last >= step) continue;
    const uint64_t rank = rank_of(map, row);
    if (rank < prefix || (rank == prefix && wanted-- > 0)) found.emplace_back(rank, static_cast<int32_t>(row));
  }
  std::sort(found.begin(), found.end());
  for (size_t i = 0; i < found.size(); ++i) map.queue[i] = found[i].second;
  map.numbers[kQueueNext] = 0;
  map.numbers[kQueueEnd] = static_cast<int64_t>(found.size());
  map.numbers[kScanStep] = step;
}

// A row that may be taken away, or -1 where all are in use.
int64_t victim(Map& map, int32_t step) {
  for (int round = 0; round < 2; ++round) {
    while (map.numbers[kQueueNext] < map.numbers[kQueueEnd]) {
      const int64_t row = map.queue[map.numbers[kQueueNext]++];
      if (map.rows[row].last < map.numbers[kScanStep]) return row;
    }
    if (round == 0) {
      if (map.numbers[kScanStep] == step && map.numbers[kQueueEnd] == 0) return -1;  // this step has looked before
      scan(map, step);
    }
  }
  return -1;
}

// What admitting needs soon: the slots of ids to come; the rows to go, and a little later the slots of their ids.
inline void prefetch_ahead(const Map& map, const uint64_t* keys, int64_t i, int64_t num_keys) {
  constexpr int64_t kAhead = 8;
  if (i + kAhead < num_keys) __builtin_prefetch(map.slots + scaled(hash_of(keys[i + kAhead]), map.num_slots), 1);
  const int64_t next = map.numbers[kQueueNext], end = map.numbers[kQueueEnd];
  if (next + 2 * kAhead < end) __builtin_prefetch(map.rows + map.queue[next + 2 * kAhead], 1);
  if (next + kAhead < end) {
    __builtin_prefetch(map.slots + scaled(hash_of(map.rows[map.queue[next + kAhead]].key), map.num_slots), 1);
  }
}

}  // namespace

extern "C" {

void ziggurat_growing_find(Map* map, const uint64_t* ids, int64_t num_ids, int64_t* rows) {
  find<false>(*map, ids, num_ids, 0, rows);
}

void ziggurat_growing_use(Map* map, const uint64_t* ids, int64_t num_ids, int64_t step, int64_t* rows) {
  find<true>(*map, ids, num_ids, static_cast<int32_t>(step), rows);
}

// The slots anew, from the keys of rows.
void ziggurat_growing_index(Map* map) {
  std::fill(map->slots, map->slots + map->num_slots, 0u);
  for (int64_t row = 0; row < map->numbers[kUsed]; ++row) insert(*map, map->rows[row].key, row);
}

// Different ids in the order in which they come, and how often each does; `numbers` says which one each id is.
int64_t ziggurat_growing_distinct(const uint64_t* ids, int64_t num_ids, uint64_t* keys, int64_t* counts, int64_t* numbers) {
  int64_t size = 16, num_keys = 0;
  while (size < 2 * num_ids) size *= 2;
  std::vector<int32_t> slots(static_cast<size_t>(size), -1);
  for (int64_t i = 0; i < num_ids; ++i) {
    int64_t place = static_cast<int64_t>(hash_of(ids[i]) & static_cast<uint64_t>(size - 1));
    while (slots[place] >= 0 && keys[slots[place]] != ids[i]) place = place + 1 & size - 1;
    if (slots[place] < 0) {
      slots[place] = static_cast<int32_t>(num_keys);
      keys[num_keys] = ids[i];
      counts[num_keys++] = 0;
    }
    ++counts[slots[place]];
    numbers[i] = slots[place];
  }
  return num_keys;
}

// Count-min with conservative update; all hashes share one array.
void ziggurat_growing_count(
    uint8_t* sketch, int64_t size, const uint64_t* keys, const int64_t* counts, int64_t num_keys, int64_t* seen) {
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < num_keys + kAhead; ++i) {
    if (i < num_keys) {
      for (uint64_t k = 1; k <= kSketchHashes; ++k) __builtin_prefetch(sketch + scaled(mix(hash_of(keys[i]) + k * kGolden), size), 1);
    }
    const int64_t now = i - kAhead;
    if (now < 0) continue;
    uint8_t* cells[kSketchHashes];
    uint32_t least = kMost;
    for (uint64_t k = 1; k <= kSketchHashes; ++k) {
      cells[k - 1] = sketch + scaled(mix(hash_of(keys[now]) + k * kGolden), size);
      least = std::min<uint32_t>(least, *cells[k - 1]);
    }
    const uint32_t sum = static_cast<uint32_t>(std::min<int64_t>(kMost, least + counts[now]));
    for (uint8_t* cell : cells) *cell = static_cast<uint8_t>(std::max<uint32_t>(*cell, sum));
    seen[now] = sum;
  }
}

// Rows for new ids, in order; -1 for those not seen often enough, and for all that come when no row is left.
// Returns how many ids lost their row.
int64_t ziggurat_growing_admit(
    Map* map, const uint64_t* keys, const int64_t* seen, int64_t num_keys, int64_t threshold, int64_t step, int64_t* rows) {
  int64_t num_evicted = 0;
  for (int64_t i = 0; i < num_keys; ++i) {
    prefetch_ahead(*map, keys, i, num_keys);
    rows[i] = -1;
    if (seen[i] < threshold) continue;
    int64_t row = -1;
    if (map->numbers[kUsed] < map->capacity) {
      row = map->numbers[kUsed]++;
    } else if (map->evict != kNever && (row = victim(*map, static_cast<int32_t>(step))) >= 0) {
      erase(*map, map->rows[row].key);
      ++num_evicted;
    }
    if (row < 0) continue;
    map->rows[row].key = keys[i];
    map->rows[row].frequency = static_cast<uint8_t>(std::min<int64_t>(kMost, seen[i]));
    map->rows[row].last = static_cast<int32_t>(step);
    insert(*map, keys[i], row);
    rows[i] = row;
  }
  return num_evicted;
}
}
