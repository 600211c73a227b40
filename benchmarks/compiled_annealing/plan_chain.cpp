// Annealing of one plan after another, a candidate at a time, for cost models whose prices are small networks.
//
// A candidate touches one or two devices. It is dropped as soon as it cannot be accepted, cheapest question first:
//
//   1. the limit is drawn beforehand: cost now + temperature * exponential random number
//   2. bytes that do not fit cost a fine
//   3. local network of the touched devices alone (64 products): too slow with the least exchange seen so far?
//   4. exchange as if all started together, remembered by the sums of columns: too slow by more than its usual error?
//   5. the exchange network with the true starts: cost below the limit?
//
// One thread, no allocation inside the loop. Vectors are GCC's and clang's (8 floats), so the compiler picks AVX2, NEON, …
// The readable reference is ziggurat/planning/search/annealing.py; plan_chain.py, beside this file, calls it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

namespace {

typedef float Vector __attribute__((vector_size(32)));
typedef float Loose __attribute__((vector_size(32), aligned(4), may_alias));  // a vector anywhere in memory
constexpr int64_t LANES = 8;
constexpr int64_t REMEMBERED = 1 << 16;
constexpr int64_t ASK_CLOCK = 1024;    // candidates between two looks at the clock
constexpr int64_t SUM_ANEW = 2000;     // changes after which states are summed anew: float32 sums drift
constexpr double SMALL = 1e-6;

int64_t padded(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

inline Vector load(const float* from) { return *reinterpret_cast<const Loose*>(from); }

inline void store(float* to, Vector value) { *reinterpret_cast<Loose*>(to) = value; }

Vector all(float value) { return Vector{} + value; }

Vector relu(Vector value) {
  const Vector zero = {};
  return value > zero ? value : zero;
}

}  // namespace

extern "C" {

// Dense layers, the numbers of all of them behind each other: (in, out) weights, then (out) biases.
struct ZigguratLayers {
  int64_t depth;
  const int64_t* sizes;  // depth + 1
  const float* numbers;
};

struct ZigguratNetworks {
  int64_t width;       // of a state
  int64_t num_hidden;  // the first of them go through relu(x + bias) and the local layers
  const float* bias;
  int64_t sum_place;  // place in the state of the sum that exchanges depend on
  int64_t group;      // devices that the exchange networks see
  ZigguratLayers local, together, apart;  // of hidden; of sums; of sums and later starts
};

struct ZigguratProblem {
  int64_t num_tables, num_devices, num_kinds, num_levels, distinct;
  const float* encodings;      // (num_kinds, width)
  const double* bytes;         // (num_kinds)
  const int64_t* column_kind;  // (num_tables, num_levels), -1: may not be cut so often
  const int64_t* most_levels;  // (num_tables)
  const uint8_t* allowed;      // (num_tables, num_devices)
  const double* room;          // (num_devices)
};

struct ZigguratAnnealing {
  uint64_t seed;
  int64_t num_chains, evaluations;
  double hot, cold, focus, fine, slack;
  double (*spent)();  // share of the budget, asked now and then where evaluations is 0
};

// Plans as slots: table t owns 2^most_levels[t] of them, its parts fill the first count[t].
struct ZigguratPlans {
  int64_t num_starts;
  const int64_t *device, *level;  // (num_starts, slots)
  const int64_t* count;           // (num_starts, num_tables)
  int64_t *best_device, *best_level, *best_count;
  int64_t history_size, num_history;
  double* history;  // (history_size, 2): evaluations or share of the budget, cost
  double best_cost, least_overflow;
  int64_t num_evaluations, num_priced, num_accepted;
};
}

namespace {

struct Random {
  uint64_t state[4];

