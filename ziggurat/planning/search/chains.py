"""Chains: several plans at once as arrays, and random changes of them as flat lists that are priced in one call.

Table t owns a block of slots; its parts fill the first of them, each with a level (how often its columns are halved)
and a device. A table whose placement fixes its devices (row_wise, …) has no parts but the number of an option.

    table 0 │ table 1       │ table 2 │          device  3 │ 0 1 . . │ 2 .
                                                 level   0 │ 1 1 . . │ 0 .

Changes: *move* a part, *swap* two parts, *split* a table (every part, or one part where parts may be anywhere),
*merge*, *spread* it over fixed devices and *gather* it again. Each is a few rows (candidate, device, kind that comes,
kind that goes); all devices of a candidate are different, so its effect on a device is one difference of encodings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from jaxtyping import Bool, Int

from ziggurat.placements import by_columns
from ziggurat.planning.problem import Assignment
from ziggurat.planning.search.space import ColumnParts, SearchSpace

_FEW_DEVICES = 8
_DRAWS = 3
_WEIGHTS = (0.36, 0.36, 0.13, 0.13, 0.02)  # of the changes, in the order of `Change`


class Change(IntEnum):
    """The change that a candidate makes."""

    MOVE = 0
    SWAP = 1
    SPLIT = 2
    MERGE = 3
    RESPREAD = 4  # to an option with fixed devices, or back


@dataclass(kw_only=True)
class Candidates:
    """N changes of plans; candidate i belongs to chain `chain[i]`. Rows are what they do to devices.

    Args:
        change: (N,) kind of change; chain, slot, other: (N,) what it is applied to.
        valid: (N,) False where a candidate breaks a rule, and has no rows.
        target: (N,) a device, or an option for RESPREAD.
        row: (R,) candidate of each row; device, plus, minus: (R,) where, and which kinds come and go (−1: none).
        ends: (E, K) devices that a table which is split or merged as a whole ends with, −1 behind the last.
        end_row: (N,) row of `ends`, or −1.
    """

    chain: Int[np.ndarray, " N"]
    change: Int[np.ndarray, " N"]
    slot: Int[np.ndarray, " N"]
    other: Int[np.ndarray, " N"]
    target: Int[np.ndarray, " N"]
    valid: Bool[np.ndarray, " N"]
    row: Int[np.ndarray, " R"]
    device: Int[np.ndarray, " R"]
    plus: Int[np.ndarray, " R"]
    minus: Int[np.ndarray, " R"]
    ends: Int[np.ndarray, "E K"]
    end_row: Int[np.ndarray, " N"]


class Chains:
    """C plans of one space, changed in place.

    Args:
        space: kinds and rules.
        starts: the plans to start from, as parts (table, level, device) and options.
        rng: source of all randomness.
    """

    def __init__(self, space: SearchSpace, starts: list[list[Assignment]], *, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng
        num_tables = space.num_tables
        num = len(starts)
        # Each level halves all parts, so that a table has two to that power of them at most.
        capacity = 1 << space.most_levels
        # Where the block of each table begins: the sum of the blocks before it.
        self.first = np.concatenate([[0], np.cumsum(capacity)[:-1]])
        self.slot_table = np.repeat(np.arange(num_tables), capacity)
        self.device = np.full((num, len(self.slot_table)), -1)
        self.level = np.zeros((num, len(self.slot_table)), dtype=np.int64)
        self.count = np.zeros((num, num_tables), dtype=np.int64)
        self.option = np.full((num, num_tables), -1)
        self._any_cut = bool(capacity.max() > 1)
        self._any_option = any(space.options)
        self._limited = not space.allowed.all()
        self._num_allowed = space.allowed.sum(axis=1)
        self._choices = [np.flatnonzero(mine) for mine in space.allowed] if self._limited else []
        for chain, assignments in enumerate(starts):
            for table, each in enumerate(assignments):
                self._put(chain, table, each)

    # ------------------------------------------------------------------------------------------------ reading plans

    def kinds(self, chain: int) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " N"]]:
        """Kinds and devices of all shards of one plan."""
        used = np.flatnonzero(self.device[chain] >= 0)
        kinds = self.space.column_kind[self.slot_table[used], self.level[chain, used]]
        devices = self.device[chain, used]
        for table in np.flatnonzero(self.option[chain] >= 0):
            option, kind = self.space.options[table][self.option[chain, table]]
            kinds = np.append(kinds, np.full(len(option.devices), kind))
            devices = np.append(devices, option.devices)
        return kinds, devices

    def parts_of(self, chain: int, table: int) -> Int[np.ndarray, " n"]:
        """Slots in use of a table."""
        return self.first[table] + np.arange(self.count[chain, table])

    def assignments(self, chain: int) -> list[Assignment]:
        """One plan, a table at a time; needs parts on distinct devices."""
        found = []
        for table in range(self.space.num_tables):
            if self.option[chain, table] >= 0:
                found.append(self.space.options[table][self.option[chain, table]][0])
                continue
            devices = tuple(sorted(self.device[chain, self.parts_of(chain, table)].tolist()))
            kind = by_columns(len(devices))
            found.append(Assignment(placement=kind, devices=devices))
        return found

    def copy(self, *, source: int, target: int) -> None:
        """Replace one plan by another."""
        for array in (self.device, self.level, self.count, self.option):
            array[target] = array[source]

    def snapshot(self, chain: int) -> tuple[np.ndarray, ...]:
        """Return the arrays that `restore` needs to have this plan again."""
        return tuple(array[chain].copy() for array in (self.device, self.level, self.count, self.option))

    def restore(self, chain: int, saved: tuple[np.ndarray, ...]) -> None:
        """Undo everything since the snapshot."""
        for array, old in zip((self.device, self.level, self.count, self.option), saved, strict=True):
            array[chain] = old

    # ---------------------------------------------------------------------------------------------------- proposing

    def propose(self, num: int, *, worst: Int[np.ndarray, " C"], focus: float) -> Candidates:
        """`num` random changes of each plan.

        Args:
            num: candidates a chain.
            worst: (C,) most expensive device of each plan.
            focus: share of changes that start from a part on that device.
        """
        rng = self.rng
        chains = len(self.device)
        chain = np.repeat(np.arange(chains), num)
        total = len(chain)
        # Kinds of change that this space has no use for get no weight.
        weights = np.array(_WEIGHTS) * [1, 1, self._any_cut, self._any_cut, self._any_option]
        # A draw that rounds to 1 would fall behind the last kind.
        change = np.searchsorted(np.cumsum(weights / weights.sum()), rng.random(total)).clip(max=4)
        slot = self._random_slots(chain)
        self._refocus(chain, slot, worst=worst, focus=focus)
        found = Candidates(
            chain=chain,
            change=change,
            slot=slot,
            other=self._random_slots(chain),
            target=rng.integers(self.space.num_devices, size=total),
            valid=np.zeros(total, dtype=bool),
            row=np.zeros(0, dtype=np.int64),
            device=np.zeros(0, dtype=np.int64),
            plus=np.zeros(0, dtype=np.int64),
            minus=np.zeros(0, dtype=np.int64),
            ends=np.zeros((0, 0), dtype=np.int64),
            end_row=np.full(total, -1),
        )
        self._limit_targets(found)
        rows = [self._moves(found), self._swaps(found)]
        if self._any_cut:
            anywhere = self.space.parts is ColumnParts.ANYWHERE
            rows += [self._split_one(found), self._merge_two(found)] if anywhere else [self._recut(found)]
        if self._any_option:
            rows.append(self._respread(found))
        found.row, found.device, found.plus, found.minus = (
            np.concatenate(column) for column in zip(*rows, strict=True)
        )
        return found

    def _refocus(self, chain: np.ndarray, slot: np.ndarray, *, worst: np.ndarray, focus: float) -> None:
        """Exchange some slots, in place, for slots on the most expensive device of their chain."""
        focused = np.flatnonzero(self.rng.random(len(chain)) < focus)
        if self.space.num_devices <= _FEW_DEVICES:  # drawing again finds one soon, for all chains at once
            for _ in range(_DRAWS):
                # Only those that are not there yet are drawn again.
                focused = focused[self.device[chain[focused], slot[focused]] != worst[chain[focused]]]
                slot[focused] = self._random_slots(chain[focused])
            return
        for each in range(len(worst)):
            mine = focused[chain[focused] == each]
            # Slots that are not in use have the device −1, and are never found here.
            there = np.flatnonzero(self.device[each] == worst[each])
            if len(there):
                slot[mine] = there[(self.rng.random(len(mine)) * len(there)).astype(np.int64)]

    def _random_slots(self, chain: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        """A part of a random table; the first slot of its block if the table has none."""
        table = self.rng.integers(self.space.num_tables, size=len(chain))
        # Of a table without parts the count is 0, and with it the part.
        part = (self.rng.random(len(chain)) * self.count[chain, table]).astype(np.int64)
        return self.first[table] + part

    def _limit_targets(self, found: Candidates) -> None:
        if not self._limited:
            return
        tables = self.slot_table[found.slot]
        draws = self.rng.random(len(found.slot))
        for index, (table, draw) in enumerate(zip(tables, draws, strict=True)):
            choices = self._choices[table]
            found.target[index] = choices[int(draw * len(choices))]

    def _moves(self, found: Candidates) -> tuple[np.ndarray, ...]:
        pick = np.flatnonzero(found.change == Change.MOVE)
        chain = found.chain[pick]
        slot = found.slot[pick]
        there = found.target[pick]
        here = self.device[chain, slot]
        fits = (here >= 0) & (here != there) & self._free(chain, slot, there)
        pick = pick[fits]
        here = here[fits]
        there = there[fits]
        found.valid[pick] = True
        kind = self._kind(chain[fits], slot[fits])
        none = np.full(len(pick), -1)
        # Two rows: the kind goes where it was, and comes where it is going.
        return _rows([(pick, here, none, kind), (pick, there, kind, none)])

    def _swaps(self, found: Candidates) -> tuple[np.ndarray, ...]:
        pick = np.flatnonzero(found.change == Change.SWAP)
        chain = found.chain[pick]
        slot = found.slot[pick]
        other = found.other[pick]
        here = self.device[chain, slot]
        there = self.device[chain, other]
        fits = (here >= 0) & (there >= 0) & (here != there)
        if self._limited:
            # Each of both tables must be allowed on the device of the other.
            fits &= self.space.allowed[self.slot_table[slot], there] & self.space.allowed[self.slot_table[other], here]
        # Two parts of one table could else meet on a device.
        fits &= self._free(chain, slot, there) & self._free(chain, other, here)
        pick = pick[fits]
        here = here[fits]
        there = there[fits]
        found.valid[pick] = True
        mine = self._kind(chain[fits], slot[fits])
        theirs = self._kind(chain[fits], other[fits])
        return _rows([(pick, here, theirs, mine), (pick, there, mine, theirs)])

    def _kind(self, chain: np.ndarray, slot: np.ndarray) -> np.ndarray:
        return self.space.column_kind[self.slot_table[slot], self.level[chain, slot]]

    def _free(self, chain: np.ndarray, slot: np.ndarray, device: np.ndarray) -> np.ndarray:
        """Return True where no other part of the table is on the device."""
        free = np.ones(len(slot), dtype=bool)
        # Where parts may be anywhere, two of one table may share a device.
        if not self._any_cut or self.space.parts is ColumnParts.ANYWHERE:
            return free
        tables = self.slot_table[slot]
        cut = np.flatnonzero(self.count[chain, tables] > 1)
        if len(cut):
            most = int(self.count[chain[cut], tables[cut]].max())
            # A table with fewer parts reads into the block behind it, which `mine` masks; only the end of the array
            # must hold.
            index = np.minimum(self.first[tables[cut], None] + np.arange(most), len(self.slot_table) - 1)
            mine = (self.slot_table[index] == tables[cut, None]) & (index != slot[cut, None])
            free[cut] = ~(mine & (self.device[chain[cut, None], index] == device[cut, None])).any(axis=1)
        return free

    def _split_one(self, found: Candidates) -> tuple[np.ndarray, ...]:
        pick = np.flatnonzero(found.change == Change.SPLIT)
        chain = found.chain[pick]
        slot = found.slot[pick]
        there = found.target[pick]
        here = self.device[chain, slot]
        level = self.level[chain, slot]
        tables = self.slot_table[slot]
        fits = (here >= 0) & (here != there) & (level < self.space.most_levels[tables])
        pick = pick[fits]
        here = here[fits]
        there = there[fits]
        level = level[fits]
        tables = tables[fits]
        found.valid[pick] = True
        whole = self.space.column_kind[tables, level]
        half = self.space.column_kind[tables, level + 1]
        # The part is halved where it stands, and its other half comes to the new device.
        return _rows([(pick, here, half, whole), (pick, there, half, np.full(len(pick), -1))])

    def _merge_two(self, found: Candidates) -> tuple[np.ndarray, ...]:
        pick = np.flatnonzero(found.change == Change.MERGE)
        chain = found.chain[pick]
        slot = found.slot[pick]
        tables = self.slot_table[slot]
        # Drawn within the same table, since only halves of one table make a whole.
        draw = self.rng.random(len(pick)) * np.maximum(self.count[chain, tables], 1)
        other = self.first[tables] + draw.astype(np.int64)
        found.other[pick] = other
        here = self.device[chain, slot]
        there = self.device[chain, other]
        level = self.level[chain, slot]
        # Halves of one size: each of both is one level above the part that they make.
        fits = (here >= 0) & (slot != other) & (here != there) & (level == self.level[chain, other]) & (level > 0)
        pick = pick[fits]
        here = here[fits]
        there = there[fits]
        level = level[fits]
        tables = tables[fits]
        found.valid[pick] = True
        half = self.space.column_kind[tables, level]
        whole = self.space.column_kind[tables, level - 1]
        return _rows([(pick, here, whole, half), (pick, there, np.full(len(pick), -1), half)])

    def _recut(self, found: Candidates) -> tuple[np.ndarray, ...]:
        """Split all parts of a table in halves that go to other devices, or keep half of its devices."""
        pick = np.flatnonzero((found.change == Change.SPLIT) | (found.change == Change.MERGE))
        chain = found.chain[pick]
        tables = self.slot_table[found.slot[pick]]
        num = self.count[chain, tables]
        level = self.level[chain, self.first[tables]]
        split = found.change[pick] == Change.SPLIT
        wanted = np.where(split, level < self.space.most_levels[tables], level > 0) & (num > 0)
        # A split needs twice as many devices as there are parts, and all of them different.
        wanted &= ~split | (2 * num <= self._num_allowed[tables])
        pick, chain, tables, num, level, split = (each[wanted] for each in (pick, chain, tables, num, level, split))
        found.valid[pick] = True
        most = int(num.max(initial=1))
        place = np.arange(most)
        index = np.minimum(self.first[tables, None] + place, len(self.slot_table) - 1)
        held = np.where(place < num[:, None], self.device[chain[:, None], index], -1)
        # In random order, because a merge keeps the first half of them.
        held = _shuffled(held, self.rng)
        others = self._other_devices(tables[split], held[split])[:, :most]
        new = np.full((len(pick), most), -1)
        new[split, : others.shape[1]] = np.where(place[: others.shape[1]] < num[split, None], others, -1)
        kept = np.where(split, num, num // 2)
        # First the devices that stay, then those that come: `apply` reads them as one list.
        found.ends = np.concatenate([np.where(place < kept[:, None], held, -1), new], axis=1)
        found.end_row[pick] = np.arange(len(pick))
        old = self.space.column_kind[tables, level]
        later = self.space.column_kind[tables, np.where(split, level + 1, level - 1)]
        rows = []
        for devices, plus, minus in (
            (np.where(place < kept[:, None], held, -1), later, old),
            (np.where(place >= kept[:, None], held, -1), np.full_like(old, -1), old),
            (new, later, np.full_like(old, -1)),
        ):
            which, column = np.nonzero(devices >= 0)
            rows.append((pick[which], devices[which, column], plus[which], minus[which]))
        return _rows(rows)

    def _other_devices(self, tables: Int[np.ndarray, " N"], held: Int[np.ndarray, "N K"]) -> Int[np.ndarray, "N P"]:
        """Devices in random order; first those that the table may go to and has no part on."""
        # Draws are below 1: the key 2 sorts a device behind all that may be chosen.
        keys = self.rng.random((len(tables), self.space.num_devices))
        if self._limited:
            keys[~self.space.allowed[tables]] = 2.0
        which, column = np.nonzero(held >= 0)
        keys[which, held[which, column]] = 2.0
        return np.argsort(keys, axis=1)

    def _respread(self, found: Candidates) -> tuple[np.ndarray, ...]:
        """Respread from parts to an option with fixed devices, from one option to another, or whole to one device."""
        rows: list[tuple[int, int, int, int]] = []
        for index in np.flatnonzero(found.change == Change.RESPREAD).tolist():
            chain = int(found.chain[index])
            table = int(self.slot_table[found.slot[index]])
            options = self.space.options[table]
            now = int(self.option[chain, table])
            choice = int(self.rng.integers(-1, len(options))) if options else now
            if choice == now:
                continue
            before, old = self._holders(chain, table, now)
            whole = int(self.space.column_kind[table, 0])
            after, new = (
                (options[choice][0].devices, options[choice][1])
                if choice >= 0
                else ((int(found.target[index]),), whole)
            )
            # One row for each device, even where the old and the new share it: its effect is one difference.
            for device in {*before, *after}:
                rows.append((index, device, new if device in after else -1, old if device in before else -1))
            found.other[index] = choice
            found.valid[index] = True
        # Without a row the array would have no second axis to turn.
        return tuple(np.array(rows, dtype=np.int64).reshape(-1, 4).T)

    def _holders(self, chain: int, table: int, option: int) -> tuple[tuple[int, ...], int]:
        if option >= 0:
            placed, kind = self.space.options[table][option]
            return placed.devices, kind
        slots = self.parts_of(chain, table)
        kind = self.space.column_kind[table, self.level[chain, slots[0]]]
        return tuple(self.device[chain, slots].tolist()), int(kind)

    # ------------------------------------------------------------------------------------------------------ changing

    def apply(self, found: Candidates, index: int) -> None:
        """Make one change."""
        chain = int(found.chain[index])
        slot = int(found.slot[index])
        other = int(found.other[index])
        change = int(found.change[index])
        table = int(self.slot_table[slot])
        devices = self.device[chain]
        levels = self.level[chain]
        if change == Change.MOVE:
            devices[slot] = found.target[index]
        elif change == Change.SWAP:
            devices[slot], devices[other] = devices[other], devices[slot]
        elif change == Change.RESPREAD:
            target = (int(found.target[index]),)
            whole = Assignment(placement=by_columns(1), devices=target)
            self._put(chain, table, self.space.options[table][other][0] if other >= 0 else whole)
        elif found.end_row[index] >= 0:
            ends = tuple(device for device in found.ends[found.end_row[index]].tolist() if device >= 0)
            kind = by_columns(len(ends))
            self._put(chain, table, Assignment(placement=kind, devices=ends))
        elif change == Change.SPLIT:
            new = self.first[table] + self.count[chain, table]
            levels[slot] += 1
            devices[new] = found.target[index]
            # Both halves have the level that the part has by now.
            levels[new] = levels[slot]
            self.count[chain, table] += 1
        else:
            last = self.first[table] + self.count[chain, table] - 1
            levels[slot] -= 1
            # The last part moves into the gap, so that the parts of a table stay the first of its block.
            devices[other] = devices[last]
            levels[other] = levels[last]
            devices[last] = -1
            self.count[chain, table] -= 1

    def _put(self, chain: int, table: int, assignment: Assignment) -> None:
        block = slice(self.first[table], self.first[table] + (1 << self.space.most_levels[table]))
        self.device[chain, block] = -1
        if not assignment.placement.is_searched:
            number = [option for option, _ in self.space.options[table]].index(assignment)
            self.option[chain, table] = number
            self.count[chain, table] = 0
            return
        num = len(assignment.devices)
        slots = self.first[table] + np.arange(num)
        self.option[chain, table] = -1
        self.count[chain, table] = num
        self.device[chain, slots] = assignment.devices
        self.level[chain, slots] = num.bit_length() - 1  # parts are a power of two


def _shuffled(devices: Int[np.ndarray, "N K"], rng: np.random.Generator) -> Int[np.ndarray, "N K"]:
    """Each row in random order, with −1 last."""
    if devices.shape[1] == 1:
        return devices
    # Draws are below 1, so that the key 2 puts empty places last.
    order = np.argsort(np.where(devices >= 0, rng.random(devices.shape), 2.0), axis=1)
    return np.take_along_axis(devices, order, axis=1)


def _rows(parts: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))
