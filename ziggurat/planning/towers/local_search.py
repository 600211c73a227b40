"""Moves and swaps: the last polish of a partition, on the objective itself.

    cost = Σ_t (1 / n_t) Σ_{i<j in t} Dist_ij                n_t features in tower t

For towers of equal sizes this is, up to constants, the interaction inside towers (coherent: as much as possible;
diverse: as little). It is also the cost of k-means, written without coordinates, so nothing is lost to a plane that
cannot hold all distances. Moving an item to another tower, or swapping two, changes it by terms of a table of sums

    S_it = Σ_{j in t} Dist_ij                                (M, T), kept up to date in O(M) a change

so that all T moves and M swaps of an item are priced at once, and the best one that lowers the cost is made, item
after item, until a whole round makes none. Neither may make a tower fuller or emptier than its limits allow, beyond
what it is already. With the limits' violation in place of the cost, the same machinery repairs a partition that does
not fit. Reference: Kernighan and Lin, *An efficient heuristic procedure for partitioning graphs* (1970), without its
look-ahead. Cost: O(M·(M + T)) a round; 1,000 items × 64 towers about 0.3 s a round, some ten rounds.
"""

from __future__ import annotations

import numpy as np

from ziggurat.planning.towers.items import Floats, Indexes, Limits

_MAX_ROUNDS = 100
_MIN_GAIN = 1e-5  # a round that lowers the cost by a smaller share is the last
_SMALL = 1e-9
_NUM_NEIGHBOURS = 32


