// Rounding to block formats, and their bits. Twin of ziggurat/numerics/blocks.py and packing.py, which define every bit.
//
//     last axis     a block lies in one register or a few: its largest by shuffles, its second level within lanes
//     other axes    a register holds one number of sixteen neighbouring blocks: no shuffles; a result that is too large
//                   for the L2 cache is written past the caches
//
// A number is rounded by adding and subtracting a power of two whose last bit is the element's step: the sum rounds as
// IEEE 754 says, to the nearest, ties to even. This, and products with powers of two, are exact for magnitudes that
// are not extreme; blocks with extreme ones, NaN or infinities take the slow path, one number at a time in double.
//
// Vectors are the compiler's: a processor without such registers gets the same results.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "registers.h"

namespace {

constexpr int kLanes = kRegisterBytes / 4;

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

enum Rule : int64_t { kFloor, kCeil, kEven, kRceil };

// What Python passes of a format; see BlockFormat. k1 is the block's length, resolved.
struct Format {
  int64_t k1, k2, d1, d2;
  int64_t element_bits, fraction_bits, min_exponent, max_exponent, largest_code;
  int64_t rule, truncates, is_twos_complement;
  double largest, largest_held;
};

constexpr int64_t kChunk = 1024;  // numbers of a block where none share a scale
constexpr int32_t kMagnitude = 0x7FFFFFFF;
constexpr int32_t kInfinity = 0x7F800000;
constexpr int64_t kZeroBinade = -(int64_t(1) << 20);
constexpr float kSmallestNormal = 0x1p-126f;
constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr uint64_t kNanBits = 0x7FC00000;

template <typename To, typename From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To result;
  std::memcpy(&result, &value, sizeof(result));
  return result;
}

inline Floats all(float value) { return Floats{} + value; }
inline Ints all(int32_t value) { return Ints{} + value; }
inline Ints larger(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smaller(Ints a, Ints b) { return a < b ? a : b; }
inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }
inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
inline Floats load(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  Floats value{};
  std::memcpy(&value, from, 4 * count);
  return value;
}
inline void store(float* to, Floats value, int64_t count) {
  std::memcpy(to, &value, count >= kLanes ? sizeof(value) : 4 * count);
}

template <int kStep>
inline Ints swapped(Ints v) {
#if defined(__clang__)
  Ints result;
  for (int i = 0; i < kLanes; ++i) result[i] = v[i ^ kStep];
  return result;
#else
  Ints order;
  for (int i = 0; i < kLanes; ++i) order[i] = i ^ kStep;
  return __builtin_shuffle(v, order);
#endif
}

// The largest of each `width` neighbouring lanes, in all of them.
inline Ints largest_of_neighbours(Ints v, int64_t width) {
  if (width >= 2) v = larger(v, swapped<1>(v));
  if (width >= 4) v = larger(v, swapped<2>(v));
  if (kLanes >= 8 && width >= 8) v = larger(v, swapped<4 % kLanes>(v));
  if (kLanes >= 16 && width >= 16) v = larger(v, swapped<8 % kLanes>(v));
  return v;
}

inline int32_t largest_lane(Ints v) { return largest_of_neighbours(v, kLanes)[0]; }

// ---- the slow path: exact in double, one number at a time -----------------------------------------------------------

inline int64_t binade(double magnitude) {
  if (magnitude == 0) return kZeroBinade;
  int exponent;
  std::frexp(magnitude, &exponent);
  return exponent - 1;
}

inline int64_t ceiling_of_log2(double magnitude) {
  int exponent;
  const double mantissa = std::frexp(magnitude, &exponent);
  return exponent - 1 + (mantissa > 0.5);
}

inline int64_t clamped(int64_t value, int64_t low, int64_t high) { return std::min(std::max(value, low), high); }

struct Scale {
  int64_t exponent = 0;  // of a power of two
  float number = 1;      // an FP32 scale
};

inline bool has_fp32_scale(const Format& f) { return f.d1 == 32; }
inline int64_t max_scale_exponent(const Format& f) { return f.d1 ? (int64_t(1) << (f.d1 - 1)) - 1 : 0; }
inline int64_t max_second(const Format& f) { return (int64_t(1) << f.d2) - 1; }

Scale scale_of(float largest, const Format& f) {
  Scale scale;
  if (!f.d1) return scale;
  if (has_fp32_scale(f)) {
    float number = largest / float(f.largest);
    if (f.d2) number /= float(max_second(f));
    scale.number = std::max(number, kSmallestNormal);
    return scale;
  }
  int64_t exponent = kZeroBinade;
  if (largest > 0) {
    int ignored;
    switch (f.rule) {
      case kRceil: {
        const float in_units = largest / float(f.largest);
        exponent = in_units > 0 ? ceiling_of_log2(in_units) : kZeroBinade;
        break;
      }
      case kCeil: exponent = ceiling_of_log2(largest) - f.max_exponent; break;
      case kEven:
        exponent = binade(largest) + (std::frexp(largest, &ignored) >= 1 - std::ldexp(1.0, -int(f.fraction_bits) - 2));
        exponent -= f.max_exponent;
        break;
      default: exponent = binade(largest) - f.max_exponent;
    }
  }
  scale.exponent = clamped(exponent, -max_scale_exponent(f), max_scale_exponent(f));
  return scale;
}

int64_t second_of(float largest, const Scale& scale, const Format& f) {
  if (!has_fp32_scale(f)) return clamped(scale.exponent + f.max_exponent - binade(largest), 0, max_second(f));
  const float factor = largest / float(f.largest) / scale.number;
  return clamped(int64_t(std::nearbyint(double(factor))), 1, max_second(f));
}

int64_t code_of(double in_units, const Format& f) {
  const int64_t exponent = std::max(binade(in_units), f.min_exponent);
  double steps = std::ldexp(in_units, int(f.fraction_bits - exponent));
  steps = f.truncates ? std::floor(steps) : std::nearbyint(steps);
  return std::min(int64_t(steps) + ((exponent - f.min_exponent) << f.fraction_bits), f.largest_code);
}

