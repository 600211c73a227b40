// Masks of one bit an item, 64 to a word, least significant bit first; see ziggurat/ops/bitmask.py.

#include <cstdint>
#include <cstring>

extern "C" {

// Bytes of 0 and 1 to bits; `words` has (n + 63) / 64 words, the bits at and above n become 0.
void ziggurat_pack_mask(const uint8_t* flags, int64_t n, uint64_t* words) {
    const int64_t whole = n / 64;
    for (int64_t word = 0; word < whole; ++word) {
        const uint8_t* from = flags + word * 64;
        uint64_t bits = 0;
        for (int part = 0; part < 8; ++part) {
            uint64_t eight;
            std::memcpy(&eight, from + part * 8, 8);
            // Byte i moves to bit 56 + i: the products of other bytes fall below bit 56 or beyond bit 63.
            bits |= ((eight * 0x0102040810204080ULL) >> 56) << (part * 8);
        }
        words[word] = bits;
    }
    if (n % 64) {
        uint64_t bits = 0;
        for (int64_t item = whole * 64; item < n; ++item) bits |= uint64_t(flags[item]) << (item % 64);
        words[whole] = bits;
    }
}

void ziggurat_unpack_mask(const uint64_t* words, int64_t n, uint8_t* flags) {
    for (int64_t item = 0; item < n; ++item) flags[item] = (words[item / 64] >> (item % 64)) & 1;
}

int64_t ziggurat_count_mask(const uint64_t* words, int64_t num_words) {
    int64_t total = 0;
    for (int64_t word = 0; word < num_words; ++word) total += __builtin_popcountll(words[word]);
    return total;
}

// The numbers of the set bits, ascending, at most `limit`; returns how many were written.
int64_t ziggurat_rows_of_mask(const uint64_t* words, int64_t num_words, int64_t limit, int64_t* rows) {
    int64_t found = 0;
    for (int64_t word = 0; word < num_words; ++word) {
        for (uint64_t bits = words[word]; bits; bits &= bits - 1) {
            if (found == limit) return found;
            rows[found++] = word * 64 + __builtin_ctzll(bits);
        }
    }
    return found;
}
}
