"""SharedLedger: one ledger for all ranks, in the format of one.

A record of the ledger holds numbers that add up: rows, and a sum of mixed row ids mod 2^64. Ranks keep theirs in memory
and add them up when the ledger is flushed, which is before every checkpoint: one small all-reduce for all steps since.
What a kill loses are steps after the last checkpoint, which will be done again.

    rank 0   [rows  hash  sum] [rows  hash  sum] … ─┐
    rank 1   [rows  hash  sum] [rows  hash  sum] … ─┴─► added up, mod 2^64 ─► ledger.bin, written by rank 0

The ordered hash of a step is Σ_r mix(hash_r + (r+1)·G): it depends on the order of rows and on the rank that had them.
So `ziggurat verify` needs not to know how many ranks there were, and may have changed at every resume.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ziggurat.data.encoded.ledger import Ledger
from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.ops.rows import hash_rows
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.topology import Topology


class SharedLedger:
    """The interface of `Ledger` that a trainer uses, over ranks. `flush` is collective.

    Args:
        path: of the file, on rank 0.
        topology: the ranks.
    """

    def __init__(self, path: Path, *, topology: Topology) -> None:
        self._topology = topology
        self._file = Ledger(path) if topology.rank == 0 else None
        self._places: list[tuple[int, int]] = []
        self._numbers: list[np.ndarray] = []

    def append(self, *, epoch: int, step: int, row_ids: np.ndarray) -> None:
        """Record this rank's batch; see `Ledger.append`."""
        ordered, row_sum = hash_rows(row_ids)
        with np.errstate(over="ignore"):
            mine = np.array([ordered], dtype=np.uint64) + np.uint64(self._topology.rank + 1) * GOLDEN
        self._places.append((epoch, step))
        numbers = [np.array([len(row_ids)], np.uint64), mix(mine), np.array([row_sum], np.uint64)]
        self._numbers.append(np.concatenate(numbers))

    def truncate(self, step: int) -> None:
        """Forget the steps after `step`."""
        if self._file is not None:
            self._file.truncate(step)

    def flush(self, *, durable: bool = False) -> None:
        """Add up what all ranks have recorded since the last time, and write it."""
        if self._numbers:
            sums = torch.from_numpy(np.stack(self._numbers).view(np.int64))  # int64 sums wrap around like uint64
            device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
            sums = sums.to(device)
            with communicating("ledger"):
                dist.all_reduce(sums, group=self._topology.world.process_group)
            self._write(sums.cpu().numpy().view(np.uint64))
        if self._file is not None:
            self._file.flush(durable=durable)

    def close(self) -> None:
        """Close the file; what was not flushed is forgotten."""
        if self._file is not None:
            self._file.close()

    def _write(self, sums: np.ndarray) -> None:
        if self._file is not None:
            for (epoch, step), (num_rows, ordered, total) in zip(self._places, sums.tolist(), strict=True):
                self._file.append_sums(epoch=epoch, step=step, num_rows=num_rows, ordered=ordered, row_sum=total)
        self._places = []
        self._numbers = []
