// Columns of one matrix to and from several; see ziggurat/ops/columns.py.

#include <cstdint>
#include <cstring>

namespace {

struct Move {  // all in bytes
    int64_t part;        // number of the narrow matrix
    int64_t part_begin;  // of the columns in a row of it
    int64_t begin;       // of the columns in a row of the wide matrix
    int64_t width;
};

}  // namespace

extern "C" {

// Row by row, so that every matrix is read or written from front to back.
void ziggurat_join_columns(
    char* wide, int64_t wide_row, const char* const* parts, const int64_t* part_rows, int64_t num_rows,
    int64_t num_moves, const Move* moves
) {
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t index = 0; index < num_moves; ++index) {
            const Move& move = moves[index];
            std::memcpy(
                wide + row * wide_row + move.begin, parts[move.part] + row * part_rows[move.part] + move.part_begin,
                move.width
            );
        }
    }
}

void ziggurat_split_columns(
    const char* wide, int64_t wide_row, char* const* parts, const int64_t* part_rows, int64_t num_rows,
    int64_t num_moves, const Move* moves
) {
    for (int64_t row = 0; row < num_rows; ++row) {
        for (int64_t index = 0; index < num_moves; ++index) {
            const Move& move = moves[index];
            std::memcpy(
                parts[move.part] + row * part_rows[move.part] + move.part_begin, wide + row * wide_row + move.begin,
                move.width
            );
        }
    }
}
}
