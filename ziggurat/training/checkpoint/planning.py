"""Who writes what: torch's planner, with the ranks' plans as JSON between them.

Each rank plans what it could write (its shards, and whole tensors that it holds); together they drop doubles, so
that of a replicated tensor one copy is written, by the rank that has the least to write so far. Every rank computes
the same global plan from the same gathered plans, so nothing needs to be sent back.

Torch checks that shards do not overlap and fill their tensor. This file adds that all ranks mean the same tensor by
the same name: equal shape and type, and sharded everywhere or nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint.files import CODE_DTYPES, DTYPE_CODES, FileRecord
from ziggurat.training.checkpoint.snapshot import SnapshotPlanner
from ziggurat.training.checkpoint.storage import Written, tensor_data


class PlannedTensor(TypedDict):
    """Chunk that a rank could write, as JSON."""

    name: str
    kind: str
    dtype: str
    shape: list[int]
    offsets: list[int]
    sizes: list[int]


class WrittenTensor(TypedDict):
    """Chunk that a rank has written, as JSON."""

    name: str
    offsets: list[int]
    num_bytes: int
    file: str
    start: int
    file_bytes: int
    sha256: str


def plan_to_json(plan: SavePlan) -> list[PlannedTensor]:
    """A plan of tensors as JSON."""
    return [_item_to_json(item) for item in plan.items]


def global_plan(planner: SnapshotPlanner, plans: Sequence[Sequence[PlannedTensor]]) -> tuple[list[SavePlan], Metadata]:
    """One plan a rank without doubles, and torch's metadata, from the plans of all ranks as JSON.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its shards overlap or do not fill it.
    """
    local_plans = [SavePlan([_item_from_json(item) for item in plan]) for plan in plans]
    _require_same_tensors(local_plans)
    try:
        return planner.create_global_plan(local_plans)
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            expected="shards that fill each tensor without overlapping",
            found=str(error),
            where=f"save on {len(plans)} ranks",
            ways_out="give different tensors different names; shard one tensor the same way on every rank",
        ) from error


def results_to_json(results: Sequence[WriteResult]) -> list[WrittenTensor]:
    """Convert what a rank wrote to JSON."""
    return [
        {
            "name": result.index.fqn,
            "offsets": list(result.index.offset or ()),
            "num_bytes": result.size_in_bytes,
            "file": result.storage_data.file,
            "start": result.storage_data.start,
            "file_bytes": result.storage_data.record.size_bytes,
            "sha256": result.storage_data.record.sha256,
        }
        for result in results
    ]


def results_from_json(data: Sequence[WrittenTensor]) -> list[WriteResult]:
    """Read what `results_to_json` wrote."""
    return [
        WriteResult(
            MetadataIndex(item["name"], item["offsets"]),
            item["num_bytes"],
            Written(
                file=item["file"],
                start=item["start"],
                record=FileRecord(size_bytes=item["file_bytes"], sha256=item["sha256"]),
            ),
        )
        for item in data
    ]


def _item_to_json(item: WriteItem) -> PlannedTensor:
    data = tensor_data(item)
    return {
        "name": item.index.fqn,
        "kind": item.type.name,
        "dtype": DTYPE_CODES[data.properties.dtype],
        "shape": list(data.size),
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
    }


def _item_from_json(item: PlannedTensor) -> WriteItem:
    offsets = torch.Size(item["offsets"])
    sizes = torch.Size(item["sizes"])
    return WriteItem(
        index=MetadataIndex(item["name"], offsets),
        type=WriteItemType[item["kind"]],
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=CODE_DTYPES[item["dtype"]]),
            size=torch.Size(item["shape"]),
        ),
    )


def _require_same_tensors(plans: Sequence[SavePlan]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = tensor_data(item)
            sharding = "sharded" if item.type is WriteItemType.SHARD else "whole"
            kind = f"{sharding}, {data.properties.dtype}, shape {tuple(data.size)}"
            before, expected = first.setdefault(item.index.fqn, (rank, kind))
            if kind != expected:
                raise CheckpointError(
                    expected=f"the same tensor under one name: {expected} (rank {before})",
                    found=f"{kind} (rank {rank})",
                    where=f"tensor {item.index.fqn!r}",
                    ways_out="give tensors that differ from rank to rank a name with the rank in it",
                )