double magnitude_of(int64_t code, const Format& f) {
  const int64_t lifted = std::max<int64_t>(code >> f.fraction_bits, 1) - 1;
  const int64_t steps = code - (lifted << f.fraction_bits);
  return std::ldexp(double(steps), int(lifted + f.min_exponent - f.fraction_bits));
}

// The scale of a number below both levels.
struct Unit {
  int64_t exponent;
  float number;
};

inline Unit unit_of(const Scale& scale, int64_t second, const Format& f) {
  if (!f.d2) return {scale.exponent, scale.number};
  return {scale.exponent - second, scale.number * float(second)};
}

inline float value_of(int64_t code, bool is_negative, const Unit& unit, const Format& f) {
  const double in_units = magnitude_of(code, f);
  float magnitude;
  if (has_fp32_scale(f)) {
    magnitude = std::min(float(in_units) * unit.number, kLargestFloat);
  } else {
    magnitude = float(std::min(std::ldexp(in_units, int(unit.exponent)), double(kLargestFloat)));
  }
  const float value = is_negative ? -magnitude : magnitude;
  return f.is_twos_complement ? value + 0.0f : value;
}

inline double in_units_of(float magnitude, const Unit& unit, const Format& f) {
  if (has_fp32_scale(f)) return double(magnitude / unit.number);
  return std::ldexp(double(magnitude), int(-unit.exponent));
}

// A block whose numbers lie `stride` apart, told to a sink; false: a number cannot be held.
template <typename Sink>
bool code_slowly(const float* x, int64_t stride, int64_t count, const Format& f, Sink& sink) {
  float largest = 0;
  bool has_nan = false;
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::fabs(x[i * stride]);
    if (std::isnan(magnitude)) {
      has_nan = true;
    } else {
      largest = std::max(largest, magnitude);
    }
  }
  if (largest > f.largest_held) return false;
  const bool is_nan = has_nan && f.d1;
  const Scale scale = scale_of(is_nan ? 0.0f : largest, f);
  sink.begin(scale, is_nan);
  const int64_t width = f.d2 ? f.k2 : count;
  const auto second_at = [&](int64_t start) -> int64_t {
    if (!f.d2) return 0;
    float below = 0;
    for (int64_t i = start; i < std::min(count, start + width) && !is_nan; ++i)
      below = std::max(below, std::fabs(x[i * stride]));
    return second_of(below, scale, f);
  };
  for (int64_t start = 0; start < count && f.d2; start += width) sink.second(second_at(start));
  for (int64_t start = 0; start < count; start += width) {
    const Unit unit = unit_of(scale, second_at(start), f);
    for (int64_t i = start; i < std::min(count, start + width); ++i) {
      const float value = x[i * stride];
      const bool gone = std::isnan(value);
      const double in_units = gone || is_nan ? 0.0 : in_units_of(std::fabs(value), unit, f);
      sink.number(i, code_of(in_units, f), std::signbit(value), unit, gone || is_nan);
    }
  }
  return true;
}

struct ValueSink {
  float* out;
  int64_t stride;
  const Format& f;
  void begin(const Scale&, bool) {}
  void second(int64_t) {}
  void number(int64_t i, int64_t code, bool is_negative, const Unit& unit, bool is_nan) {
    out[i * stride] = is_nan ? bits_as<float>(uint32_t(kNanBits)) : value_of(code, is_negative, unit, f);
  }
};

// ---- the fast path ---------------------------------------------------------------------------------------------------

// What is worked out once for a call.
struct Fast {
  const Format& f;
  int32_t min_exponent_bits, magic_shift, cut_mask, largest_bits;
  // Exponents are kept where FP32 numbers have them, 23 bits up. The scale rule in these:
  int32_t rule_adds, rule_subtracts;  // exponent of (largest + rule_adds) - rule_subtracts
  int32_t least_scale, most_scale, max_exponent, max_second_code;
  int32_t low, high;  // bits of the largest magnitudes of blocks that are not extreme
  float largest, max_second_float;
  bool divides, is_narrow, is_possible;

  explicit Fast(const Format& format) : f(format) {
    min_exponent_bits = int32_t(f.min_exponent + 127) << 23;
    magic_shift = int32_t(23 - f.fraction_bits) << 23;
    cut_mask = -1 << (23 - f.fraction_bits);
    largest = float(f.largest);
    largest_bits = bits_as<int32_t>(largest);
    divides = f.rule == kRceil;
    rule_adds = f.rule == kFloor ? 0 : f.rule == kEven ? 1 << (22 - f.fraction_bits) : 0x7FFFFF;
    max_exponent = int32_t(f.max_exponent) << 23;
    rule_subtracts = divides ? 0 : max_exponent;
    const int64_t max_scale = max_scale_exponent(f);
    is_narrow = max_scale < 127;
    least_scale = int32_t(127 - std::min<int64_t>(max_scale, 110)) << 23;  // -110 is below all blocks but those of zeros
    most_scale = int32_t(127 + std::min<int64_t>(max_scale, 127)) << 23;
    max_second_code = int32_t(has_fp32_scale(f) ? max_second(f) : max_second(f) << 23);
    max_second_float = float(max_second(f));
    const bool second_fits = f.d2 == 0 || ((f.k2 & (f.k2 - 1)) == 0 && (has_fp32_scale(f) || f.d2 <= 4));
    const bool cut_fits = !f.truncates || (!f.d1 && f.min_exponent == -126);
    is_possible = second_fits && cut_fits;
    high = bits_as<int32_t>(std::min(float(f.largest_held), 0x1p90f));
    low = f.d1 && !has_fp32_scale(f) ? bits_as<int32_t>(0x1p-90f) : 1;
  }
  // Of zeros, which are below `low`, any scale gives zeros.
  bool is_ordinary(int32_t block_largest) const {
    return is_possible && block_largest <= high && (block_largest >= low || block_largest == 0);
  }
};

