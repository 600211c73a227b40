// Attention over jagged sequences, forward and backward. See ziggurat/ops/attention/cpp.py for the idea.
//
// A task is a head of a sequence (forward: or a piece of its rows). One thread computes a whole task, and each sum of a
// task runs in the order of the columns, so results depend neither on the threads nor on the other sequences.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_task.h"

using namespace ziggurat_attention;

namespace {

// Results of the queries [first, last) of a task.
template <typename M, typename Source>
struct Forward {
    typedef typename M::Wide W;
    typedef typename W::V V;
    const Task<M, Source>& task;
    const Problem& problem = task.problem;
    int64_t steps = (problem.dim + M::pair - 1) / M::pair, padded = round_up(problem.value_dim, 16);
    Units<M>&keys = kept<typename M::Unit, 0>(), &values = kept<typename M::Unit, 1>();
    Numbers<M>& queries = kept<typename M::In, 10>();
    std::vector<float>& sums = kept<float, 20>();
    float top[kBand], total[kBand];  // softmax: largest score so far, and the sum of e^(score − top)

    void run(int64_t first, int64_t last) {
        pack_lanes<M>(task.k, keys);
        pack_pairs<M>(task.v, values);
        pack_rows<M>(task.q, queries);
        for (int64_t r = first; r < last; r += kBand) band(r, std::min(r + kBand, last));
    }

    void band(int64_t first, int64_t last) {
        begin(first, last);
        alignas(64) float scores[kRows * kBlock];
        alignas(64) typename M::In weights[kRows * kBlock];
        for (int64_t block = 0; block < task.history; block += kBlock)
            for (int64_t r = first; r < last; r += kRows) {
                const int64_t rows = std::min<int64_t>(kRows, last - r);
                int64_t from, to;
                if (!task.columns(r, r + rows, block, &from, &to)) continue;
                multiply<M>(queries.data() + r * steps * M::pair, steps * M::pair,
                            keys.data() + block * steps + from, kBlock, scores + from, kBlock, rows, steps, to - from,
                            false);
                for (int64_t i = 0; i < rows; ++i) {
                    weigh(scores + i * kBlock, r + i, r + i - first, block, from, to);
                    narrow_row<M>(scores + i * kBlock, weights + i * kBlock, from, to);
                }
                multiply<M>(weights + from, kBlock, values.data() + (block + from) / M::pair * padded, padded,
                            sums.data() + (r - first) * padded, padded, rows, (to - from) / M::pair, padded, true);
            }
        for (int64_t r = first; r < last; ++r) finish(r, r - first);
    }

    // Zeros, or what targets get from themselves.
    void begin(int64_t first, int64_t last) {
        sums.assign(kBand * padded, 0);
        for (int64_t r = first; r < last; ++r) {
            top[r - first] = -std::numeric_limits<float>::infinity(), total[r - first] = 0;
            if (!task.is_target(r)) continue;
            int32_t bucket;
            const float score = task.own_score(r, &bucket);
            float weight = 1;
            if (problem.softmax) top[r - first] = score, total[r - first] = 1;
            else weight = score * problem.inverse * one_gate(problem, score);
            const Source* own = task.v[task.own(r)];
            for (int64_t c = 0; c < problem.value_dim; ++c) sums[(r - first) * padded + c] = weight * to_float(own[c]);
        }
    }

    // Scores of a query become weights.
    void weigh(float* s, int64_t r, int64_t row, int64_t block, int64_t from, int64_t to) {
        int32_t buckets[kBlock];
        task.add_biases(s, r, block, from, to, buckets);
        const bool all = task.sees_all(r, block + from, block + to);
        if (problem.softmax) return weigh_softmax(s, r, row, block, from, to);
        const float factor = task.factor();
        for (int64_t c = from; c < to; c += M::lanes) {
            const V x = *(V*)(s + c) * factor;
            const V weight = x * problem.inverse * gate_in<M>(problem, x);
            *(V*)(s + c) = all ? weight : task.seen(weight, r, block + c);
        }
    }