  explicit Random(uint64_t seed) {
    for (auto& word : state) {  // splitmix64
      uint64_t z = (seed += 0x9e3779b97f4a7c15ULL);
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
      word = z ^ (z >> 31);
    }
  }
  uint64_t next() {  // xoshiro256++
    auto turn = [](uint64_t x, int k) { return (x << k) | (x >> (64 - k)); };
    const uint64_t result = turn(state[0] + state[3], 23) + state[0], t = state[1] << 17;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= t;
    state[3] = turn(state[3], 45);
    return result;
  }
  int64_t below(int64_t limit) { return int64_t((next() >> 32) * uint64_t(limit) >> 32); }
  double uniform() { return double((next() >> 11) + 1) * 0x1p-53; }  // in (0, 1]
};

// out[8 V] = numbers of one block of a layer; U partial sums hide the latency of small blocks. Sums must be unrolled, or
// they lie in memory instead of registers.
template <int V, int U>
inline void block(const float* __restrict x, int64_t in, const float* __restrict weight, int64_t stride,
                  const float* __restrict bias, float* __restrict out, bool last) {
  Vector sum[U * V];
#pragma GCC unroll 16
  for (int k = 0; k < U * V; k++) sum[k] = k < V ? load(bias + LANES * k) : Vector{};
  int64_t i = 0;
  for (; i + U <= in; i += U) {
#pragma GCC unroll 16
    for (int k = 0; k < U * V; k++)
      sum[k] += all(x[i + k / V]) * load(weight + (i + k / V) * stride + LANES * (k % V));
  }
  for (; i < in; i++) {
#pragma GCC unroll 16
    for (int k = 0; k < V; k++) sum[k] += all(x[i]) * load(weight + i * stride + LANES * k);
  }
#pragma GCC unroll 16
  for (int k = 0; k < V; k++) {
    Vector total = sum[k];
#pragma GCC unroll 16
    for (int u = 1; u < U; u++) total += sum[u * V + k];
    store(out + LANES * k, last ? total : relu(total));
  }
}

struct Layer {
  int64_t in, out, stride;
  std::vector<float> weight, bias;

  void run(const float* x, float* y, bool last) const {
    if (out == 1) {
      Vector sum = {};
      for (int64_t i = 0; i < in; i += LANES) sum += load(x + i) * load(weight.data() + i);
      float total = bias[0];
      for (int64_t lane = 0; lane < LANES; lane++) total += sum[lane];
      y[0] = last ? total : std::max(total, 0.0f);
      return;
    }
    int64_t done = 0;
    const float *w = weight.data(), *b = bias.data();
    for (; stride - done >= 64; done += 64) block<8, 1>(x, in, w + done, stride, b + done, y + done, last);
    for (; stride - done >= 32; done += 32) block<4, 2>(x, in, w + done, stride, b + done, y + done, last);
    for (; stride - done >= 16; done += 16) block<2, 4>(x, in, w + done, stride, b + done, y + done, last);
    for (; stride - done >= 8; done += 8) block<1, 8>(x, in, w + done, stride, b + done, y + done, last);
  }
};

struct Network {
  std::vector<Layer> layers;
  mutable std::vector<float> front, back;

  explicit Network(const ZigguratLayers& given) {
    const float* from = given.numbers;
    int64_t most = LANES;
    for (int64_t index = 0; index < given.depth; index++) {
      Layer layer;
      layer.in = given.sizes[index], layer.out = given.sizes[index + 1];
      layer.stride = layer.out == 1 ? 1 : padded(layer.out);
      layer.weight.assign(size_t(padded(layer.in) * layer.stride), 0.0f);
      for (int64_t i = 0; i < layer.in; i++, from += layer.out)
        std::copy(from, from + layer.out, layer.weight.data() + i * layer.stride);
      layer.bias.assign(size_t(padded(layer.out)), 0.0f);
      std::copy(from, from + layer.out, layer.bias.data());
      from += layer.out;
      most = std::max({most, padded(layer.in), padded(layer.out)});
      layers.push_back(std::move(layer));
    }
    front.assign(size_t(most), 0.0f), back.assign(size_t(most), 0.0f);
  }
  // x has room for whole vectors, with zeros behind its numbers; the result is valid until the next run.
  const float* run(const float* x) const {
    float *to = front.data(), *other = back.data();
    for (size_t index = 0; index < layers.size(); index++) {
      layers[index].run(x, to, index + 1 == layers.size());
      x = to;
      std::swap(to, other);
    }
    return x;
  }
};

// Prices of states; `estimate` must come before `exact`, which uses what it looked up.
struct Pricer {
  int64_t devices, width, stride, num_hidden, sum_place, group, num_groups;
  Network local_network, together, apart;
  std::vector<float> bias, hidden, input, starts;
  std::vector<int64_t> order, sums;
  std::vector<uint64_t> keys;
  std::vector<float> known;  // (REMEMBERED, group + 1)