// Turns the order of magnitudes into one in which zero is the largest.
inline Ints zero_last(Ints magnitude) { return magnitude + 0x7FFFFFFF; }
inline int32_t zero_last(int32_t magnitude) { return int32_t(uint32_t(magnitude) + 0x7FFFFFFFu); }

// First-level scales of blocks that are not extreme, as the bits of powers of two, by those of their largest magnitudes.
template <typename I, typename F>
inline I scale_bits(I a, const Fast& fast) {
  if (fast.divides) a = bits_as<I>(F(bits_as<F>(a) / fast.largest));
  I scale = ((a + fast.rule_adds) & kInfinity) - fast.rule_subtracts;
  scale = larger(scale, I{} + fast.least_scale);
  return fast.is_narrow ? smaller(scale, I{} + fast.most_scale) : scale;
}

enum Scales { kNone, kPowers, kNumbers };

// Rounds magnitudes in units of their scales, and saturates them.
template <Scales kScales, bool kIsInteger>
inline Floats rounded(Floats y, const Fast& fast) {
  if (kScales == kNone && fast.f.truncates) return bits_as<Floats>(bits_as<Ints>(y) & fast.cut_mask);
  Ints exponent = all(fast.min_exponent_bits);
  if (!kIsInteger) exponent = larger(bits_as<Ints>(y) & kInfinity, exponent);
  const Floats magic = bits_as<Floats>(exponent + fast.magic_shift);
  y = (y + magic) - magic;
  return bits_as<Floats>(smaller(bits_as<Ints>(y), all(fast.largest_bits)));  // numbers >= 0 have the order of their bits
}

// One register of magnitudes, given what they are divided by.
template <Scales kScales, bool kIsInteger>
inline Floats units(Floats x, Floats by, const Fast& fast) {
  Floats y = bits_as<Floats>(bits_as<Ints>(x) & kMagnitude);
  if (kScales == kPowers) y = y * by;
  if (kScales == kNumbers) y = y / by;
  return rounded<kScales, kIsInteger>(y, fast);
}

template <Scales kScales>
inline Floats signed_values(Floats x, Floats in_units, Floats times, const Fast& fast) {
  if (kScales != kNone) in_units = in_units * times;
  const Floats value = bits_as<Floats>(bits_as<Ints>(in_units) | (bits_as<Ints>(x) & ~kMagnitude));
  return fast.f.is_twos_complement ? value + 0.0f : value;
}

// Scales of the lanes of a register: what numbers are multiplied or divided by, and what codes are multiplied by.
struct Lanes {
  Floats by, times;
  Ints second;
};

template <Scales kScales, bool kHasSecond>
inline Lanes lanes_of(Ints power, Floats number, Ints below, const Fast& fast) {
  Lanes lanes;
  lanes.second = Ints{};
  if (kScales == kPowers) {
    if (kHasSecond) {
      const Ints depth = power + fast.max_exponent - (below & kInfinity);
      lanes.second = smaller(larger(depth, Ints{}), all(fast.max_second_code));
      power = power - lanes.second;
    }
    lanes.times = bits_as<Floats>(power);
    lanes.by = bits_as<Floats>((254 << 23) - power);
  } else if (kScales == kNumbers) {
    if (kHasSecond) {
      Floats factor = bits_as<Floats>(below) / fast.largest / number;
      factor = (factor + 0x1p23f) - 0x1p23f;
      factor = factor < 1.0f ? all(1.0f) : factor;
      factor = factor > fast.max_second_float ? all(fast.max_second_float) : factor;
      lanes.second = __builtin_convertvector(factor, Ints);
      number = number * factor;
    }
    lanes.by = lanes.times = number;
  } else {
    lanes.by = lanes.times = all(1.0f);
  }
  return lanes;
}

inline Floats fp32_scales(Ints a, const Fast& fast) {
  Floats number = bits_as<Floats>(a) / fast.largest;
  if (fast.f.d2) number = number / fast.max_second_float;
  return number < kSmallestNormal ? all(kSmallestNormal) : number;
}

// A block of neighbours that is not extreme: `tell(at, count, x, units, lanes)` for each register of it.
template <Scales kScales, bool kIsInteger, bool kHasSecond, typename Tell>
inline void code_block(const float* x, int64_t count, int32_t largest_bits, const Fast& fast, Tell tell) {
  const Ints a = all(largest_bits);
  Ints power{};
  Floats number{};
  if (kScales == kPowers) power = all(scale_bits<int32_t, float>(largest_bits, fast));
  if (kScales == kNumbers) number = fp32_scales(a, fast);
  Lanes lanes = lanes_of<kScales, false>(power, number, Ints{}, fast);
  const int64_t k2 = fast.f.k2;
  Ints below{};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Floats values = load(x + at, count - at);
    if (kHasSecond) {
      if (k2 <= kLanes) {
        below = largest_of_neighbours(bits_as<Ints>(values) & kMagnitude, k2);
      } else if (at % k2 == 0) {
        below = Ints{};
        const int64_t end = std::min(count, at + k2);
        for (int64_t i = at; i < end; i += kLanes) below = larger(below, bits_as<Ints>(load(x + i, end - i)) & kMagnitude);
        below = largest_of_neighbours(below, kLanes);
      }
      lanes = lanes_of<kScales, true>(power, number, below, fast);
    }
    tell(at, std::min<int64_t>(kLanes, count - at), values, units<kScales, kIsInteger>(values, lanes.by, fast), lanes);
  }
}

inline int32_t largest_bits_of(const float* x, int64_t count) {
  Ints largest{};
  int64_t at = 0;
  for (; at + kLanes <= count; at += kLanes) largest = larger(largest, bits_as<Ints>(load(x + at)) & kMagnitude);
  if (at < count) largest = larger(largest, bits_as<Ints>(load(x + at, count - at)) & kMagnitude);
  return largest_lane(largest);
}

