"""Growing: how a table whose vocabulary grows takes ids in and lets them go. Plain data.

Encoded data names the ids of such a table by number, since their rows are decided in training:

    numbers 0, 1, 2   padding, unknown, missing: the reserved rows
    numbers from 3 on 3 + stable hash of the id, modulo 2^62

So an id takes 8 bytes in encoded data, where a row takes 4. Two of n different ids share a number, and so a row, with a
probability of n²/2^63: of 10⁸ ids no two with 99.9 %. The maps themselves (`ops/growing`) take 64-bit ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from ziggurat.typed import Range, checked

NUM_NUMBERS = 1 << 62  # of ids in encoded data
MAX_SIGHTINGS = 255  # sightings and uses are counted in one byte

NumIds = Annotated[int, Range(1, (1 << 31) - 4, "rows are counted in 31 bits")]
Sightings = Annotated[int, Range(1, MAX_SIGHTINGS, "sightings are counted in one byte")]


class Evict(StrEnum):
    """Choices of the id that loses its row when a table is full and another one is admitted."""

    NEVER = "never"  # none: new ids stay unknown
    LEAST_FREQUENT = "least_frequent"  # the one used least, of several the one used longest ago
    OLDEST = "oldest"  # the one used longest ago


class Counting(StrEnum):
    """Ways to count sightings of ids without a row."""

    SKETCH = "sketch"  # count-min: constant memory, never too few, seldom too many
    EXACT = "exact"  # one count for each id that ever came: memory grows with them


@dataclass(frozen=True, kw_only=True)
@checked
class Growing:
    """Settings of how a vocabulary grows.

    Args:
        num_ids: rows for ids: how many have one at a time.
        admit_after: sightings after which an id gets a row.
        evict: who makes room in a full table.
        counting: of the sightings before; nothing is counted where one is enough.
    """

    num_ids: NumIds
    admit_after: Sightings = 1
    evict: Evict = Evict.LEAST_FREQUENT
    counting: Counting = Counting.SKETCH
