// Pooled lookups and exact updates of rows that are kept in few bits. Twin of ziggurat/ops/row_formats/, which
// defines every bit of it; the rule is that of rules.h, sorting and walking are those of lookup.cpp.
//
//     lookup   codes or halves of a row ──► eight floats at a time ──► the sum, in registers
//     update   gradients of a row ──► their sum, in registers; row ──► floats in the L1 cache ──► the rule ──► rounded ──► row
//
// A row is decoded where it is added, so a lookup reads the bytes of the format and writes nothing but the sum; an update
// reads and writes a row once, and no sum leaves the cache. Each row belongs to one thread, and its noise is counted:
// threads do not change a bit.

#include "packed_rows.h"
#include "walk.h"

namespace {

template <int D, int64_t kFormat>
int64_t lookup_packed(const uint8_t* rows, const Part& part, int64_t dim, void* out, bool is_bfloat16, int num_threads) {
  const Packed<D, kFormat> packed{rows, dim};
  if (is_bfloat16) return lookup<D>(packed, part, dim, static_cast<uint16_t*>(out), num_threads);
  return lookup<D>(packed, part, dim, static_cast<float*>(out), num_threads);
}

}  // namespace

#define FOR_FORMAT(call, D)               \
  switch (format) {                       \
    case kBfloat16: return call(D, kBfloat16); \
    case kSplit: return call(D, kSplit);  \
    case kInt8: return call(D, kInt8);    \
    default: return call(D, kInt4);       \
  }

extern "C" {

// What Python passes of a storage: rows, what lies beside them, and how they are rounded.
struct Storage {
  uint8_t* rows;
  uint16_t* lower;
  int64_t format;
  float *state_first, *state_second;
  int64_t dim;
  const Origins* origins;
};

// The fields of a part, pooled into out; rows are R rows in a format.
int64_t ziggurat_lookup_rows(const uint8_t* rows, int64_t format, const Part* part, int64_t dim, void* out,
                             int64_t out_is_bfloat16, int64_t num_threads) {
  if (format == kSplit) format = kBfloat16;  // lookups read upper halves
#define LOOKUP_ROWS(D, F) \
  lookup_packed<D, F == kSplit ? kBfloat16 : F>(rows, *part, dim, out, out_is_bfloat16 != 0, int(num_threads))
#define LOOKUP_DIM(D) [&]() -> int64_t { FOR_FORMAT(LOOKUP_ROWS, D) }()
  FOR_DIM(dim, LOOKUP_DIM)
}

#define ROWS_OF(D, F) \
  PackedRows<D, F> { storage->rows, storage->lower, state, dim, *rule, storage->origins }

// Sum and apply; see ziggurat_update, whose workspace it takes.
int64_t ziggurat_update_rows(void* workspace, const Part* parts, int64_t num_parts, const Storage* storage,
                             const Rule* rule, int64_t num_threads) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const int64_t status = plan_tasks(work, parts, num_parts, int(num_threads));
  if (status != kOk) return status;
  const State state{storage->state_first, storage->state_second};
  const int64_t dim = storage->dim, format = storage->format;
#define UPDATE_ROWS(D, F) update<D>(work, ROWS_OF(D, F), dim, int(num_threads))
#define UPDATE_DIM(D) [&]() -> int64_t { FOR_FORMAT(UPDATE_ROWS, D) }()
  FOR_DIM(dim, UPDATE_DIM)
}

// The rule for (U,) distinct rows with their summed gradients.
void ziggurat_apply_rows(const Storage* storage, const int64_t* places, const float* sums, int64_t num_unique,
                         const Rule* rule, int64_t num_threads) {
  const State state{storage->state_first, storage->state_second};
  const int64_t dim = storage->dim, format = storage->format;
#define APPLY_ROWS(D, F) apply_sums<D>(ROWS_OF(D, F), dim, places, sums, num_unique, int(num_threads))
#define APPLY_DIM(D) [&]() { FOR_FORMAT(APPLY_ROWS, D) }()
  FOR_DIM(dim, APPLY_DIM)
}

}  // extern "C"