// Runs a job that is compiled for each kind of format.
template <typename Job>
void run_for_kind(const Format& f, const Job& job) {
  const bool is_integer = f.element_bits == f.fraction_bits + 2;
  if (!f.d1) return is_integer ? job.template run<kNone, true, false>() : job.template run<kNone, false, false>();
  if (has_fp32_scale(f)) {
    if (f.d2) return is_integer ? job.template run<kNumbers, true, true>() : job.template run<kNumbers, false, true>();
    return is_integer ? job.template run<kNumbers, true, false>() : job.template run<kNumbers, false, false>();
  }
  if (f.d2) return is_integer ? job.template run<kPowers, true, true>() : job.template run<kPowers, false, true>();
  return is_integer ? job.template run<kPowers, true, false>() : job.template run<kPowers, false, false>();
}

// Four registers of whole blocks, each of kVectors of them; second levels are of pairs. False: one of them is extreme.
template <Scales kScales, bool kIsInteger, bool kHasPairs, int kVectors>
inline bool quantise_group(const float* x, float* out, const Fast& fast) {
  constexpr int kBlocks = 4 / kVectors;
  Floats values[4];
  Ints below[4];
  for (int i = 0; i < 4; ++i) {
    values[i] = load(x + i * kLanes);
    below[i] = bits_as<Ints>(values[i]) & kMagnitude;
    if (kHasPairs) below[i] = larger(below[i], swapped<1>(below[i]));
  }
  Ints largest[kBlocks];
  for (int block = 0; block < kBlocks; ++block) {
    Ints a = below[block * kVectors];
    for (int i = 1; i < kVectors; ++i) a = larger(a, below[block * kVectors + i]);
    largest[block] = largest_of_neighbours(a, kLanes);
  }
  Ints most = largest[0], least = zero_last(largest[0]);
  for (int block = 1; block < kBlocks; ++block) {
    most = larger(most, largest[block]);
    least = smaller(least, zero_last(largest[block]));
  }
  if (__builtin_expect(most[0] > fast.high || least[0] < zero_last(fast.low), 0)) return false;
  for (int block = 0; block < kBlocks; ++block) {
    Ints power{};
    Floats number{};
    if (kScales == kPowers) power = scale_bits<Ints, Floats>(largest[block], fast);
    if (kScales == kNumbers) number = fp32_scales(largest[block], fast);
    Lanes lanes = lanes_of<kScales, false>(power, number, Ints{}, fast);
    for (int i = block * kVectors; i < (block + 1) * kVectors; ++i) {
      if (kHasPairs) lanes = lanes_of<kScales, true>(power, number, below[i], fast);
      const Floats in_units = units<kScales, kIsInteger>(values[i], lanes.by, fast);
      store(out + i * kLanes, signed_values<kScales>(values[i], in_units, lanes.times, fast), kLanes);
    }
  }
  return true;
}

// Blocks that lie one after the other, `count` numbers in all; of each row the last may be shorter.
template <Scales kScales, bool kIsInteger, bool kHasSecond>
inline bool quantise_block(const float* x, float* out, int64_t count, const Fast& fast) {
  const int32_t largest_bits = largest_bits_of(x, count);
  if (__builtin_expect(!fast.is_ordinary(largest_bits), 0)) {
    ValueSink sink{out, 1, fast.f};
    return code_slowly(x, 1, count, fast.f, sink);
  }
  code_block<kScales, kIsInteger, kHasSecond>(
      x, count, largest_bits, fast, [&](int64_t at, int64_t some, Floats values, Floats in_units, const Lanes& lanes) {
        store(out + at, signed_values<kScales>(values, in_units, lanes.times, fast), some);
      });
  return true;
}

template <Scales kScales, bool kIsInteger, bool kHasSecond>
void quantise_rows(const float* x, float* out, int64_t outer, int64_t n, const Fast& fast, int threads,
                   std::atomic<bool>& fits) {
  const int64_t length = fast.f.d1 ? fast.f.k1 : kChunk;
  const int64_t vectors = length % kLanes == 0 ? length / kLanes : 0;
  const bool in_groups = fast.is_possible && (vectors == 1 || vectors == 2 || vectors == 4) &&
                         (!kHasSecond || fast.f.k2 == 2);
  // A part is whole blocks of a row, about kChunk numbers.
  const int64_t part = length * std::max<int64_t>(1, kChunk / length);
  const int64_t num_parts = (n + part - 1) / part;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t index = 0; index < outer * num_parts; ++index) {
    const int64_t start = index / num_parts * n + index % num_parts * part;
    const int64_t count = std::min(part, n - index % num_parts * part);
    const float* from = x + start;
    float* to = out + start;
    bool all_fit = true;
    for (int64_t at = 0; at < count;) {
      if (in_groups && at + 4 * kLanes <= count) {
        bool is_done = false;
        if (vectors == 1) is_done = quantise_group<kScales, kIsInteger, kHasSecond, 1>(from + at, to + at, fast);
        if (vectors == 2) is_done = quantise_group<kScales, kIsInteger, kHasSecond, 2>(from + at, to + at, fast);
        if (vectors == 4) is_done = quantise_group<kScales, kIsInteger, kHasSecond, 4>(from + at, to + at, fast);
        if (is_done) {
          at += 4 * kLanes;
          continue;
        }
      }
      const int64_t some = std::min(length, count - at);
      all_fit &= quantise_block<kScales, kIsInteger, kHasSecond>(from + at, to + at, some, fast);
      at += some;
    }
    if (!all_fit) fits = false;
  }
}

constexpr int64_t kStrip = 8;         // registers of neighbouring columns that are worked on at a time
constexpr int64_t kKeptNumbers = 32;  // blocks of at most so many are copied, where rows may fall on each other in a cache