  Pricer(const ZigguratNetworks& given, int64_t num_devices)
      : devices(num_devices), width(given.width), stride(padded(given.width)), num_hidden(given.num_hidden),
        sum_place(given.sum_place), group(given.group), num_groups(num_devices / given.group),
        local_network(given.local), together(given.together), apart(given.apart),
        bias(given.bias, given.bias + given.num_hidden), hidden(size_t(padded(given.num_hidden)), 0.0f),
        input(size_t(padded(2 * given.group)), 0.0f), starts(size_t(num_devices)), order(size_t(num_devices)),
        sums(size_t(num_devices)), keys(REMEMBERED, 0), known(size_t(REMEMBERED * (given.group + 1))) {
    std::iota(order.begin(), order.end(), int64_t(0));
    bias.resize(size_t(padded(num_hidden)), -std::numeric_limits<float>::infinity());  // relu gives 0
  }

  float local(const float* state) {
    for (int64_t i = 0; i < padded(num_hidden); i += LANES)
      store(hidden.data() + i, relu(load(state + i) + load(bias.data() + i)));
    return local_network.run(hidden.data())[0];
  }

  int64_t sum_of(const float* state) const { return int64_t(std::nearbyint(state[sum_place])); }

  // The latest start and an exchange in which all start together.
  float estimate(const float* local_ms, const int64_t* columns) {
    if (num_groups > 1) {
      std::iota(order.begin(), order.end(), int64_t(0));
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return columns[a] < columns[b]; });
    }
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t number = 0; number < num_groups; number++) {
      const int64_t* mine = order.data() + number * group;
      const float* found = look_up(mine, columns);
      float latest = -std::numeric_limits<float>::infinity();
      for (int64_t i = 0; i < group; i++) {
        starts[size_t(mine[i])] = local_ms[mine[i]] + found[i];
        latest = std::max(latest, starts[size_t(mine[i])]);
      }
      most = std::max(most, latest + found[group]);
    }
    std::copy(columns, columns + devices, sums.begin());
    return most;
  }

  // Milliseconds of every device; returns the most.
  float exact(float* device_ms) {
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t number = 0; number < num_groups; number++) {
      const int64_t* mine = order.data() + number * group;
      float first = starts[size_t(mine[0])];
      for (int64_t i = 1; i < group; i++) first = std::min(first, starts[size_t(mine[i])]);
      for (int64_t i = 0; i < group; i++) {
        input[size_t(i)] = float(sums[size_t(mine[i])]);
        input[size_t(group + i)] = starts[size_t(mine[i])] - first;
      }
      const float* forward = apart.run(input.data());
      for (int64_t i = 0; i < group; i++) {
        device_ms[mine[i]] = starts[size_t(mine[i])] + forward[i];
        most = std::max(most, device_ms[mine[i]]);
      }
    }
    return most;
  }

 private:
  const float* look_up(const int64_t* mine, const int64_t* columns) {
    uint64_t key = 0x9e3779b97f4a7c15ULL;
    for (int64_t i = 0; i < group; i++) {
      key = (key ^ uint64_t(columns[mine[i]])) * 0xff51afd7ed558ccdULL;
      key ^= key >> 32;
    }
    key |= 1;  // never that of an empty place
    const int64_t at = int64_t((key >> 20) & (REMEMBERED - 1));
    float* found = known.data() + at * (group + 1);
    if (keys[size_t(at)] == key) return found;
    keys[size_t(at)] = key;
    std::fill(input.begin(), input.end(), 0.0f);
    for (int64_t i = 0; i < group; i++) input[size_t(i)] = float(columns[mine[i]]);
    const float* backward = together.run(input.data());
    std::copy(backward, backward + group, found);
    const float* forward = apart.run(input.data());
    found[group] = *std::max_element(forward, forward + group);
    return found;
  }
};

enum Change { MOVE, SWAP, SPLIT, MERGE };