    void weigh_softmax(float* s, int64_t r, int64_t row, int64_t block, int64_t from, int64_t to) {
        const float factor = task.factor(), none = -std::numeric_limits<float>::infinity();
        V largest_each = V{} + none;
        for (int64_t c = from; c < to; c += M::lanes) {
            const V score = *(V*)(s + c) * factor, visible = task.is_seen(r, block + c) ? score : V{} + none;
            *(V*)(s + c) = visible;
            largest_each = visible > largest_each ? visible : largest_each;
        }
        float largest = top[row];
        for (int64_t l = 0; l < M::lanes; ++l) largest = std::max(largest, largest_each[l]);
        if (largest > top[row]) {
            const float shrink = total[row] ? one_exponential(top[row] - largest) : 0;
            total[row] *= shrink, top[row] = largest;
            float* sum = sums.data() + row * padded;
            for (int64_t c = 0; c < padded; ++c) sum[c] *= shrink;
        }
        V found{};
        for (int64_t c = from; c < to; c += M::lanes) {
            const V weight = task.seen(weight_of<M>(*(V*)(s + c) - top[row]), r, block + c);
            *(V*)(s + c) = weight, found += weight;
        }
        for (int64_t l = 0; l < M::lanes; ++l) total[row] += found[l];
    }

    void finish(int64_t r, int64_t row) {
        const float factor = problem.softmax && total[row] ? 1 / total[row] : 1;  // nothing seen here: zeros, and ln 0
        Source* to = task.plain_row(static_cast<Source*>(problem.result), task.first_query + r, problem.value_dim);
        for (int64_t c = 0; c < problem.value_dim; ++c) put(to + c, sums[row * padded + c] * factor);
        if (problem.softmax) *task.plain_row(problem.lse_result, task.first_query + r, 1) = top[row] + std::log(total[row]);
    }
};

// Gradients of a task: for each block of columns, all bands of rows that see it.
template <typename M, typename Source>
struct Backward {
    typedef typename M::Wide W;
    typedef typename W::V V;
    const Task<M, Source>& task;
    float* dw;
    const Problem& problem = task.problem;
    const int64_t dim = problem.dim, value_dim = problem.value_dim;
    int64_t steps = (dim + M::pair - 1) / M::pair, value_steps = (value_dim + M::pair - 1) / M::pair;
    int64_t padded = round_up(dim, 16), band_rows = round_up(task.asked, kBand);
    Rows<Source> grad{task.plain_row(static_cast<const Source*>(problem.grad), task.first_query, value_dim),
                      problem.heads * value_dim, task.asked, value_dim};
    Units<M>&keys_lanes = kept<typename M::Unit, 0>(), &keys_pairs = kept<typename M::Unit, 1>();
    Units<M>& values_lanes = kept<typename M::Unit, 2>();
    Numbers<M>&queries = kept<typename M::In, 10>(), &queries_columns = kept<typename M::In, 11>();
    Numbers<M>&grads = kept<typename M::In, 12>(), &grads_columns = kept<typename M::In, 13>();
    std::vector<float>& dq = kept<float, 20>();
    std::vector<float> time_sums = std::vector<float>(4 * problem.buckets);  // four a bucket, each of every fourth column
    std::vector<float> dk, dv, delta, own_weight, own_gradient;
    alignas(64) float scores[kBand * kBlock], gradients[kBand * kBlock];
    alignas(64) typename M::In narrow[kBand * kBlock];
    alignas(64) typename M::Unit joined[2][kBand / M::pair * kBlock];