// A strip of kStrip registers of blocks, each of `count` numbers that lie `inner` apart.
template <Scales kScales, bool kIsInteger, bool kHasSecond>
bool quantise_strip(const float* x, float* out, int64_t count, int64_t inner, const Fast& fast) {
  const Format& f = fast.f;
  constexpr int64_t kWidth = kStrip * kLanes;
  alignas(64) float kept[kKeptNumbers * kWidth];
  const bool is_kept = count <= kKeptNumbers;
  const float* from = x;
  int64_t stride = inner;
  Ints a[kStrip] = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t v = 0; v < kStrip; ++v) {
      const Floats values = load(x + i * inner + v * kLanes);
      if (is_kept) store(kept + i * kWidth + v * kLanes, values, kLanes);
      a[v] = larger(a[v], bits_as<Ints>(values) & kMagnitude);
    }
  }
  if (is_kept) {
    from = kept;
    stride = kWidth;
  }
  Ints most = a[0], least = zero_last(a[0]);
  for (int64_t v = 1; v < kStrip; ++v) {
    most = larger(most, a[v]);
    least = smaller(least, zero_last(a[v]));
  }
  const bool is_extreme = largest_lane(most) > fast.high || -largest_lane(~least) - 1 < zero_last(fast.low);
  if (__builtin_expect(is_extreme || !fast.is_possible, 0)) {
    bool all_fit = true;
    for (int64_t column = 0; column < kWidth; ++column) {
      ValueSink sink{out + column, inner, f};
      all_fit &= code_slowly(x + column, inner, count, f, sink);
    }
    return all_fit;
  }
  Ints power[kStrip];
  Floats number[kStrip];
  Lanes lanes[kStrip];
  for (int64_t v = 0; v < kStrip; ++v) {
    if (kScales == kPowers) power[v] = scale_bits<Ints, Floats>(a[v], fast);
    if (kScales == kNumbers) number[v] = fp32_scales(a[v], fast);
    lanes[v] = lanes_of<kScales, false>(power[v], number[v], Ints{}, fast);
  }
  const int64_t step = kHasSecond ? f.k2 : count;
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t end = std::min(count, begin + step);
    if (kHasSecond) {
      for (int64_t v = 0; v < kStrip; ++v) {
        Ints below{};
        for (int64_t i = begin; i < end; ++i)
          below = larger(below, bits_as<Ints>(load(from + i * stride + v * kLanes)) & kMagnitude);
        lanes[v] = lanes_of<kScales, true>(power[v], number[v], below, fast);
      }
    }
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t v = 0; v < kStrip; ++v) {
        const Floats values = load(from + i * stride + v * kLanes);
        const Floats in_units = units<kScales, kIsInteger>(values, lanes[v].by, fast);
        store(out + i * inner + v * kLanes, signed_values<kScales>(values, in_units, lanes[v].times, fast), kLanes);
      }
    }
  }
  return true;
}

constexpr int64_t kStreamedBytes = 8 << 20;  // a larger result has left the L2 cache before anybody reads it
constexpr int64_t kHeldNumbers = 1 << 12;    // of a group of blocks, which is read twice
constexpr int64_t kMostWidth = 4096;         // columns of a group, of blocks of one number
constexpr int64_t kBurst = 16;               // registers of a row that are written before those of the next

// Writes a register past the caches, which spares reading the lines that are written over; `to` is aligned to it.
inline void stream(float* to, Floats value) {
#if defined(__AVX512F__)
  _mm512_stream_ps(to, (__m512)value);
#elif defined(__AVX2__)
  _mm256_stream_ps(to, (__m256)value);
#else
  store(to, value, kLanes);
#endif
}

// Says of streamed stores that they come before what this thread stores next.
inline void end_stream() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// `width` blocks side by side, each of `count` numbers that lie `inner` apart: read twice, for the largest number of each
// column and to be rounded. A result that is streamed is written in pieces of a row: lines of two rows by turns, 16 KiB
// apart, took memory longer than a plain store.
template <Scales kScales, bool kIsInteger, bool kHasSecond>
bool quantise_in_rows(const float* x, float* out, int64_t count, int64_t inner, int64_t width, bool streams,
                    const Fast& fast) {
  const Format& f = fast.f;
  const int64_t vectors = width / kLanes;
  Ints scale[kMostWidth / kLanes];  // at first the largest magnitudes
  std::fill(scale, scale + vectors, Ints{});
  for (int64_t i = 0; i < count; ++i)
    for (int64_t v = 0; v < vectors; ++v)
      scale[v] = larger(scale[v], bits_as<Ints>(load(x + i * inner + v * kLanes)) & kMagnitude);
  Ints most = scale[0], least = zero_last(scale[0]);
  for (int64_t v = 1; v < vectors; ++v) {
    most = larger(most, scale[v]);
    least = smaller(least, zero_last(scale[v]));
  }
  const bool is_extreme = largest_lane(most) > fast.high || -largest_lane(~least) - 1 < zero_last(fast.low);
  if (__builtin_expect(is_extreme || !fast.is_possible, 0)) {
    bool all_fit = true;
    if (vectors > 1 && fast.is_possible) {  // a single extreme block makes few others slow
      const int64_t half = vectors / 2 * kLanes;
      all_fit &= quantise_in_rows<kScales, kIsInteger, kHasSecond>(x, out, count, inner, half, streams, fast);
      all_fit &= quantise_in_rows<kScales, kIsInteger, kHasSecond>(x + half, out + half, count, inner, width - half,
                                                                streams, fast);
      return all_fit;
    }
    for (int64_t column = 0; column < width; ++column) {
      ValueSink sink{out + column, inner, f};
      all_fit &= code_slowly(x + column, inner, count, f, sink);
    }
    return all_fit;
  }
  for (int64_t v = 0; v < vectors; ++v) {
    if (kScales == kPowers) scale[v] = scale_bits<Ints, Floats>(scale[v], fast);
    if (kScales == kNumbers) scale[v] = bits_as<Ints>(fp32_scales(scale[v], fast));
  }
  const int64_t step = kHasSecond ? f.k2 : 4;  // rows whose scales are worked out once
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t end = std::min(count, begin + step);
    for (int64_t at = 0; at < vectors; at += kBurst) {
      const int64_t some = std::min(kBurst, vectors - at);
      Lanes lanes[kBurst];
      for (int64_t v = 0; v < some; ++v) {
        Ints below{};
        if (kHasSecond) {
          const float* from = x + (at + v) * kLanes;
          for (int64_t i = begin; i < end; ++i)
            below = larger(below, bits_as<Ints>(load(from + i * inner)) & kMagnitude);
        }
        lanes[v] = lanes_of<kScales, kHasSecond>(scale[at + v], bits_as<Floats>(scale[at + v]), below, fast);
      }
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t v = 0; v < some; ++v) {
          const int64_t place = i * inner + (at + v) * kLanes;
          const Floats values = load(x + place);
          const Floats in_units = units<kScales, kIsInteger>(values, lanes[v].by, fast);
          const Floats found = signed_values<kScales>(values, in_units, lanes[v].times, fast);
          if (streams) stream(out + place, found);
          else store(out + place, found, kLanes);
        }
      }
    }
  }
  return true;
}

