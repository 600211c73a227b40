// Tasks: the lookups of a step, gathered and sorted by row, for whatever rows are kept as. See lookup.cpp.
#pragma once
#include "parts.h"

namespace {

struct Field {  // one slot of one part, reading the task's table
  const Part* part;
  const Slot* slot;
  uint32_t base;  // where the part's gradient starts, if all parts' lay one after the other
};

struct Table {
  int64_t first_row = 0, num_rows = 0, num_lookups = 0;
  std::vector<Field> fields;
};

struct Task {
  Table table;
  // the table's rows whose residue, row mod modulus, is in group `group` of `modulus >> group_bits`; powers of two
  uint32_t modulus = 1, group = 0;
  int group_bits = 0;  // of residues that lie in one group
  bool has(uint64_t row) const { return (row & (modulus - 1)) >> group_bits == group; }
  bool is_whole() const { return modulus >> group_bits == 1; }
  std::vector<uint64_t> keys, scratch;
  int64_t count = 0, num_unique = 0, first_unique = 0;
};

struct Workspace {
  std::vector<Task> tasks;
  int64_t num_tasks = 0;
  std::vector<Part> parts;
  std::vector<uint64_t> starts;  // of each part's gradient, as in Field::base
};

// The rows of a table with many lookups are told apart by their residues, which lie one after the other in the order of
// distinct rows, so that a step with few tables has about kTasks parts for the threads to share. Each task looks at all
// lookups of its table, so there are no more tasks than threads need: a thread alone takes all residues at once.
constexpr int64_t kMinTaskLookups = 4096, kMaxTaskLookups = 32768, kTasks = 16, kMaxModulus = 64;

int64_t count_lookups(const Part& part, const Slot& slot) {
  if (slot.kind == kSingle) return part.batch_size;
  return part.offsets[(slot.index + 1) * part.batch_size] - part.offsets[slot.index * part.batch_size];
}

// The order of rows depends on the numbers of lookups alone, never on the number of threads.
int64_t plan_tasks(Workspace& work, const Part* parts, int64_t num_parts, int num_threads) {
  work.parts.assign(parts, parts + num_parts);
  work.starts.clear();
  uint64_t start = 0;
  for (const Part& part : work.parts) {
    work.starts.push_back(start);
    start += static_cast<uint64_t>(part.batch_size) * part.width;
  }
  std::vector<Table> tables;
  for (size_t p = 0; p < work.parts.size(); p++) {
    const Part& part = work.parts[p];
    for (int64_t s = 0; s < part.num_slots; s++) {
      const Slot& slot = part.slots[s];
      const int64_t count = count_lookups(part, slot);
      if (count < 0 || count > std::max(part.num_values, part.batch_size)) return kBadOffsets;
      auto table = std::find_if(tables.begin(), tables.end(),
                                [&](const Table& known) { return known.first_row == slot.first_row; });
      if (table == tables.end()) table = tables.insert(table, {slot.first_row, slot.num_rows, 0, {}});
      table->fields.push_back({&part, &slot, static_cast<uint32_t>(work.starts[p])});
      table->num_lookups += count;
    }
  }
  int64_t total = 0;
  for (const Table& table : tables) total += table.num_lookups;
  const int64_t limit = std::clamp(total / kTasks, kMinTaskLookups, kMaxTaskLookups);
  std::stable_sort(tables.begin(), tables.end(),
                   [](const Table& a, const Table& b) { return a.num_lookups > b.num_lookups; });  // long ones first
  work.num_tasks = 0;
  for (const Table& table : tables) {
    int64_t modulus = 1;
    while (modulus < kMaxModulus && table.num_lookups > modulus * limit && table.num_rows > modulus) modulus *= 2;
    int group_bits = 0;
    while (modulus >> group_bits > (num_threads > 1 ? 2 * num_threads : 1)) group_bits++;
    for (int64_t group = 0; group < modulus >> group_bits; group++) {
      if (work.num_tasks == static_cast<int64_t>(work.tasks.size())) work.tasks.emplace_back();
      Task& task = work.tasks[work.num_tasks++];  // keeps its buffers from the last step
      task.table = table;
      task.modulus = static_cast<uint32_t>(modulus);
      task.group = static_cast<uint32_t>(group);
      task.group_bits = group_bits;
    }
  }
  return kOk;
}

// Calls visit(row, where the gradient starts, whether the task has it) for every lookup of the task's table.
template <class Visit>
int64_t for_each_lookup(const Task& task, Visit visit) {
  const uint64_t num_rows = task.table.num_rows;
  for (const Field& field : task.table.fields) {
    const Part& part = *field.part;
    const Slot& slot = *field.slot;
    const bool single = slot.kind == kSingle;
    const int64_t first = slot.index * part.batch_size;
    const int64_t* rows = single ? part.single + first : part.values;
    const int64_t* offsets = part.offsets + first;
    const int64_t end = single ? part.batch_size : std::min(offsets[part.batch_size], part.num_values);
    uint32_t source = field.base + static_cast<uint32_t>(slot.column);
    for (int64_t b = 0; b < part.batch_size; b++, source += static_cast<uint32_t>(part.width)) {
      const int64_t from = single ? b : offsets[b], to = single ? b + 1 : offsets[b + 1];
      if (from < 0 || from > to || to > end) return kBadOffsets;  // so there are never more than count_lookups
      for (int64_t p = from; p < to; p++) {
        const uint64_t row = rows[p];
        if (row >= num_rows) return kRowOutOfBounds;
        visit(row, source, row != 0 && task.has(row));
      }
    }
  }
  return kOk;
}

constexpr int kMaxDigit = 11, kMaxPasses = 3;  // 33 bits, rows have at most 31

// Stable radix sort by the `digit · passes` bits from `low` up, lowest digit first. Returns where the result lies.
template <int passes>
uint64_t* radix_sort(uint64_t* keys, uint64_t* scratch, int64_t count, int low, int digit) {
  const uint32_t mask = (1u << digit) - 1;
  uint32_t counts[passes][1 << kMaxDigit];
  for (int pass = 0; pass < passes; pass++) std::memset(counts[pass], 0, sizeof(uint32_t) << digit);
  for (int64_t i = 0; i < count; i++) {
    const uint64_t row = keys[i] >> low;
    for (int pass = 0; pass < passes; pass++) counts[pass][row >> (pass * digit) & mask]++;
  }
  for (int pass = 0; pass < passes; pass++) {
    uint32_t* next = counts[pass];
    uint32_t total = 0;
    for (uint32_t value = 0; value <= mask; value++) {
      const uint32_t here = next[value];
      next[value] = total;
      total += here;
    }
    for (int64_t i = 0; i < count; i++) scratch[next[keys[i] >> (low + pass * digit) & mask]++] = keys[i];
    std::swap(keys, scratch);
  }
  return keys;
}

// Fills task.keys with the task's lookups, sorted by residue, and rows of a residue by row.
int64_t sort_task(Task& task) {
  int64_t count = task.table.num_lookups;
  if (!task.is_whole()) {
    count = 0;
    const int64_t status = for_each_lookup(task, [&](uint64_t, uint32_t, bool mine) { count += mine; });
    if (status != kOk) return status;
  }
  if (static_cast<int64_t>(task.keys.size()) <= count) {
    task.keys.resize(count + count / 4 + 1);  // one more, for the key that a skipped lookup leaves
    task.scratch.resize(task.keys.size());
  }
  uint64_t* keys = task.keys.data();
  count = 0;
  const int64_t status = for_each_lookup(task, [&](uint64_t row, uint32_t source, bool mine) {
    keys[count] = row << 32 | source;
    count += mine;
  });
  if (status != kOk) return status;
  task.count = count;
  int shift = 0, bits = 1;
  while ((1u << shift) < task.modulus) shift++;
  while ((task.table.num_rows - 1) >> (bits + shift)) bits++;
  const int passes = (bits + kMaxDigit - 1) / kMaxDigit, digit = (bits + passes - 1) / passes, low = 32 + shift;
  const auto sort = passes == 1 ? radix_sort<1> : passes == 2 ? radix_sort<2> : radix_sort<kMaxPasses>;
  uint64_t *scratch = task.scratch.data(), *sorted = sort(keys, scratch, count, low, digit);
  if (task.group_bits) sorted = radix_sort<1>(sorted, sorted == keys ? scratch : keys, count, 32, shift);
  if (sorted != keys) task.keys.swap(task.scratch);
  task.num_unique = 0;
  uint64_t last = 0;  // padding, which no key has
  for (int64_t i = 0; i < count; i++, last = task.keys[i - 1] >> 32) task.num_unique += task.keys[i] >> 32 != last;
  return kOk;
}

}  // namespace
