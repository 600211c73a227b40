"""BlockReader: the windows of a pass in memory, read ahead by several threads.

    position ──► window k: batches are gathered from it      window k+1: its row groups are read, in step with them
                                                                  thread 1  group 12: read ─► place
                                                                  thread 2  group  3: read ─► place

A row group is due when the position has come far enough in the window before: so reading is spread over training, no
batch waits for a whole window, and two windows are in memory at most (more, where a batch is larger than a window).
Checking, decoding (pyarrow) and placing (`ops/rows.py`) hold no interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pyarrow as pa

from ziggurat.data.encoded.blocks import Block, BlockLayout
from ziggurat.data.encoded.orders import RankWindow
from ziggurat.ops.rows import Columns

_MAX_THREADS = 4  # more decode faster than one process can train


def default_threads() -> int:
    """Threads that read for one rank: its share of the cores of its host, at most four."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # The cores that this process may use, which can be fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_THREADS, cores // max(ranks_here, 1)))


class BlockReader:
    """Reads the windows of one pass into blocks, ahead of the position.

    Args:
        windows: in order.
        read_group: the encoded columns of a row group; called by several threads.
        layout: of the blocks.
        threads: that read; 0 reads in the caller's thread, when a block is asked for.
        storages: columns of an earlier pass, to be used again: fresh memory is paged in at up to 1 ms for 2 MiB.
    """

    def __init__(
        self,
        windows: Sequence[RankWindow],
        *,
        read_group: Callable[[int], pa.Table],
        layout: BlockLayout,
        threads: int,
        storages: Sequence[Columns] = (),
    ) -> None:
        self._windows = windows
        self._read_group = read_group
        self._layout = layout
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ziggurat-loader-read") if threads else None
        self._capacity = max((window.num_rows for window in windows if window.places is not None), default=0)
        self._free = [each for each in storages if len(each.arrays[0]) >= self._capacity]
        self._due = _due_positions(windows, ahead=threads + 1)
        self._num_submitted = self._num_released = 0
        self._blocks: dict[int, Block] = {}
        self._tasks: dict[int, list[Callable[[], Block | None]]] = {}

    def advance(self, position: int) -> None:
        """Free the windows before a position in the epoch, and begin to read what is due."""
        while self._num_released < len(self._windows) and self._windows[self._num_released].end <= position:
            self._release(self._num_released)
            self._num_released += 1
        if self._pool is not None:
            while self._num_submitted < len(self._due) and self._due[self._num_submitted][0] <= position:
                self._submit_next()

    def block(self, number: int) -> Block:
        """The block of a window, when all of it has been read.

        Raises:
            DataError: a row group is damaged.
        """
        while self._num_submitted < len(self._due) and self._due[self._num_submitted][1] <= number:
            self._submit_next()
        for task in self._tasks.pop(number, ()):
            made = task()
            if made is not None:
                self._blocks[number] = made
        return self._blocks[number]

    def close(self) -> list[Columns]:
        """Stop the threads; returns the storages, for the next pass."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        for number in list(self._blocks):
            self._release(number)
        return self._free

    def _submit_next(self) -> None:
        _, number, part = self._due[self._num_submitted]
        self._num_submitted += 1
        window = self._windows[number]
        if window.places is not None and number not in self._blocks:
            storage = self._free.pop() if self._free else self._layout.empty(self._capacity)
            self._blocks[number] = Block(storage, self._layout.chunks_of(len(window.parts)))
        read = partial(self._read, number, part, self._blocks.get(number))
        tasks = self._tasks.setdefault(number, [])
        if self._pool is None:
            tasks.append(read)
        else:
            future: Future[Block | None] = self._pool.submit(read)
            tasks.append(future.result)

    def _read(self, number: int, part: int, target: Block | None) -> Block | None:
        window = self._windows[number]
        wanted = window.parts[part]
        table = self._read_group(wanted.group)
        if window.places is None or target is None:
            return self._layout.views(table)
        table = table.slice(wanted.first, wanted.num_rows)
        self._layout.place(table, target=target, part=part, places=window.places(part))
        return None

    def _release(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if block is not None and self._windows[number].places is not None:
            self._free.append(block.columns)


def _due_positions(windows: Sequence[RankWindow], *, ahead: int) -> list[tuple[int, int, int]]:
    """Every part in the order of reading: the position from which on it is due, its window, its number there."""
    due: list[tuple[int, int, int]] = []
    for number, window in enumerate(windows):
        if window.places is None:
            start = windows[number - ahead].start if number >= ahead else 0
            due += [(start, number, part) for part in range(len(window.parts))]
            continue
        before = windows[number - 1] if number else None
        for part in range(len(window.parts)):
            # Parts fall due evenly over the window before, so that reading keeps pace with training.
            share = max(part + 1 - ahead, 0) / len(window.parts)
            start = 0 if before is None else before.start + int(share * (before.end - before.start))
            due.append((start, number, part))
    return due
