// Boolean programs over packed masks, a block of words at a time; see ziggurat/ops/mask_program.py.
//
// A block of 256 words is 16,384 items: the stack of a program and the planes it touches stay in the first two caches.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 256;
constexpr int64_t LINE = 8;  // words of a cache line

enum Op : int64_t { CONSTANT, PLANE, MASK, LIST, CODES, BLOOM, OPEN, FOLD };
enum Combine : int64_t { PUSH, AND, OR };

struct Step {
    int64_t op, combine, invert, present;
    int64_t first, second, third, fourth, fifth;  // what they mean depends on op
};

struct Problem {
    const Step* steps;
    int64_t num_steps;
    const uint64_t* planes;
    int64_t num_words;
    int64_t num_items;
    std::vector<uint64_t> stack;
    std::vector<uint64_t> cares;  // for each open group: the items that its parents leave undecided
    int64_t verified = 0;
};

// Which items a leaf decides: those of the open group that what lies on the stack does not decide already.
void undecided(const uint64_t* care, const uint64_t* top, int64_t how, int64_t count, uint64_t* words) {
    if (how == AND) {
        for (int64_t i = 0; i < count; ++i) words[i] = care[i] & top[i];
    } else if (how == OR) {
        for (int64_t i = 0; i < count; ++i) words[i] = care[i] & ~top[i];
    } else {
        std::memcpy(words, care, size_t(count) * 8);
    }
}

bool any(const uint64_t* words, int64_t count) {
    uint64_t all = 0;
    for (int64_t i = 0; i < count; ++i) all |= words[i];
    return all != 0;
}

template <class Word>
void combine(uint64_t* top, int64_t how, int64_t count, Word word) {
    if (how == AND) {
        for (int64_t i = 0; i < count; ++i) top[i] &= word(i);
    } else if (how == OR) {
        for (int64_t i = 0; i < count; ++i) top[i] |= word(i);
    } else {
        for (int64_t i = 0; i < count; ++i) top[i] = word(i);
    }
}

// Combine with a leaf, or with what is present and not in the leaf.
template <class Word>
void leaf(const Problem& problem, const Step& step, int64_t begin, int64_t count, uint64_t* top, Word word) {
    if (!step.invert) {
        combine(top, step.combine, count, word);
    } else if (step.present < 0) {
        combine(top, step.combine, count, [&](int64_t i) { return ~word(i); });
    } else {
        const uint64_t* present = problem.planes + step.present * problem.num_words + begin;
        combine(top, step.combine, count, [&](int64_t i) { return present[i] & ~word(i); });
    }
}

// Which of 64 codes lie in [low, low + span].
inline uint64_t codes_word(const uint8_t* codes, uint8_t low, uint8_t span) {
#if defined(__AVX512BW__)
    const __m512i shifted = _mm512_sub_epi8(_mm512_loadu_si512(codes), _mm512_set1_epi8(char(low)));
    return _mm512_cmple_epu8_mask(shifted, _mm512_set1_epi8(char(span)));
#elif defined(__AVX2__)
    uint64_t word = 0;
    for (int half = 0; half < 2; ++half) {
        const __m256i here = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + half * 32));
        const __m256i shifted = _mm256_sub_epi8(here, _mm256_set1_epi8(char(low)));
        const __m256i inside = _mm256_cmpeq_epi8(_mm256_min_epu8(shifted, _mm256_set1_epi8(char(span))), shifted);
        word |= uint64_t(uint32_t(_mm256_movemask_epi8(inside))) << (half * 32);
    }
    return word;
#else
    uint64_t word = 0;
    for (int i = 0; i < 64; ++i) word |= uint64_t(uint8_t(codes[i] - low) <= span) << i;
    return word;
#endif
}

