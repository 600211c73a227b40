"""Add a placement: blocks of rows that share memory *and* lookups between ranks.

Vocabularies are sorted by frequency, so row 1 is looked up most and the last row hardly ever. Blocks of one size
(row_wise) then give nearly all lookups of a long-tailed feature to the first rank. Blocks that share lookups evenly
would give nearly all memory to the last one. This placement lets each rank hold the same share of the mean of both:

    m(r) = ½ · r / N  +  ½ · ln(1 + r) / ln(1 + N)          rows 0 … r−1 of N, lookups as of Zipf's law

so no rank holds more than twice the even share of rows, or answers more than twice the even share of lookups.

    import rows_by_traffic                      # lists it; plans may then say "placement": "rows_by_traffic"
"""

from __future__ import annotations

import math

from ziggurat.placements import Part, Placement


class RowsByTraffic(Placement):
    """Blocks of rows, small where rows are looked up often."""

    name = "rows_by_traffic"
    cuts_rows = True

    def parts(self, *, num_rows: int, num_columns: int, num_parts: int) -> tuple[Part, ...]:
        """Cut where m(r) passes 1/k, 2/k, …; the owner of a row is then found by bisection (`Placement.owners`)."""
        ends = [_rows_below(index / num_parts, num_rows=num_rows) for index in range(1, num_parts)] + [num_rows]
        parts = []
        begin = 0
        for end in ends:
            parts.append(Part(first_row=begin, num_rows=end - begin, first_column=0, num_columns=num_columns))
            begin = end
        return tuple(parts)


def _rows_below(share: float, *, num_rows: int) -> int:
    """Return the least number of rows r with m(r) ≥ share."""
    least = 0
    most = num_rows
    while least < most:
        middle = (least + most) // 2
        if middle / num_rows + math.log1p(middle) / math.log1p(num_rows) < 2 * share:
            least = middle + 1
        else:
            most = middle
    return least


ROWS_BY_TRAFFIC = Placement.add(RowsByTraffic())