    void run() {
        pack_lanes<M>(task.k, keys_lanes), pack_pairs<M>(task.k, keys_pairs), pack_lanes<M>(task.v, values_lanes);
        pack_rows<M>(task.q, queries), pack_columns<M>(task.q, queries_columns);
        pack_rows<M>(grad, grads), pack_columns<M>(grad, grads_columns);
        dq.assign(task.asked * padded, 0), delta.assign(task.asked, 0);
        own_weight.assign(task.asked, 0), own_gradient.assign(task.asked, 0);
        if (problem.softmax) subtract();
        for (int64_t r = 0; r < task.asked; ++r)
            if (task.is_target(r)) own(r);
        for (int64_t block = 0; block < task.history; block += kBlock) columns(block);
        write_targets();
        for (int64_t b = 0; b < problem.buckets; ++b) {
            const float* of = time_sums.data() + 4 * b;
            time_gradient()[b] += (of[0] + of[1]) + (of[2] + of[3]);
        }
        for (int64_t r = 0; r < task.asked; ++r) {
            Source* to = task.plain_row(static_cast<Source*>(problem.dq), task.first_query + r, dim);
            for (int64_t c = 0; c < dim; ++c) put(to + c, dq[r * padded + c] * problem.scale);
        }
    }

    // Softmax: Σ_j weight_j · (gradient of weight_j) of each query = ⟨gradient, result⟩.
    void subtract() {
        for (int64_t r = 0; r < task.asked; ++r) {
            const Source* out = task.plain_row(static_cast<const Source*>(problem.out), task.first_query + r, value_dim);
            for (int64_t c = 0; c < value_dim; ++c) delta[r] += to_float(grad[r][c]) * to_float(out[c]);
        }
    }

    // A target and itself.
    void own(int64_t r) {
        int32_t bucket = 0;
        const float score = task.own_score(r, &bucket);
        float weight, slope = 0;
        const Source *value = task.v[task.own(r)], *key = task.k[task.own(r)];
        for (int64_t c = 0; c < value_dim; ++c) slope += to_float(grad[r][c]) * to_float(value[c]);
        if (problem.softmax) {
            weight = one_exponential(score - lse(r));
            slope = weight * (slope - delta[r]);
        } else {
            const float gate = one_gate(problem, score);
            weight = score * gate * problem.inverse;
            slope *= gate * (1 + score * (1 - gate)) * problem.inverse;
        }
        own_weight[r] = weight, own_gradient[r] = slope;
        for (int64_t c = 0; c < dim; ++c) dq[r * padded + c] = slope * to_float(key[c]);
        if (problem.w_pos) dw[(problem.positions - 1) / 2] += slope;
        if (problem.w_time) time_gradient()[bucket] += slope;
    }

    float lse(int64_t r) const { return *task.plain_row(problem.lse, task.first_query + r, 1); }
    float* time_gradient() const { return dw + (problem.positions ? problem.positions + kSlack : 0); }

    void columns(int64_t block) {
        dk.assign(dim * kBlock, 0), dv.assign(value_dim * kBlock, 0);
        for (int64_t first = 0; first < task.asked; first += kBand) {
            const int64_t last = std::min(first + kBand, task.asked);
            int64_t from, to;
            if (task.columns(first, last, block, &from, &to)) band(first, last, block, from, to);
        }
        for (int64_t c = 0; c < std::min(kBlock, task.history - block); ++c) {
            Source* key = task.plain_row(static_cast<Source*>(problem.dk), task.first_key + block + c, dim);
            Source* value = task.plain_row(static_cast<Source*>(problem.dv), task.first_key + block + c, value_dim);
            for (int64_t d = 0; d < dim; ++d) put(key + d, dk[d * kBlock + c] * problem.scale);
            for (int64_t d = 0; d < value_dim; ++d) put(value + d, dv[d * kBlock + c]);
        }
    }