template <Scales kScales, bool kIsInteger, bool kHasSecond>
void quantise_columns(const float* x, float* out, int64_t outer, int64_t n, int64_t inner, const Fast& fast,
                      int threads, std::atomic<bool>& fits) {
  constexpr int64_t kWidth = kStrip * kLanes;
  const int64_t length = fast.f.k1;
  const int64_t num_blocks = (n + length - 1) / length;
  const bool is_aligned = inner % kLanes == 0 && reinterpret_cast<uintptr_t>(out) % sizeof(Floats) == 0;
  const bool streams = is_aligned && 4 * outer * n * inner >= kStreamedBytes;
  const int64_t held = std::min(kMostWidth, std::max(kHeldNumbers / length, kWidth) / kLanes * kLanes);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t index = 0; index < outer * num_blocks; ++index) {
    const int64_t first = index % num_blocks * length;
    const int64_t count = std::min(length, n - first);
    const int64_t start = (index / num_blocks * n + first) * inner;
    bool all_fit = true;
    int64_t column = 0;
    while (inner - column >= kLanes) {
      const int64_t at = start + column;
      const int64_t left = (inner - column) / kLanes * kLanes;
      const int64_t width = streams ? std::min(held, left) : std::min(kWidth, left);
      if (streams || width < kWidth) {
        all_fit &= quantise_in_rows<kScales, kIsInteger, kHasSecond>(x + at, out + at, count, inner, width, streams, fast);
      } else {
        all_fit &= quantise_strip<kScales, kIsInteger, kHasSecond>(x + at, out + at, count, inner, fast);
      }
      column += width;
    }
    if (column < inner) {  // the last columns are copied to a register's width that is filled up with zeros
      const int64_t some = inner - column;
      std::vector<float> last(count * kLanes, 0.0f);
      for (int64_t i = 0; i < count; ++i) std::memcpy(&last[i * kLanes], x + start + i * inner + column, 4 * some);
      all_fit &= quantise_in_rows<kScales, kIsInteger, kHasSecond>(last.data(), last.data(), count, kLanes, kLanes,
                                                                   false, fast);
      for (int64_t i = 0; i < count; ++i) std::memcpy(out + start + i * inner + column, &last[i * kLanes], 4 * some);
    }
    if (!all_fit) fits = false;
    if (streams) end_stream();
  }
}

// ---- bits --------------------------------------------------------------------------------------------------------------

// Writes fields one after the other, the lowest bit of each first, and whole bytes at the end.
struct BitWriter {
  uint8_t* to;
  uint64_t kept = 0;
  int64_t num_kept = 0;
  void put(uint64_t field, int64_t width) {
    kept |= field << num_kept;
    num_kept += width;
    if (num_kept < 32) return;
    std::memcpy(to, &kept, 4);  // processors that run this keep the lowest byte first
    to += 4;
    kept >>= 32;
    num_kept -= 32;
  }
  void finish() {
    for (; num_kept > 0; num_kept -= 8, kept >>= 8) *to++ = uint8_t(kept);
  }
};

struct BitReader {
  const uint8_t* from;
  const uint8_t* end;
  uint64_t kept = 0;
  int64_t num_kept = 0;
  uint64_t take(int64_t width) {
    if (num_kept < width) {
      uint32_t more = 0;
      std::memcpy(&more, from, std::min<int64_t>(4, end - from));
      from += 4;
      kept |= uint64_t(more) << num_kept;
      num_kept += 32;
    }
    const uint64_t field = kept & ((uint64_t(1) << width) - 1);
    kept >>= width;
    num_kept -= width;
    return field;
  }
};

inline uint64_t nan_code(const Format& f) { return has_fp32_scale(f) ? kNanBits : (uint64_t(1) << f.d1) - 1; }

inline uint64_t signed_code(int64_t code, bool is_negative, const Format& f) {
  const uint64_t sign = uint64_t(1) << (f.element_bits - 1);
  if (f.is_twos_complement) return uint64_t(is_negative ? -code : code) & (2 * sign - 1);
  return uint64_t(code) | (is_negative ? sign : 0);
}

struct BitSink {
  BitWriter& bits;
  const Format& f;
  void begin(const Scale& scale, bool is_nan) {
    if (!f.d1) return;
    uint64_t code = nan_code(f);
    if (!is_nan) {
      code = has_fp32_scale(f) ? bits_as<uint32_t>(scale.number) : uint64_t(scale.exponent + max_scale_exponent(f));
    }
    bits.put(code, f.d1);
  }
  void second(int64_t code) { bits.put(uint64_t(code), f.d2); }
  void number(int64_t, int64_t code, bool is_negative, const Unit&, bool is_nan) {
    if (is_nan && !f.d1) {
      bits.put((uint64_t(1) << (f.element_bits - 1)) - 1, f.element_bits);
    } else {
      bits.put(signed_code(code, is_negative, f), f.element_bits);
    }
  }
};

// Codes of magnitudes that lie on the element's grid.
inline Ints codes_of(Floats in_units, const Fast& fast) {
  const Format& f = fast.f;
  const Ints normal = (bits_as<Ints>(in_units) >> int(23 - f.fraction_bits)) -
                      (int32_t(f.min_exponent + 126) << f.fraction_bits);
  if (f.min_exponent == -126) return normal;
  const float steps = bits_as<float>(int32_t(127 + f.fraction_bits - f.min_exponent) << 23);
  const float smallest_normal = bits_as<float>(fast.min_exponent_bits);
  const Floats below = in_units < smallest_normal ? in_units * steps : Floats{};
  return in_units < smallest_normal ? __builtin_convertvector(below, Ints) : normal;
}