// One pass: a cache line of words in which nothing is undecided stays as it is, and its codes are not read.
template <int64_t HOW, bool INVERT>
void codes_lines(
    const Problem& problem, const Step& step, int64_t begin, int64_t count, const uint64_t* care, uint64_t* top
) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(step.first) + begin * 64;
    const uint64_t* present = step.present < 0 ? nullptr : problem.planes + step.present * problem.num_words + begin;
    const uint8_t low = uint8_t(step.second), span = uint8_t(step.third - step.second);
    const int64_t left = problem.num_items - begin * 64;
    const int64_t whole = std::min(count, left / 64);
    for (int64_t line = 0; line < count; line += LINE) {
        const int64_t stop = std::min(line + LINE, count);
        uint64_t need = 0;
        for (int64_t i = line; i < stop; ++i) need |= care[i] & (HOW == AND ? top[i] : HOW == OR ? ~top[i] : ~uint64_t(0));
        if (!need) {
            if (HOW == PUSH) std::memset(top + line, 0, size_t(stop - line) * 8);
            continue;
        }
        for (int64_t i = line; i < stop; ++i) {
            uint64_t word;
            if (i < whole) {
                word = codes_word(codes + i * 64, low, span);
            } else {  // the codes end within the last word
                uint8_t last[64] = {};
                std::memcpy(last, codes + i * 64, size_t(left - i * 64));
                word = codes_word(last, low, span);
            }
            if (INVERT) word = (present ? present[i] : ~uint64_t(0)) & ~word;
            top[i] = HOW == AND ? top[i] & word : HOW == OR ? top[i] | word : word;
        }
    }
}

void codes_leaf(
    const Problem& problem, const Step& step, int64_t begin, int64_t count, const uint64_t* care, uint64_t* top
) {
    using Lines = void (*)(const Problem&, const Step&, int64_t, int64_t, const uint64_t*, uint64_t*);
    constexpr Lines lines[3][2] = {
        {codes_lines<PUSH, false>, codes_lines<PUSH, true>},
        {codes_lines<AND, false>, codes_lines<AND, true>},
        {codes_lines<OR, false>, codes_lines<OR, true>},
    };
    lines[step.combine][step.invert](problem, step, begin, count, care, top);
}

void list_leaf(const Problem& problem, const Step& step, int64_t begin, int64_t count, uint64_t* top) {
    const int32_t* rows = reinterpret_cast<const int32_t*>(step.first);
    const int32_t* end = rows + step.second;
    uint64_t words[BLOCK];
    std::memset(words, 0, size_t(count) * 8);
    const int64_t stop = (begin + count) * 64;
    for (const int32_t* row = std::lower_bound(rows, end, int32_t(begin * 64)); row != end && *row < stop; ++row) {
        words[*row / 64 - begin] |= uint64_t(1) << (*row % 64);
    }
    leaf(problem, step, begin, count, top, [&](int64_t i) { return words[i]; });
}

bool has_code(const int32_t* codes, const int32_t* offsets, int32_t code, int32_t item) {
    if (!offsets) return codes[item] == code;
    for (int32_t entry = offsets[item]; entry < offsets[item + 1]; ++entry) {
        if (codes[entry] == code) return true;
    }
    return false;
}

// Clear the bits in `words` of the items that are asked for and do not have the code. The items lie far apart, so all of
// a block are fetched before the first is looked at.
void verify(
    Problem& problem, const Step& step, int64_t begin, int64_t count, const uint64_t* asked, uint64_t* words
) {
    const int32_t* codes = reinterpret_cast<const int32_t*>(step.third);
    const int32_t* offsets = reinterpret_cast<const int32_t*>(step.fourth);
    int32_t items[BLOCK * 64];
    int64_t num_items = 0;
    for (int64_t i = 0; i < count; ++i) {
        for (uint64_t maybe = words[i] & asked[i]; maybe; maybe &= maybe - 1) {
            const int32_t item = int32_t((begin + i) * 64 + __builtin_ctzll(maybe));
            __builtin_prefetch(offsets ? offsets + item : codes + item);
            items[num_items++] = item;
        }
    }
    for (int64_t i = 0; offsets && i < num_items; ++i) __builtin_prefetch(codes + offsets[items[i]]);
    for (int64_t i = 0; i < num_items; ++i) {
        const uint64_t bit = uint64_t(1) << (items[i] % 64);
        if (!has_code(codes, offsets, int32_t(step.fifth), items[i])) words[items[i] / 64 - begin] &= ~bit;
    }
    problem.verified += num_items;
}