class Chain {
 public:
  Chain(const ZigguratNetworks& networks, const ZigguratProblem& problem, const ZigguratAnnealing& how,
        ZigguratPlans& plans)
      : p_(problem), how_(how), plans_(plans), pricer_(networks, problem.num_devices), random_(how.seed),
        stride_(pricer_.stride) {
    const size_t devices = size_t(p_.num_devices), numbers = devices * size_t(stride_);
    encodings_.assign(size_t(p_.num_kinds * stride_), 0.0f);
    for (int64_t kind = 0; kind < p_.num_kinds; kind++)
      std::copy(p_.encodings + kind * networks.width, p_.encodings + (kind + 1) * networks.width,
                encodings_.begin() + kind * stride_);
    for (int64_t table = 0; table < p_.num_tables; table++) {
      first_.push_back(int64_t(table_of_.size()));
      table_of_.resize(table_of_.size() + (size_t(1) << p_.most_levels[table]), table);
      any_cut_ |= p_.most_levels[table] > 0;
      int64_t choices = 0;
      for (int64_t device = 0; device < p_.num_devices; device++) choices += may(table, device);
      num_allowed_.push_back(choices);
    }
    const size_t slots = table_of_.size();
    device_.resize(slots), level_.resize(slots), where_.resize(slots), count_.resize(size_t(p_.num_tables));
    on_.resize(devices);
    states_.resize(numbers), new_states_.resize(numbers);
    held_.resize(devices), new_held_.resize(devices), local_.resize(devices), new_local_.resize(devices);
    columns_.resize(devices), new_columns_.resize(devices), ms_.resize(devices), new_ms_.resize(devices);
    is_touched_.assign(devices, 0);
    mean_room_ = std::max(1.0, std::accumulate(p_.room, p_.room + devices, 0.0) / double(devices));
  }

  int64_t evaluations() const { return evaluations_; }

  void run() {
    const double shrink = std::min(1.0, double(p_.num_devices) / double(p_.num_tables));
    const double hot = std::max(how_.hot * shrink * shrink, how_.cold);
    plans_.best_cost = std::numeric_limits<double>::infinity();
    plans_.least_overflow = std::numeric_limits<double>::infinity();
    for (int64_t chain = 0; chain < how_.num_chains; chain++) {
      begin(chain % plans_.num_starts);
      const double from = double(chain) / double(how_.num_chains), share = 1.0 / double(how_.num_chains);
      double done = (spent() - from) / share;
      while (done < 1.0) {
        const double part = std::min(1.0, std::max(0.0, done) / 0.9);
        const double warmth = done < 0.9 ? hot * std::pow(how_.cold / hot, part) : 1e-9;
        severity_ = 1.0 + 3.0 * std::max(0.0, done);
        fine_ = fine_of(overflow_);
        for (int64_t left = batch(); left > 0; left--) step(warmth * scale_);
        done = (spent() - from) / share;
      }
      if (spent() >= 1.0) return;
    }
  }

 private:
  const ZigguratProblem& p_;
  const ZigguratAnnealing& how_;
  ZigguratPlans& plans_;
  Pricer pricer_;
  Random random_;
  int64_t stride_, evaluations_ = 0, since_summed_ = 0, worst_ = 0;
  bool any_cut_ = false;
  double scale_ = 1.0, severity_ = 1.0, mean_room_ = 1.0, overflow_ = 0.0, fine_ = 0.0;
  double cost_ = 0.0, guess_ = 0.0, error_ = 0.0, least_exchange_ = 0.0, last_spent_ = 0.0;
  std::vector<float> encodings_, states_, new_states_, local_, new_local_, ms_, new_ms_;
  std::vector<double> held_, new_held_;
  std::vector<int64_t> first_, table_of_, num_allowed_, device_, level_, where_, count_, columns_, new_columns_;
  std::vector<std::vector<int64_t>> on_;  // slots of each device
  std::vector<int64_t> touched_, ends_;
  std::vector<uint8_t> is_touched_;

  bool may(int64_t table, int64_t device) const { return p_.allowed[table * p_.num_devices + device]; }
  int64_t kind(int64_t table, int64_t level) const { return p_.column_kind[table * p_.num_levels + level]; }
  int64_t batch() const {
    if (!how_.evaluations) return ASK_CLOCK;
    const int64_t some = std::max<int64_t>(1, how_.evaluations / (32 * how_.num_chains));
    return std::min({ASK_CLOCK, some, std::max<int64_t>(1, how_.evaluations - evaluations_)});
  }
  double spent() {
    if (how_.evaluations) return double(evaluations_) / double(how_.evaluations);
    return last_spent_ = how_.spent();
  }
  double fine_of(double overflow) const {
    return overflow > SMALL ? scale_ * how_.fine * severity_ * (overflow / mean_room_ + 0.01) : 0.0;
  }

  // ---------------------------------------------------------------------------------------------- plans as slots

  void put(int64_t slot, int64_t device) {
    device_[slot] = device;
    where_[slot] = int64_t(on_[device].size());
    on_[device].push_back(slot);
  }
  void take(int64_t slot) {
    auto& mine = on_[device_[slot]];
    const int64_t last = mine.back();
    mine[where_[slot]] = last, where_[last] = where_[slot];
    mine.pop_back();
    device_[slot] = -1;
  }