template <Scales kScales, bool kIsInteger, bool kHasSecond>
bool pack_row(const float* x, uint8_t* out, int64_t n, const Fast& fast) {
  const Format& f = fast.f;
  BitWriter bits{out};
  bool all_fit = true;
  const int64_t length = f.d1 ? f.k1 : kChunk;
  for (int64_t start = 0; start < n; start += length) {
    const float* from = x + start;
    const int64_t count = std::min(length, n - start);
    const int32_t largest_bits = largest_bits_of(from, count);
    const bool lanes_hold_seconds = !kHasSecond || f.k2 <= kLanes;
    if (!fast.is_ordinary(largest_bits) || largest_bits == 0 || !lanes_hold_seconds) {
      BitSink sink{bits, f};
      all_fit &= code_slowly(from, 1, count, f, sink);
      continue;
    }
    BitSink sink{bits, f};
    sink.begin(scale_of(bits_as<float>(largest_bits), f), false);
    // Second-level codes stand before the numbers: they are worked out first.
    if (kHasSecond) {
      code_block<kScales, kIsInteger, true>(
          from, count, largest_bits, fast, [&](int64_t, int64_t some, Floats, Floats, const Lanes& lanes) {
            const int shift = kScales == kPowers ? 23 : 0;
            for (int64_t i = 0; i < some; i += f.k2) bits.put(uint64_t(lanes.second[i] >> shift), f.d2);
          });
    }
    code_block<kScales, kIsInteger, kHasSecond>(
        from, count, largest_bits, fast, [&](int64_t, int64_t some, Floats values, Floats in_units, const Lanes&) {
          const Ints codes = codes_of(in_units, fast);
          for (int64_t i = 0; i < some; ++i)
            bits.put(signed_code(codes[i], bits_as<Ints>(values)[i] < 0, f), f.element_bits);
        });
  }
  bits.finish();
  return all_fit;
}

struct PackJob {
  const float* x;
  uint8_t* out;
  int64_t outer, n, row_bytes;
  const Fast& fast;
  int threads;
  std::atomic<bool>& fits;

  template <Scales kScales, bool kIsInteger, bool kHasSecond>
  void run() const {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < outer; ++row) {
      if (!pack_row<kScales, kIsInteger, kHasSecond>(x + row * n, out + row * row_bytes, n, fast)) fits = false;
    }
  }
};

// A power of two as FP32; from 2^-149 on.
inline float power_of_two(int exponent) {
  return bits_as<float>(exponent >= -126 ? uint32_t(exponent + 127) << 23 : uint32_t(1) << (exponent + 149));
}

// Blocks that begin at whole bytes: powers of two in a byte, then nothing or a bit for each pair, then codes of up to
// 8 bits. Eight codes are as many bytes as a code has bits; they are read at once, and looked up as FP32.
struct ByteBlocks {
  bool serves = false;
  bool has_pairs = false;
  int64_t header_bytes = 0, block_bytes = 0;
  float values[256];  // of codes with their signs, in units of the scale

  ByteBlocks(const Format& f, const std::vector<double>& magnitudes) {
    has_pairs = f.d2 == 1 && f.k2 == 2;
    if (f.d1 != 8 || f.element_bits < 3 || f.element_bits > 8 || f.k1 % (has_pairs ? 16 : 8)) return;
    if (f.d2 && !has_pairs) return;
    const uint64_t sign = uint64_t(1) << (f.element_bits - 1);
    for (uint64_t code = 0; code < 2 * sign; ++code) {
      const bool is_negative = code & sign;
      uint64_t magnitude = code & (sign - 1);
      if (f.is_twos_complement && is_negative) magnitude = sign - magnitude;
      const double in_units = magnitudes[magnitude];
      values[code] = float(is_negative ? -in_units : in_units);
      if (double(values[code]) != (is_negative ? -in_units : in_units)) return;  // it would be rounded twice
    }
    header_bytes = 1 + (has_pairs ? f.k1 / 16 : 0);
    block_bytes = header_bytes + f.k1 * f.element_bits / 8;
    serves = true;
  }

  // The numbers of a row that lie so: whole blocks, and a shorter last one of eights that has no pairs in front.
  int64_t served(int64_t n, const Format& f) const {
    if (!serves) return 0;
    const int64_t rest = n % f.k1;
    return has_pairs || rest % 8 ? n - rest : n;
  }

  // The bytes of so many served numbers.
  int64_t bytes_of(int64_t n, const Format& f) const {
    return serves ? (n + f.k1 - 1) / f.k1 * header_bytes + n * f.element_bits / 8 : 0;
  }

  template <int kBits, bool kHasPairs>
  void unpack(const uint8_t* block, float* out, int64_t n, const Format& f) const {
    const float positive_zero = f.is_twos_complement ? 0.0f : -0.0f;  // -0 + 0 = 0, and -0 + -0 = -0
    for (int64_t begin = 0; begin < n; begin += f.k1, block += block_bytes, out += f.k1) {
      const int64_t length = std::min(f.k1, n - begin);
      if (block[0] == 255) {
        std::fill(out, out + length, bits_as<float>(uint32_t(kNanBits)));
        continue;
      }
      const int exponent = int(block[0]) - 127;
      const float powers[2] = {power_of_two(exponent), power_of_two(exponent - 1)};
      const uint8_t* codes = block + header_bytes;
      for (int64_t start = 0; start < length; start += 8, codes += kBits) {
        uint64_t word = 0;
        std::memcpy(&word, codes, kBits);
        const int lower = kHasPairs ? block[1 + start / 16] >> (start % 16 ? 4 : 0) : 0;
        for (int i = 0; i < 8; ++i) {
          const float power = powers[kHasPairs ? (lower >> (i / 2)) & 1 : 0];
          const float value = values[(word >> (i * kBits)) & ((1 << kBits) - 1)] * power;
          out[start + i] = std::max(std::min(value, kLargestFloat), -kLargestFloat) + positive_zero;
        }
      }
    }
  }

