// Compares roundings of FP32 to BF16 with the definition, number by number. Used by test_bf16_sweep.py.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#include "../../ziggurat/ops/csrc/bfloat16.h"

namespace {

double value_of(uint32_t bits) {  // of what is not negative; the code of infinity stands for 2^128
  if (bits == 0x7f800000u) return std::ldexp(1.0, 128);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// The nearest of the two neighbours in BF16, of equally near ones that whose last bit is 0; or the one below.
uint32_t rounded(uint32_t bits, bool truncates) {
  const uint32_t sign = bits & 0x80000000u, magnitude = bits & 0x7fffffffu;
  const uint32_t below = magnitude & 0xffff0000u;
  if (truncates || magnitude == below) return sign | below;
  const uint32_t above = below + 0x10000u;
  const double to_below = value_of(magnitude) - value_of(below), to_above = value_of(above) - value_of(magnitude);
  const bool is_above = to_above < to_below || (to_above == to_below && (below & 0x10000u));
  return sign | (is_above ? above : below);
}

}  // namespace

extern "C" {

void sweep_fill(uint64_t begin, int64_t count, uint32_t* out, uint32_t* nearest, uint32_t* below) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = uint32_t(begin + i);
    nearest[i] = rounded(out[i], false);
    below[i] = rounded(out[i], true);
  }
}

// How many numbers differ; a NaN has to be a NaN.
int64_t sweep_differing(const uint32_t* given, const uint32_t* wanted, const uint32_t* found, int64_t count) {
  int64_t differing = 0;
  for (int64_t i = 0; i < count; ++i) differing += is_nan(given[i]) ? !is_nan(found[i]) : found[i] != wanted[i];
  return differing;
}

// The same of the vectors of the lookup kernels, and of their scalars.
int64_t sweep_header_differing(const uint32_t* given, const uint32_t* wanted, int64_t count) {
  std::vector<uint16_t> found(count);
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes lanes;
    std::memcpy(&lanes, given + i, sizeof(lanes));
    store_bfloat16(found.data() + i, lanes);
  }
  int64_t differing = 0;
  for (int64_t i = 0; i < count; ++i) {
    float scalar;
    std::memcpy(&scalar, given + i, 4);
    const uint32_t bits = uint32_t(found[i]) << 16;
    differing += to_bfloat16(scalar) != found[i] || (is_nan(given[i]) ? !is_nan(bits) : bits != wanted[i]);
  }
  return differing;
}
}