  void begin(int64_t start) {
    const size_t slots = table_of_.size();
    for (auto& mine : on_) mine.clear();
    std::copy_n(plans_.count + start * p_.num_tables, p_.num_tables, count_.begin());
    for (size_t slot = 0; slot < slots; slot++) {
      level_[slot] = plans_.level[size_t(start) * slots + slot];
      device_[slot] = -1;
      const int64_t device = plans_.device[size_t(start) * slots + slot];
      if (device >= 0) put(int64_t(slot), device);
    }
    sum_anew();
    scale_ = cost_;
    severity_ = 1.0;
    fine_ = fine_of(overflow_);
    least_exchange_ = cost_ - *std::max_element(local_.begin(), local_.end());
    record();
  }

  void sum_anew() {
    std::fill(states_.begin(), states_.end(), 0.0f);
    std::fill(held_.begin(), held_.end(), 0.0);
    for (size_t slot = 0; slot < table_of_.size(); slot++) {
      if (device_[slot] < 0) continue;
      const int64_t which = kind(table_of_[slot], level_[slot]);
      add(states_.data() + device_[slot] * stride_, which, 1.0f);
      held_[device_[slot]] += p_.bytes[which];
    }
    overflow_ = 0.0;
    for (int64_t device = 0; device < p_.num_devices; device++) {
      local_[device] = pricer_.local(states_.data() + device * stride_);
      columns_[device] = pricer_.sum_of(states_.data() + device * stride_);
      overflow_ += std::max(held_[device] - p_.room[device], 0.0);
    }
    guess_ = pricer_.estimate(local_.data(), columns_.data());
    cost_ = pricer_.exact(ms_.data());
    worst_ = std::max_element(ms_.begin(), ms_.end()) - ms_.begin();
    since_summed_ = 0;
  }

  void add(float* state, int64_t which, float sign) {
    const float* from = encodings_.data() + which * stride_;
    for (int64_t i = 0; i < stride_; i += LANES) store(state + i, load(state + i) + sign * load(from + i));
  }

  void record() {
    if (overflow_ > SMALL) {
      plans_.least_overflow = std::min(plans_.least_overflow, overflow_);
      return;
    }
    if (cost_ >= plans_.best_cost - SMALL) return;
    plans_.best_cost = cost_;
    plans_.least_overflow = 0.0;
    std::copy(device_.begin(), device_.end(), plans_.best_device);
    std::copy(level_.begin(), level_.end(), plans_.best_level);
    std::copy(count_.begin(), count_.end(), plans_.best_count);
    if (plans_.num_history < plans_.history_size) plans_.num_history++;
    double* to = plans_.history + 2 * (plans_.num_history - 1);  // the last entry is always the best
    to[0] = how_.evaluations ? double(evaluations_) / double(how_.evaluations) : last_spent_;
    to[1] = cost_;
  }

  // ------------------------------------------------------------------------------------------------- candidates

  void change(int64_t device, int64_t which, float sign) {
    float* state = new_states_.data() + device * stride_;
    if (!is_touched_[device]) {
      is_touched_[device] = 1;
      touched_.push_back(device);
      std::memcpy(state, states_.data() + device * stride_, sizeof(float) * size_t(stride_));
      new_held_[device] = held_[device];
    }
    add(state, which, sign);
    new_held_[device] += double(sign) * p_.bytes[which];
  }

  int64_t some_slot() {
    const int64_t table = random_.below(p_.num_tables);
    return first_[table] + random_.below(count_[table]);
  }
  int64_t focused_slot() {
    const auto& mine = on_[worst_];
    if (mine.empty() || random_.uniform() >= how_.focus) return some_slot();
    return mine[random_.below(int64_t(mine.size()))];
  }
  // Whether a part of `slot` may come to a device: allowed, and no other part of the table there if they must differ.
  bool free_on(int64_t slot, int64_t device) const {
    const int64_t table = table_of_[slot];
    if (!may(table, device)) return false;
    if (!p_.distinct) return true;
    for (int64_t other = first_[table]; other < first_[table] + count_[table]; other++)
      if (other != slot && device_[other] == device) return false;
    return true;
  }