  template <int kBits>
  void unpack_of(const uint8_t* from, float* out, int64_t n, const Format& f) const {
    if (has_pairs) unpack<kBits, true>(from, out, n, f);
    else unpack<kBits, false>(from, out, n, f);
  }

  void operator()(const uint8_t* from, float* out, int64_t n, const Format& f) const {
    switch (f.element_bits) {
      case 3: return unpack_of<3>(from, out, n, f);
      case 4: return unpack_of<4>(from, out, n, f);
      case 5: return unpack_of<5>(from, out, n, f);
      case 6: return unpack_of<6>(from, out, n, f);
      case 7: return unpack_of<7>(from, out, n, f);
      case 8: return unpack_of<8>(from, out, n, f);
    }
  }
};

void unpack_row(const uint8_t* from, const uint8_t* end, float* out, int64_t n, const Format& f,
                const std::vector<double>& magnitudes) {
  BitReader bits{from, end};
  const uint64_t sign = uint64_t(1) << (f.element_bits - 1);
  std::vector<int64_t> seconds;
  const int64_t length = f.d1 ? f.k1 : n;
  for (int64_t start = 0; start < n; start += length) {
    const int64_t count = std::min(length, n - start);
    Scale scale;
    bool is_nan = false;
    if (f.d1) {
      const uint64_t code = bits.take(f.d1);
      is_nan = code == nan_code(f);
      if (has_fp32_scale(f)) scale.number = bits_as<float>(uint32_t(code));
      else scale.exponent = int64_t(code) - max_scale_exponent(f);
    }
    const int64_t width = f.d2 ? f.k2 : count;
    seconds.assign((count + width - 1) / width, 0);
    if (f.d2) for (auto& second : seconds) second = int64_t(bits.take(f.d2));
    for (int64_t i = 0; i < count;) {
      const Unit unit = unit_of(scale, seconds[i / width], f);
      const double power = bits_as<double>(uint64_t(1023 + unit.exponent) << 52);
      for (const int64_t last = std::min(count, i + width); i < last; ++i) {
        const uint64_t code = bits.take(f.element_bits);
        const bool is_negative = code & sign;
        uint64_t magnitude = code & (sign - 1);
        if (f.is_twos_complement && is_negative) magnitude = sign - magnitude;
        const bool gone = is_nan || (!f.d1 && magnitude == sign - 1);
        const double in_units = magnitudes[magnitude];
        float value;
        if (has_fp32_scale(f)) value = std::min(float(in_units) * unit.number, kLargestFloat);
        else value = float(std::min(in_units * power, double(kLargestFloat)));
        value = is_negative ? -value : value;
        if (f.is_twos_complement) value += 0.0f;
        out[start + i] = gone ? bits_as<float>(uint32_t(kNanBits)) : value;
      }
    }
  }
}

struct QuantiseJob {
  const float* x;
  float* out;
  int64_t outer, n, inner;
  const Fast& fast;
  int threads;
  std::atomic<bool>& fits;

  template <Scales kScales, bool kIsInteger, bool kHasSecond>
  void run() const {
    if (inner == 1) {
      quantise_rows<kScales, kIsInteger, kHasSecond>(x, out, outer, n, fast, threads, fits);
    } else {
      quantise_columns<kScales, kIsInteger, kHasSecond>(x, out, outer, n, inner, fast, threads, fits);
    }
  }
};

}  // namespace

extern "C" {

// The lanes of a register: 16 with AVX-512, 8 with AVX2, else 4.
int64_t ziggurat_block_lanes() { return kLanes; }

// x, out: (outer, n, inner), blocks along n. 1: a number cannot be held, and out is not to be read; else 0.
int64_t ziggurat_quantise(const float* x, float* out, int64_t outer, int64_t n, int64_t inner, const Format* format,
                          int64_t num_threads) {
  std::atomic<bool> fits{true};
  const Fast fast(*format);
  const int threads = outer * n * inner < (1 << 16) ? 1 : int(num_threads);
  run_for_kind(*format, QuantiseJob{x, out, outer, n, inner, fast, threads, fits});
  return fits ? 0 : 1;
}

// x: (outer, n), blocks along n; out: outer rows of row_bytes. 1: a number cannot be held; else 0.
int64_t ziggurat_pack(const float* x, uint8_t* out, int64_t outer, int64_t n, int64_t row_bytes, const Format* format,
                      int64_t num_threads) {
  std::atomic<bool> fits{true};
  const Fast fast(*format);
  const int threads = outer * n < (1 << 14) ? 1 : int(num_threads);
  run_for_kind(*format, PackJob{x, out, outer, n, row_bytes, fast, threads, fits});
  return fits ? 0 : 1;
}

void ziggurat_unpack(const uint8_t* rows, float* out, int64_t outer, int64_t n, int64_t row_bytes,
                     const Format* format, int64_t num_threads) {
  const Format& f = *format;
  std::vector<double> magnitudes(int64_t(1) << (f.element_bits - 1));
  for (size_t code = 0; code < magnitudes.size(); ++code) magnitudes[code] = magnitude_of(int64_t(code), f);
  magnitudes.push_back(magnitude_of(int64_t(magnitudes.size()), f));  // two's complement has one more below zero
  const ByteBlocks byte_blocks(f, magnitudes);
  const int threads = outer * n < (1 << 14) ? 1 : int(num_threads);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < outer; ++row) {
    const uint8_t* from = rows + row * row_bytes;
    const uint8_t* end = from + row_bytes;
    float* to = out + row * n;
    const int64_t count = byte_blocks.served(n, f);
    byte_blocks(from, to, count, f);
    unpack_row(from + byte_blocks.bytes_of(count, f), end, to + count, n - count, f, magnitudes);
  }
}

}  // extern "C"