class Partition:
    """An assignment of items to towers that knows its cost and the price of every change.

    Args:
        assignment: (M,) tower of each item; copied.
        distances: (M, M) sums of distances between the features of two items; on the diagonal those inside an item,
            each pair once.
        counts: (M,) features of each item.
        limits: room in the towers.
        num_towers: T.
    """

    def __init__(
        self, assignment: Indexes, *, distances: Floats, counts: Floats, limits: Limits, num_towers: int
    ) -> None:
        self.assignment = assignment.copy()
        self.limits = limits
        # Pairs inside an item go wherever it goes: they count in no sum of distances to others.
        self._inner = distances.diagonal().copy()
        self._distances = distances - np.diag(self._inner)
        self._item_counts = counts
        member = np.zeros((len(assignment), num_towers))
        member[np.arange(len(assignment)), assignment] = 1.0
        self._sums = self._distances @ member
        self._within = member.T @ self._inner + 0.5 * (member * self._sums).sum(axis=0)
        self._counts = member.T @ counts
        self._num_items = member.sum(axis=0)
        self.held = member.T @ limits.loads
        self._violation = limits.violation(self.held)

    @property
    def cost(self) -> float:
        """The objective; see the module."""
        return float((self._within / np.maximum(self._counts, 1.0)).sum())

    @property
    def fits(self) -> bool:
        """No tower is too full or without an item."""
        return bool((self._num_items > 0).all()) and not self.limits.overflows(self.held)

    def polish(self) -> None:
        """Lower the cost until a round gains nearly nothing; limits that hold keep holding."""
        for _ in range(_MAX_ROUNDS):
            before = self.cost
            for item in range(len(self.assignment)):
                self._improve(item)
            if self.cost >= before * (1 - _MIN_GAIN):
                return

    def repair(self) -> None:
        """Reduce the violation of the limits, cheapest change first, until they hold or nothing helps."""
        self._fill_empty_towers()
        for _ in range(4 * len(self.assignment)):
            violation = self._violation
            if violation.max() <= _SMALL:
                return
            best: tuple[float, float, int, int, bool] | None = None
            worst = int(violation.argmax())
            for item in self._who_could_help(worst):
                best = min(filter(None, (best, self._best_relief(int(item)))), default=None)
            if best is None:
                return
            self._apply(best[2], best[3], is_swap=best[4])

    def _improve(self, item: int) -> None:
        """Make the best allowed change of one item, if it lowers the cost."""
        move_costs, move_violations = self._price_moves(item)
        swap_costs, swap_violations = self._price_swaps(item)
        move_costs[move_violations > _SMALL] = np.inf
        swap_costs[swap_violations > _SMALL] = np.inf
        move = int(move_costs.argmin())
        swap = int(swap_costs.argmin())
        is_swap = bool(swap_costs[swap] < move_costs[move])
        if min(move_costs[move], swap_costs[swap]) < -_SMALL:
            self._apply(item, swap if is_swap else move, is_swap=is_swap)

    def _who_could_help(self, tower: int) -> Indexes:
        """Items to try: those of a tower that is too full, or the nearest ones to a tower that is too empty."""
        if bool((self.held[tower] > self.limits.upper).any()):
            return np.flatnonzero(self.assignment == tower)
        far = np.where(self.assignment == tower, np.inf, self._sums[:, tower] / self._item_counts)
        return np.argsort(far, kind="stable")[:_NUM_NEIGHBOURS]

    def _best_relief(self, item: int) -> tuple[float, float, int, int, bool] | None:
        """The change of an item that takes away most violation: (change of it, of the cost, item, with whom, swap)."""
        options = []
        for is_swap, (costs, violations) in enumerate((self._price_moves(item), self._price_swaps(item))):
            costs = np.where(np.isfinite(costs), costs, np.inf)
            other = int(np.lexsort((costs, np.round(violations, 9)))[0])
            if violations[other] < -_SMALL and np.isfinite(costs[other]):
                options.append((float(violations[other]), float(costs[other]), item, other, bool(is_swap)))
        return min(options, default=None)

    def _price_moves(self, item: int) -> tuple[Floats, Floats]:
        """Change of the cost and of the violation for moving an item to each tower (T,)."""
        home = int(self.assignment[item])
        count = self._item_counts[item]
        load = self.limits.loads[item]
        if self._num_items[home] < 2:  # its tower would be empty
            return np.full(len(self._within), np.inf), np.full(len(self._within), np.inf)
        left = (self._within[home] - self._sums[item, home] - self._inner[item]) / (self._counts[home] - count)
        joined = (self._within + self._sums[item] + self._inner[item]) / (self._counts + count)
        before = self._within / np.maximum(self._counts, 1.0)
        costs = left - before[home] + joined - before
        old = self._violation
        violations = self.limits.violation(self.held[home] - load) - old[home]
        violations = violations + self.limits.violation(self.held + load) - old
        costs[home] = violations[home] = np.inf
        return costs, violations

    def _price_swaps(self, item: int) -> tuple[Floats, Floats]:
        """Change of the cost and of the violation for swapping an item with each other item (M,)."""
        home = int(self.assignment[item])
        away = self.assignment
        items = np.arange(len(away))
        row = self._distances[item]
        change = self._item_counts - self._item_counts[item]
        # The sums still have the distance to the item that leaves, so `row` goes off.
        here = self._sums[:, home] - self._sums[item, home] - row + self._inner - self._inner[item]
        there = self._sums[item, away] - self._sums[items, away] - row - self._inner + self._inner[item]
        within = self._within
        counts = self._counts
        costs = (within[home] + here) / (counts[home] + change) - within[home] / counts[home]
        costs += (within[away] + there) / (counts[away] - change) - within[away] / counts[away]
        load = self.limits.loads - self.limits.loads[item]
        old = self._violation
        violations = self.limits.violation(self.held[home] + load) - old[home]
        violations += self.limits.violation(self.held[away] - load) - old[away]
        costs[away == home] = violations[away == home] = np.inf
        return costs, violations

    def _apply(self, item: int, other: int, *, is_swap: bool) -> None:
        home = int(self.assignment[item])
        self._place(item, int(self.assignment[other]) if is_swap else other)
        if is_swap:
            self._place(other, home)

    def _place(self, item: int, tower: int) -> None:
        home = int(self.assignment[item])
        for place, sign in ((home, -1.0), (tower, 1.0)):
            # The item's own distance to itself is zero, so its sums are right before and after.
            self._within[place] += sign * (self._sums[item, place] + self._inner[item])
            self._sums[:, place] += sign * self._distances[:, item]
            self._counts[place] += sign * self._item_counts[item]
            self._num_items[place] += sign
            self.held[place] += sign * self.limits.loads[item]
            self._violation[place] = self.limits.violation(self.held[place])
        self.assignment[item] = tower

    def _fill_empty_towers(self) -> None:
        """Give every empty tower the lightest item of the tower that has the most."""
        for tower in np.flatnonzero(self._num_items == 0):
            donors = np.flatnonzero(self.assignment == int(self._num_items.argmax()))
            self._place(int(donors[self.limits.loads[donors, 0].argmin()]), int(tower))