    void band(int64_t first, int64_t last, int64_t block, int64_t from, int64_t to) {
        std::fill_n(scores, kBand * kBlock, 0.0f), std::fill_n(gradients, kBand * kBlock, 0.0f);
        for (int64_t r = first; r < last; r += kRows) {
            const int64_t rows = std::min<int64_t>(kRows, last - r), at = (r - first) * kBlock;
            int64_t begin, end;
            if (!task.columns(r, r + rows, block, &begin, &end)) continue;
            multiply<M>(queries.data() + r * steps * M::pair, steps * M::pair, keys_lanes.data() + block * steps + begin,
                        kBlock, scores + at + begin, kBlock, rows, steps, end - begin, false);
            multiply<M>(grads.data() + r * value_steps * M::pair, value_steps * M::pair,
                        values_lanes.data() + block * value_steps + begin, kBlock, gradients + at + begin, kBlock, rows,
                        value_steps, end - begin, false);
            for (int64_t i = 0; i < rows; ++i) {
                differentiate(scores + at + i * kBlock, gradients + at + i * kBlock, r + i, block, begin, end);
                narrow_row<M>(gradients + at + i * kBlock, narrow + at + i * kBlock, begin, end);
            }
            multiply<M>(narrow + at + begin, kBlock, keys_pairs.data() + (block + begin) / M::pair * padded, padded,
                        dq.data() + r * padded, padded, rows, (end - begin) / M::pair, padded, true);
        }
        for (int64_t p = 0; p < kBand / M::pair; ++p) {
            const int64_t even = p * M::pair * kBlock, odd = even + (M::pair - 1) * kBlock;
            join_rows<M>(scores + even, scores + odd, joined[0] + p * kBlock, from, to);
            join_rows<M>(gradients + even, gradients + odd, joined[1] + p * kBlock, from, to);
        }
        const int64_t k = (last - first + M::pair - 1) / M::pair;
        multiply<M>(grads_columns.data() + first, band_rows, joined[0] + from, kBlock, dv.data() + from, kBlock,
                    value_dim, k, to - from, true);
        multiply<M>(queries_columns.data() + first, band_rows, joined[1] + from, kBlock, dk.data() + from, kBlock, dim,
                    k, to - from, true);
    }

    // Scores become weights, gradients of weights become gradients of scores; both zero where nothing is seen.
    void differentiate(float* s, float* g, int64_t r, int64_t block, int64_t begin, int64_t end) {
        int32_t buckets[kBlock];
        task.add_biases(s, r, block, begin, end, buckets);
        const float normal = problem.softmax ? lse(r) : 0, factor = task.factor();
        const bool all = task.sees_all(r, block + begin, block + end);
        for (int64_t c = begin; c < end; c += M::lanes) {
            const V x = *(V*)(s + c) * factor;
            V weight, slope = *(V*)(g + c);
            if (problem.softmax) {
                weight = weight_of<M>(x - normal);
                slope = weight * (slope - delta[r]);
            } else {
                const V gate = gate_in<M>(problem, x), share = gate * problem.inverse;
                weight = x * share;
                slope = slope * share * (1.0f + x * (1.0f - gate));
            }
            *(V*)(s + c) = all ? weight : task.seen(weight, r, block + c);
            *(V*)(g + c) = all ? slope : task.seen(slope, r, block + c);
        }
        if (problem.w_pos) {
            float* of = dw + (problem.positions - 1) / 2 + block + task.distance(r);
            for (int64_t c = begin; c < end; ++c) of[c] += g[c];
        }
        if (problem.w_time) add_times(g, buckets, begin, end);
    }

    // Columns in a row are often of one bucket, and an addition would wait for the one before.
    void add_times(const float* g, const int32_t* buckets, int64_t begin, int64_t end) {
        for (int64_t c = begin; c < end; c += 16) {
            if (is_one_bucket(buckets + c)) {
                for (int64_t l = 0; l < 4; ++l)
                    time_sums[4 * buckets[c] + l] += (g[c + l] + g[c + 4 + l]) + (g[c + 8 + l] + g[c + 12 + l]);
            } else {
                for (int64_t l = c; l < c + 16; ++l) time_sums[4 * buckets[l] + l % 4] += g[l];
            }
        }
    }

    static bool is_one_bucket(const int32_t* buckets) {
        int32_t differ = 0;
        for (int64_t l = 1; l < 16; ++l) differ |= buckets[l] ^ buckets[0];
        return !differ;
    }

