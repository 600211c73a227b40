// Karmarkar-Karp with equal numbers of items; `ops/karmarkar_karp.py` defines it and explains it.
//
// A partial partition has `num_parts` slots, largest sum first. The items of a slot are a linked list, so that joining
// two slots takes no copying: `head` and `tail` of a slot, `next` of an item. Sums are added in the order of the Python
// reference, two numbers at a time, so both find the same bits.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <queue>
#include <vector>

namespace {

struct Slot {
  double sum;
  int64_t head, tail;
};

struct Waiting {
  double spread;
  int64_t number;
  bool operator<(const Waiting& other) const {  // the largest spread first, then the oldest
    return spread != other.spread ? spread < other.spread : number > other.number;
  }
};

}  // namespace

// costs: largest first. parts: the part of each item, written.
extern "C" void karmarkar_karp(const double* costs, int64_t num_items, int64_t num_parts, int32_t* parts) {
  if (num_items == 0) return;
  const int64_t num_tuples = (num_items + num_parts - 1) / num_parts;
  std::vector<Slot> slots(num_tuples * num_parts, Slot{0.0, -1, -1});
  std::vector<int64_t> next(num_items, -1);
  for (int64_t item = 0; item < num_items; ++item) slots[item] = Slot{costs[item], item, item};
  std::vector<int64_t> first(num_tuples);  // where the slots of each partial partition begin
  std::priority_queue<Waiting> waiting;
  for (int64_t tuple = 0; tuple < num_tuples; ++tuple) {
    first[tuple] = tuple * num_parts;
    waiting.push({slots[first[tuple]].sum - slots[first[tuple] + num_parts - 1].sum, tuple});
  }
  std::vector<Slot> joined(num_parts);
  while (waiting.size() > 1) {
    const int64_t a = first[waiting.top().number];
    waiting.pop();
    const int64_t b = first[waiting.top().number];
    waiting.pop();
    for (int64_t slot = 0; slot < num_parts; ++slot) {
      const Slot large = slots[a + slot], small = slots[b + num_parts - 1 - slot];
      Slot both{large.sum + small.sum, large.head, large.tail};
      if (both.head < 0) both.head = small.head;
      else if (small.head >= 0) next[both.tail] = small.head;
      if (small.tail >= 0) both.tail = small.tail;
      joined[slot] = both;
    }
    std::stable_sort(joined.begin(), joined.end(), [](const Slot& x, const Slot& y) { return x.sum > y.sum; });
    std::copy(joined.begin(), joined.end(), slots.begin() + a);
    first.push_back(a);
    waiting.push({joined[0].sum - joined[num_parts - 1].sum, static_cast<int64_t>(first.size()) - 1});
  }
  const int64_t found = first[waiting.top().number];
  for (int64_t slot = 0; slot < num_parts; ++slot)
    for (int64_t item = slots[found + slot].head; item >= 0; item = next[item]) parts[item] = static_cast<int32_t>(slot);
}
