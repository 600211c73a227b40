"""Reading a verified checkpoint into tensors, and saying exactly what does not fit before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from ziggurat.errors import CheckpointError, nearest_names
from ziggurat.ops.machine.memory import host_memory, size_text
from ziggurat.parallel.tables.table_shard import TableShard, as_shard
from ziggurat.training.checkpoint.manifest import StoredTensor
from ziggurat.training.checkpoint.rank_group import CheckpointRanks
from ziggurat.training.checkpoint.rows.filling import fill_all
from ziggurat.training.checkpoint.rows.sparse import SparseTensor
from ziggurat.training.checkpoint.storage import CheckpointReader

_MAX_NAMES = 8


class Match(StrEnum):
    """The choice whether the tensors to fill must be all that the checkpoint has."""

    EXACT = "exact"
    SUBSET = "subset"  # the checkpoint may have more, which is left alone


def check_into(
    stored: Mapping[str, StoredTensor | SparseTensor],
    *,
    into: Mapping[str, Tensor],
    everywhere: Collection[str],
    match: Match,
    optional: str | tuple[str, ...],
    folder: Path,
) -> None:
    """Raise `CheckpointError` unless `into` can be filled.

    Args:
        stored: what the checkpoint has.
        into: what this rank wants to fill.
        everywhere: the names that any rank wants to fill.
        match: whether more may be stored.
        optional: names that begin so may be missing on either side; "" means none.
        folder: of the checkpoint, for the message.
    """

    def is_optional(name: str) -> bool:
        return bool(optional) and name.startswith(optional)

    missing = [name for name in into if name not in stored and not is_optional(name)]
    if missing:
        raise _misfit(
            "every tensor to be in the checkpoint",
            f"not there: {_listed(missing, stored)}",
            folder,
            "build the model, optimizer and schema with the settings that the checkpoint was saved with",
        )
    # Of all ranks: what this one does not want may be another one's part.
    extra = [name for name in stored if name not in everywhere and not is_optional(name)]
    if extra and match is not Match.SUBSET:
        raise _misfit(
            "every tensor of the checkpoint to have a place",
            f"no place for: {_listed(extra, everywhere)}",
            folder,
            "load with match=Match.SUBSET to leave the others out",
        )
    for name, tensor in into.items():
        if name not in stored:
            continue
        wanted = (tensor.dtype, tuple(tensor.shape))
        found = (stored[name].dtype, stored[name].shape)
        if wanted != found:
            raise _misfit(
                f"{name!r} as {wanted[0]} of shape {wanted[1]}",
                f"{found[0]} of shape {found[1]}",
                folder,
                "build the model, optimizer and schema with the settings that the checkpoint was saved with",
            )
        if tensor.is_meta:
            raise _misfit(
                f"{name!r} with memory to fill", "a tensor on the meta device", folder, "call to_empty() first"
            )


def check_fit(
    reader: CheckpointReader,
    *,
    into: Mapping[str, Tensor] | None,
    match: Match,
    optional: str | tuple[str, ...],
    ranks: CheckpointRanks,
) -> None:
    """Compare what the manifest says with what is to be filled on each rank, before any file is read. Collective.

    Args:
        reader: of the checkpoint.
        into: what this rank wants to fill; None for new tensors, which must fit the host's memory.
        match: see `check_into`.
        optional: see `check_into`.
        ranks: that load together.

    Raises:
        CheckpointError: they do not fit, on every rank.
    """
    stored = reader.manifest.named
    folder = reader.folder
    if into is None:
        # New tensors are made by whoever loads, each for itself: one rank without room ends all.
        ranks.agree(lambda: _check_memory(stored, folder))
        return
    # Ranks fill different names (parts of tables, own random numbers), and only together all of them.
    names = ranks.agree(lambda: list(into))
    everywhere = {name for some in names for name in some}
    ranks.agree(
        lambda: check_into(stored, into=into, everywhere=everywhere, match=match, optional=optional, folder=folder)
    )


def _check_memory(stored: Mapping[str, StoredTensor | SparseTensor], folder: Path) -> None:
    sizes = {name: prod(tensor.shape) * tensor.dtype.itemsize for name, tensor in stored.items()}
    need = sum(sizes.values())
    memory = host_memory()
    if need > memory.free_bytes:
        largest = max(sizes, key=lambda name: sizes[name])
        raise CheckpointError(
            expected=f"tensors that fit {memory.text()}",
            found=f"{size_text(need)} in {len(sizes)} tensors, of which {largest!r} has {size_text(sizes[largest])}",
            where=str(folder),
            ways_out=(
                "load it into a model that is spread over ranks: ziggurat with torchrun",
                "load some tensors: load(into=…, match=Match.SUBSET)",
            ),
        )


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's planner; rows of tables that no tensor can share are read into a piece of memory and written from it."""

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the tensor that the bytes are read into."""
        shard = self.state_dict[read_item.dest_index.fqn]
        if isinstance(shard, TableShard) and not shard.is_in_place:
            # On the host, and no larger than the piece: it lives until `commit_tensor` has written it.
            return torch.empty(read_item.lengths, dtype=shard.dtype)
        return super().resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """They have been read."""
        shard = self.state_dict[read_item.dest_index.fqn]
        if isinstance(shard, TableShard) and not shard.is_in_place:
            # The offsets of a read are within its chunk; a shard is written by places of the whole table.
            chunk = read_item.dest_index.offset or shard.offsets
            shard.write(tuple(map(sum, zip(chunk, read_item.dest_offsets, strict=True))), tensor)
            return
        super().commit_tensor(read_item, tensor)


def fresh_tensors(stored: Mapping[str, StoredTensor | SparseTensor]) -> dict[str, Tensor]:
    """Uninitialised tensors on the host for all that is stored."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in stored.items()}


def read_tensors(reader: CheckpointReader, tensors: Mapping[str, Tensor], *, name: str = "") -> None:
    """Fill `tensors` in place; names, types and shapes were compared before. `name`: of the checkpoint, for tables."""
    sparse = reader.manifest.sparse
    whole = {name: tensor for name, tensor in tensors.items() if name not in sparse}
    with torch.no_grad():
        wanted = {each: tensors[each] for each in tensors if each in sparse}
        # Tables of which some rows are stored: the others begin as they were drawn, which torch's planner cannot say.
        fill_all(wanted, sparse, pieces=reader.rows_of, name=name)
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner({name: as_shard(tensor) for name, tensor in whole.items()}, metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, False)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _listed(names: Collection[str], others: Collection[str]) -> str:
    """Names, each with the nearest of `others`, so that a renamed tensor explains itself."""
    lines = []
    for name in list(names)[:_MAX_NAMES]:
        nearest = nearest_names(name, others, most=1)
        lines.append(f"{name!r} (nearest: {nearest[0]!r})" if nearest else f"{name!r}")
    more = len(names) - _MAX_NAMES
    return ", ".join(lines) + (f" and {more} more" if more > 0 else "")


def _misfit(expected: str, found: str, folder: Path, way_out: str) -> CheckpointError:
    return CheckpointError(expected=expected, found=found, where=str(folder), ways_out=way_out)