    // Keys and values of targets: seen by themselves alone, or (their queries being absent) by nobody.
    void write_targets() {
        for (int64_t j = task.history; j < task.length; ++j) {
            const int64_t r = j + task.key_start - task.query_start;
            const bool is_there = r >= 0 && r < task.asked;
            Source* key = task.plain_row(static_cast<Source*>(problem.dk), task.first_key + j, dim);
            Source* value = task.plain_row(static_cast<Source*>(problem.dv), task.first_key + j, value_dim);
            const float weight = is_there ? own_weight[r] : 0, slope = is_there ? own_gradient[r] * problem.scale : 0;
            for (int64_t c = 0; c < dim; ++c) put(key + c, is_there ? slope * to_float(task.q[r][c]) : 0);
            for (int64_t c = 0; c < value_dim; ++c) put(value + c, is_there ? weight * to_float(grad[r][c]) : 0);
        }
    }
};

struct Piece {
    int64_t sequence, head, first, last;
    double cost;
};

// All heads of all sequences, the dearest first; few long ones are cut by rows where that is allowed.
std::vector<Piece> pieces(const Problem& problem, bool may_cut) {
    std::vector<Piece> all;
    const bool cuts = may_cut && problem.sequences * problem.heads < 4 * problem.threads;
    for (int64_t b = 0; b < problem.sequences; ++b) {
        const int64_t asked = problem.query_offsets[b + 1] - problem.query_offsets[b];
        const int64_t length = problem.offsets[b + 1] - problem.offsets[b];
        const int64_t step = cuts ? 8 * kBand : std::max<int64_t>(asked, 1);
        for (int64_t h = 0; h < problem.heads; ++h)
            for (int64_t r = 0; r == 0 || r < asked; r += step) {
                const int64_t last = std::min(r + step, asked);
                all.push_back({b, h, r, last, (double)(last - r) * (length - asked + last)});
            }
    }
    std::stable_sort(all.begin(), all.end(), [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
    return all;
}

template <typename M, typename Source>
void run(const Problem& problem, bool backward) {
    const std::vector<Piece> all = pieces(problem, !backward);
    const int64_t width = (problem.positions ? problem.positions + kSlack : 0) + problem.buckets;
#pragma omp parallel for num_threads(problem.threads) schedule(dynamic, 1)
    for (int64_t p = 0; p < (int64_t)all.size(); ++p) {
        const Piece& piece = all[p];
        const Task<M, Source> task(problem, piece.sequence, piece.head);
        if (backward) {
            std::vector<Backward<M, Source>> one;  // on the heap: its tiles are large
            one.push_back({task, problem.dw + (piece.sequence * problem.heads + piece.head) * width});
            one[0].run();
        } else {
            Forward<M, Source>{task}.run(piece.first, piece.last);
        }
    }
}

void choose(const Problem& problem, int64_t path, bool backward) {
#if defined(ZIGGURAT_AVX512_BF16)
    if (problem.bf16 && path == 3) return run<Pairs, uint16_t>(problem, backward);
#endif
    if (path >= 2) problem.bf16 ? run<Plain<Sixteen>, uint16_t>(problem, backward) : run<Plain<Sixteen>, float>(problem, backward);
    else if (path == 1) problem.bf16 ? run<Plain<Eight>, uint16_t>(problem, backward) : run<Plain<Eight>, float>(problem, backward);
    else problem.bf16 ? run<Plain<Four>, uint16_t>(problem, backward) : run<Plain<Four>, float>(problem, backward);
}

}  // namespace

extern "C" {

// The widest instructions that the processor and this build have; numbers as AttentionPath in cpp.py.
int64_t ziggurat_attention_path() {
#if defined(ZIGGURAT_AVX512_BF16)
    if (__builtin_cpu_supports("avx512bf16")) return 3;
#endif
#if defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}

void ziggurat_attention_forward(const Problem* problem, int64_t path) { choose(*problem, path, false); }

// dw is (sequences, heads, width); its sum over both, in this order, goes to `sums`.
void ziggurat_attention_backward(const Problem* problem, int64_t path, float* sums) {
    choose(*problem, path, true);
    const int64_t width = (problem->positions ? problem->positions + kSlack : 0) + problem->buckets;
    for (int64_t c = 0; c < width; ++c) {
        double sum = 0;
        for (int64_t p = 0; p < problem->sequences * problem->heads; ++p) sum += problem->dw[p * width + c];
        sums[c] = (float)sum;
    }
}
}