// Items whose planes are all set may have the value; those among them that are not decided already are looked up.
void bloom_leaf(
    Problem& problem, const Step& step, int64_t begin, int64_t count, const uint64_t* care, uint64_t* top
) {
    const int64_t* numbers = reinterpret_cast<const int64_t*>(step.first);
    uint64_t need[BLOCK], words[BLOCK];
    undecided(care, top, step.combine, count, need);
    for (int64_t line = 0; line < count; line += LINE) {
        const int64_t stop = std::min(line + LINE, count);
        if (!any(need + line, stop - line)) {
            std::memset(words + line, 0, size_t(stop - line) * 8);
            continue;
        }
        const uint64_t* plane = problem.planes + numbers[0] * problem.num_words + begin;
        for (int64_t i = line; i < stop; ++i) words[i] = plane[i];
        for (int64_t k = 1; k < step.second; ++k) {
            plane = problem.planes + numbers[k] * problem.num_words + begin;
            for (int64_t i = line; i < stop; ++i) words[i] &= plane[i];
        }
    }
    verify(problem, step, begin, count, need, words);
    leaf(problem, step, begin, count, top, [&](int64_t i) { return words[i]; });
}

// Run the program for one block; the result is at the bottom of the stack.
const uint64_t* run_block(Problem& problem, int64_t begin, int64_t count) {
    uint64_t* top = problem.stack.data() - BLOCK;
    uint64_t* care = problem.cares.data();
    std::memset(care, 0xff, size_t(count) * 8);
    for (const Step* step = problem.steps; step != problem.steps + problem.num_steps; ++step) {
        if (step->op == OPEN) {
            undecided(care, top, step->combine, count, care + BLOCK);
            care += BLOCK;
            continue;
        }
        if (step->op == FOLD) {
            const uint64_t* other = top;
            top -= BLOCK;
            care -= BLOCK;
            combine(top, step->combine, count, [&](int64_t i) { return other[i]; });
            continue;
        }
        if (step->combine == PUSH) top += BLOCK;
        if (step->op == CONSTANT) {
            const uint64_t word = step->first ? ~uint64_t(0) : 0;
            leaf(problem, *step, begin, count, top, [&](int64_t) { return word; });
        } else if (step->op == PLANE) {
            const uint64_t* plane = problem.planes + step->first * problem.num_words + begin;
            leaf(problem, *step, begin, count, top, [&](int64_t i) { return plane[i]; });
        } else if (step->op == MASK) {
            const uint64_t* mask = reinterpret_cast<const uint64_t*>(step->first) + begin;
            leaf(problem, *step, begin, count, top, [&](int64_t i) { return mask[i]; });
        } else if (step->op == LIST) {
            list_leaf(problem, *step, begin, count, top);
        } else if (step->op == CODES) {
            codes_leaf(problem, *step, begin, count, care, top);
        } else {
            bloom_leaf(problem, *step, begin, count, care, top);
        }
    }
    return problem.stack.data();
}

}  // namespace

extern "C" {

// Write the words of the spans [begin, end) of `out`, or all if `spans` is null; returns how many items were looked up.
int64_t ziggurat_run_mask_program(
    const int64_t* steps, int64_t num_steps, int64_t depth, const uint64_t* planes, int64_t num_items,
    const int64_t* spans, int64_t num_spans, uint64_t* out
) {
    Problem problem{
        reinterpret_cast<const Step*>(steps), num_steps, planes, (num_items + 63) / 64, num_items,
        std::vector<uint64_t>(size_t(depth * BLOCK)), std::vector<uint64_t>(size_t(depth * BLOCK)),
    };
    const int64_t everything[2] = {0, problem.num_words};
    if (!spans) spans = everything;
    for (int64_t span = 0; span < num_spans; ++span) {
        for (int64_t begin = spans[2 * span]; begin < spans[2 * span + 1]; begin += BLOCK) {
            const int64_t count = std::min(BLOCK, spans[2 * span + 1] - begin);
            std::memcpy(out + begin, run_block(problem, begin, count), size_t(count) * 8);
            if (begin + count == problem.num_words && num_items % 64) {
                out[problem.num_words - 1] &= (uint64_t(1) << (num_items % 64)) - 1;
            }
        }
    }
    return problem.verified;
}

// Clear the bits of rows; -1 is passed over.
void ziggurat_clear_rows(const int64_t* rows, int64_t num_rows, uint64_t* words) {
    for (int64_t i = 0; i < num_rows; ++i) {
        if (rows[i] >= 0) words[rows[i] / 64] &= ~(uint64_t(1) << (rows[i] % 64));
    }
}
}
