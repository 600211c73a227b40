"""Sets of 32 rows in plain Python dictionaries: what a cache holds after each step, written from its description."""

from __future__ import annotations

from collections import defaultdict

from ziggurat.ops.row_cache import NUM_WAYS, CachePolicy


class WayOracle:
    """A cache of rows without numbers.

    Args:
        num_sets: of 32 ways.
        policy: which row leaves.
    """

    def __init__(self, num_sets: int, policy: CachePolicy) -> None:
        self.num_sets, self.policy = num_sets, policy
        self.sets: dict[int, dict[int, int]] = defaultdict(dict)  # row → the step that touched it last
        self.counts: dict[int, int] = defaultdict(int)
        self.hits = 0

    def step(self, rows: list[int], *, step: int) -> tuple[set[int], set[int]]:
        """Rows that left, and rows that found no way."""
        left, conflicts = set(), set()
        missing = defaultdict(list)
        for row in rows:
            self.counts[row] += 1
            held = self.sets[row % self.num_sets]
            if row in held:
                self.hits += 1
                held[row] = step
            else:
                missing[row % self.num_sets].append(row)
        for number, new in missing.items():
            held = self.sets[number]
            for row in sorted(new, key=self._first):
                old = [(self._value(each, stamp), each) for each, stamp in held.items() if stamp != step]
                if len(held) == NUM_WAYS:
                    if not old or (self.policy is CachePolicy.LFU and min(old)[0] > self.counts[row]):
                        conflicts.add(row)
                        continue
                    left.add(min(old)[1])
                    del held[min(old)[1]]
                held[row] = step
        return left, conflicts

    def _first(self, row: int) -> tuple[int, int]:
        return (-self.counts[row] if self.policy is CachePolicy.LFU else 0, row)

    def _value(self, row: int, stamp: int) -> int:
        return self.counts[row] if self.policy is CachePolicy.LFU else stamp