  void step(double temperature) {
    evaluations_++;
    touched_.clear();
    const double draw = random_.uniform() * (any_cut_ ? 0.98 : 0.72);
    const Change what = draw < 0.36 ? MOVE : draw < 0.72 ? SWAP : draw < 0.85 ? SPLIT : MERGE;
    const int64_t slot = focused_slot(), table = table_of_[slot];
    int64_t other = 0, target = 0;
    bool valid;
    if (what == MOVE) {
      target = random_.below(p_.num_devices);
      valid = offer_move(slot, target);
    } else if (what == SWAP) {
      other = some_slot();
      valid = offer_swap(slot, other);
    } else if (p_.distinct) {
      valid = offer_recut(table, what == SPLIT);
    } else if (what == SPLIT) {
      target = random_.below(p_.num_devices);
      valid = offer_split(slot, target);
    } else {
      other = first_[table] + random_.below(count_[table]);
      valid = offer_merge(slot, other);
    }
    if (valid && passes(temperature)) accept(what, slot, other, target);
    for (const int64_t device : touched_) is_touched_[device] = 0;
  }

  bool offer_move(int64_t slot, int64_t target) {
    if (device_[slot] == target || !free_on(slot, target)) return false;
    const int64_t which = kind(table_of_[slot], level_[slot]);
    change(device_[slot], which, -1.0f);
    change(target, which, 1.0f);
    return true;
  }
  bool offer_swap(int64_t slot, int64_t other) {
    const int64_t here = device_[slot], there = device_[other];
    if (here == there || !free_on(slot, there) || !free_on(other, here)) return false;
    const int64_t mine = kind(table_of_[slot], level_[slot]), theirs = kind(table_of_[other], level_[other]);
    if (mine == theirs) return false;
    change(here, mine, -1.0f), change(here, theirs, 1.0f);
    change(there, theirs, -1.0f), change(there, mine, 1.0f);
    return true;
  }
  bool offer_split(int64_t slot, int64_t target) {
    const int64_t table = table_of_[slot], level = level_[slot];
    if (device_[slot] == target || level >= p_.most_levels[table] || !may(table, target)) return false;
    const int64_t half = kind(table, level + 1);
    change(device_[slot], kind(table, level), -1.0f), change(device_[slot], half, 1.0f);
    change(target, half, 1.0f);
    return true;
  }
  bool offer_merge(int64_t slot, int64_t other) {
    const int64_t table = table_of_[slot], level = level_[slot];
    if (slot == other || level == 0 || level != level_[other]) return false;
    const int64_t half = kind(table, level);
    change(device_[slot], half, -1.0f), change(device_[slot], kind(table, level - 1), 1.0f);
    change(device_[other], half, -1.0f);
    return true;
  }
  // All parts in halves on other devices, or half of the parts twice as wide. `ends_` are the devices afterwards.
  bool offer_recut(int64_t table, bool split) {
    const int64_t num = count_[table], level = level_[first_[table]];
    if (split ? level >= p_.most_levels[table] || 2 * num > num_allowed_[table] : level == 0) return false;
    const int64_t old = kind(table, level), later = kind(table, split ? level + 1 : level - 1);
    ends_.clear();
    for (int64_t slot = first_[table]; slot < first_[table] + num; slot++) {
      ends_.push_back(device_[slot]);
      change(device_[slot], old, -1.0f);
    }
    if (split) {
      const int64_t begin = num;
      for (int64_t device = 0; device < p_.num_devices; device++)
        if (may(table, device) && !is_touched_[device]) ends_.push_back(device);
      shuffle(begin, num);
      ends_.resize(size_t(2 * num));
    } else {
      shuffle(0, num / 2);
      ends_.resize(size_t(num / 2));
    }
    for (const int64_t device : ends_) change(device, later, 1.0f);
    return true;
  }
  // The first `wanted` of ends_[begin:] become a random choice of them.
  void shuffle(int64_t begin, int64_t wanted) {
    for (int64_t i = 0; i < wanted; i++)
      std::swap(ends_[begin + i], ends_[begin + i + random_.below(int64_t(ends_.size()) - begin - i)]);
  }

