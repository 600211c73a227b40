"""Each rank's part of the workload's batches: drawn as one global batch, so that all ranks share the same hot rows."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.workload import RawBatch, Workload, make_batches


def rank_batches(workload: Workload, *, rank: int, world_size: int) -> list[RawBatch]:
    """Batches of `workload.batch_size` samples for one rank; those of all ranks together are the global batches.

    Args:
        workload: its batch size is a rank's.
        rank: whose.
        world_size: ranks of the job.
    """
    size = workload.batch_size
    rows = slice(rank * size, (rank + 1) * size)
    return [
        RawBatch(
            dense=raw.dense[rows].copy(),
            ids=tuple(ids[rows].copy() for ids in raw.ids),
            label_sets=tuple(labels[rows].copy() for labels in raw.label_sets),
        )
        for raw in make_batches(replace(workload, batch_size=size * world_size))
    ]