  bool passes(double temperature) {
    double limit = cost_ + fine_ - temperature * std::log(random_.uniform());
    double overflow = overflow_;
    for (const int64_t device : touched_)
      overflow += std::max(new_held_[device] - p_.room[device], 0.0) - std::max(held_[device] - p_.room[device], 0.0);
    const double fine = fine_of(overflow);
    limit -= fine;
    if (limit <= least_exchange_) return false;
    for (const int64_t device : touched_) {
      new_local_[device] = pricer_.local(new_states_.data() + device * stride_);
      if (new_local_[device] + least_exchange_ >= limit) return false;
    }
    float most_local = -std::numeric_limits<float>::infinity();
    for (int64_t device = 0; device < p_.num_devices; device++) {
      if (is_touched_[device]) {
        new_columns_[device] = pricer_.sum_of(new_states_.data() + device * stride_);
      } else {
        new_local_[device] = local_[device], new_columns_[device] = columns_[device];
      }
      most_local = std::max(most_local, new_local_[device]);
    }
    const double guess = pricer_.estimate(new_local_.data(), new_columns_.data());
    if (cost_ + guess - guess_ >= limit + how_.slack * error_) return false;
    const double cost = pricer_.exact(new_ms_.data());
    plans_.num_priced++;
    error_ += 0.01 * (std::abs((cost - cost_) - (guess - guess_)) - error_);
    least_exchange_ = std::min(least_exchange_, cost - double(most_local));
    if (cost >= limit) return false;
    cost_ = cost, guess_ = guess, overflow_ = overflow, fine_ = fine;
    return true;
  }

  void accept(Change what, int64_t slot, int64_t other, int64_t target) {
    for (const int64_t device : touched_) {
      std::memcpy(states_.data() + device * stride_, new_states_.data() + device * stride_,
                  sizeof(float) * size_t(stride_));
      held_[device] = new_held_[device], local_[device] = new_local_[device], columns_[device] = new_columns_[device];
    }
    ms_.swap(new_ms_);
    worst_ = std::max_element(ms_.begin(), ms_.end()) - ms_.begin();
    plans_.num_accepted++;
    apply(what, slot, other, target);
    record();
    if (++since_summed_ >= SUM_ANEW) {
      sum_anew();
      fine_ = fine_of(overflow_);
    }
  }

  void apply(Change what, int64_t slot, int64_t other, int64_t target) {
    const int64_t table = table_of_[slot], first = first_[table];
    if (what == MOVE) {
      take(slot), put(slot, target);
    } else if (what == SWAP) {
      const int64_t here = device_[slot], there = device_[other];
      take(slot), take(other), put(slot, there), put(other, here);
    } else if (p_.distinct) {
      const int64_t level = level_[first] + (what == SPLIT ? 1 : -1);
      for (int64_t i = 0; i < count_[table]; i++) take(first + i);
      count_[table] = int64_t(ends_.size());
      for (int64_t i = 0; i < count_[table]; i++) put(first + i, ends_[i]), level_[first + i] = level;
    } else if (what == SPLIT) {
      const int64_t added = first + count_[table]++;
      level_[added] = ++level_[slot];
      put(added, target);
    } else {
      const int64_t last = first + --count_[table];
      level_[slot]--;
      take(other);
      if (other != last) {  // the last part fills the gap
        const int64_t device = device_[last];
        take(last), put(other, device), level_[other] = level_[last];
      }
    }
  }
};

}  // namespace

extern "C" {

// Anneal until the budget is spent; fills the answer in `plans`.
void ziggurat_plan_anneal(const ZigguratNetworks* networks, const ZigguratProblem* problem,
                          const ZigguratAnnealing* how, ZigguratPlans* plans) {
  Chain chain(*networks, *problem, *how, *plans);
  chain.run();
  plans->num_evaluations = chain.evaluations();
}

// (num_plans, num_devices) milliseconds of states (num_plans, num_devices, width).
void ziggurat_plan_price(const ZigguratNetworks* networks, int64_t num_plans, int64_t num_devices, const float* states,
                         float* device_ms) {
  Pricer pricer(*networks, num_devices);
  std::vector<float> state(size_t(pricer.stride), 0.0f), local(static_cast<size_t>(num_devices));
  std::vector<int64_t> columns(static_cast<size_t>(num_devices));
  for (int64_t plan = 0; plan < num_plans; plan++) {
    for (int64_t device = 0; device < num_devices; device++, states += networks->width) {
      std::copy(states, states + networks->width, state.begin());
      local[size_t(device)] = pricer.local(state.data());
      columns[size_t(device)] = pricer.sum_of(state.data());
    }
    pricer.estimate(local.data(), columns.data());
    pricer.exact(device_ms + plan * num_devices);
  }
}
}
