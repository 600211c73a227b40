"""Storage of ours below torch.distributed.checkpoint's planners: safetensors files and a JSON manifest.

Torch's planners decide who writes which chunk of which tensor, and which parts of which chunks a rank needs to fill
its own shards; that is the hard part of resharding, and it is theirs. A `StorageWriter` and a `StorageReader` move
the bytes. Torch's own ones write the metadata as a pickle and check nothing; these two write

    header | chunk | chunk | …      one safetensors file a rank, every offset known before the first byte is written

and read each needed range in blocks of whole rows, straight into the destination. They also work below torch's own
entry points, `dcp.save(state, storage_writer=CheckpointWriter(folder, step=7))` and `dcp.load(…)`.

Objects that are not tensors are refused: torch would pickle them.

Cost: beside SHA-256 (see `files.py`), one pass over the bytes for writing and one for reading; memory is one block.
A column shard reads whole rows of what was stored by rows, because rows are what lies together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ziggurat.config import JSON
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint.errors import damaged
from ziggurat.training.checkpoint.files import (
    BLOCK_BYTES,
    DTYPE_CODES,
    DurableFile,
    FileRecord,
    check_size,
    open_regular,
    read_exactly,
    read_small_file,
    safetensors_header,
    tensor_blocks,
    verify_file,
    write_file,
)
from ziggurat.training.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    STATE_NAME,
    SUMS_NAME,
    Manifest,
    StoredChunk,
    StoredTensor,
    rank_file_name,
    read_manifest,
    rows_file_name,
    write_manifest,
)
from ziggurat.training.checkpoint.retention import partial_folder, publish, start_partial
from ziggurat.training.checkpoint.rows.sparse import PREFIX, SparseTensor
from ziggurat.training.checkpoint.snapshot import decode_state, encode_state


@dataclass(frozen=True, kw_only=True)
class Written:
    """The place of a written chunk, and the record of the file that holds it."""

    file: str
    start: int
    record: FileRecord


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The tensors and files that a manifest has of an earlier checkpoint.

    Args:
        tensors: by name.
        files: that they lie in, which were linked.
    """

    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)


class CheckpointWriter(StorageWriter):
    """Writes one checkpoint, and publishes it in `finish`. See the module's docstring.

    Args:
        folder: the checkpoint's final folder; its parent must be the same file system.
        step: goes into the manifest.
        state: JSON, from the coordinator.
    """

    def __init__(self, folder: str | Path, *, step: int, state: Mapping[str, JSON] | None = None) -> None:
        self._folder = Path(folder)
        self._step = step
        self._state_text = encode_state(state or {})
        self.sparse: Mapping[str, SparseTensor] = {}  # tables of which some rows are saved, set before `finish`
        self.taken = Taken()  # set before `finish`, too

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch asks before it chooses a storage by name; this one is chosen by hand."""
        return bool(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another checkpoint, in another folder if one is given."""
        self._folder = self._folder if checkpoint_id is None else Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: object, **__: object) -> None:
        """Make the partial folder, on the coordinator."""
        if is_coordinator:
            start_partial(self._folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor of a known type."""
        for item in plan.items:
            # Bytes are what torch would pickle.
            if item.type is WriteItemType.BYTE_IO or tensor_data(item).properties.dtype not in DTYPE_CODES:
                raise _no_tensor(item.index.fqn, where=str(self._folder))
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give every rank files of its own."""
        names = ((rank_file_name(rank), rows_file_name(self._step, rank)) for rank in range(len(plans)))
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks, largest elements first (so that each is aligned), verified and on disk."""
        items = sorted(plan.items, key=lambda item: -tensor_data(item).properties.dtype.itemsize)
        plain, of_rows = plan.storage_data
        files = {plain: [item for item in items if not self._is_of_rows(item)]}
        # Rows of tables get a file of their own, which later checkpoints link.
        files[of_rows] = [item for item in items if self._is_of_rows(item)]
        # Torch asks for a future; what it promises is done when it gets it.
        future: Future[list[WriteResult]] = Future()
        future.set_result([it for name, own in files.items() if own for it in self._write_file(name, own, planner)])
        return future

    def _is_of_rows(self, item: WriteItem) -> bool:
        return bool(self.sparse) and item.index.fqn.startswith(PREFIX)

    def _write_file(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        # Sizes are known before a byte is written, and with them all places.
        header = safetensors_header([_entry(item) for item in items])
        starts = []
        start = len(header)
        with DurableFile(partial_folder(self._folder) / name) as file:
            file.write(header)
            for item in items:
                starts.append(start)
                tensor = planner.resolve_data(item)
                if not isinstance(tensor, Tensor):
                    raise _no_tensor(item.index.fqn, where=str(self._folder))
                assert tensor.shape == tensor_data(item).chunk.sizes, (item.index, tensor.shape)
                for block in tensor_blocks(tensor):
                    file.write(block)
                start += _entry(item)[3]
                del tensor  # the snapshot's memory is given back chunk by chunk
            record = file.finish()
        return [
            WriteResult(item.index, _entry(item)[3], Written(file=name, start=start, record=record))
            for item, start in zip(items, starts, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write state, manifest and SHA256SUMS, and give the checkpoint its name. On the coordinator only."""
        partial = partial_folder(self._folder)
        written = {(result.index.fqn, tuple(result.index.offset or ())): result for row in results for result in row}
        files = {result.storage_data.file: result.storage_data.record for result in written.values()}
        files[STATE_NAME] = write_file(partial / STATE_NAME, self._state_text)
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise _no_tensor(name, where=str(self._folder))
            chunks = [_chunk(written[name, tuple(chunk.offsets)], tuple(chunk.sizes)) for chunk in tensor.chunks]
            dtype = tensor.properties.dtype
            shape = tuple(tensor.size)
            tensors[name] = StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))
        # Of an earlier checkpoint: their bytes lie in files that were linked.
        tensors |= self.taken.tensors
        files |= self.taken.files
        manifest = Manifest(
            step=self._step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            torch_version=torch.__version__,
            world_size=len(results),
            files=dict(sorted(files.items())),
            tensors=tensors,
            planner_data=metadata.planner_data,
            sparse=self.sparse,
        )
        write_manifest(partial, manifest)
        # Last: a folder that bears the checkpoint's name is complete.
        publish(self._folder)


class CheckpointReader(StorageReader):
    """Reads one checkpoint, each file only after its SHA-256 was found right. See the module's docstring.

    Args:
        folder: of the checkpoint.
        step: what its manifest must say, if given.

    Raises:
        DamagedCheckpointError: from every method that reads; names the file.
    """

    def __init__(self, folder: str | Path, *, step: int | None = None) -> None:
        self.folder = Path(folder)
        self._step = step
        self._manifest: Manifest | None = None
        self._verified: set[str] = set()
        self._places: Mapping[MetadataIndex, StoredChunk] = {}

    @property
    def manifest(self) -> Manifest:
        """The manifest, read at the first use."""
        if self._manifest is None:
            self._manifest = read_manifest(self.folder, step=self._step)
        return self._manifest

    def verify(self, names: Iterable[str]) -> None:
        """Check size and SHA-256 of files that were not checked yet."""
        for name in names:
            if name not in self._verified:
                verify_file(self.folder / name, self.manifest.files[name])
                self._verified.add(name)

    def trust(self, names: Iterable[str]) -> None:
        """Take files as verified, because another rank did it."""
        self._verified.update(names)

    def rows_of(self, stored: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and numbers of some rows of a table, piece by piece; see `rows/sparse.py`."""
        ids, numbers = (self.manifest.tensors[f"{stored}.{what}"] for what in ("ids", "numbers"))
        self.verify({chunk.file for chunk in (*ids.chunks, *numbers.chunks)})
        # Both are cut alike, so that a piece of ids and its numbers begin at the same row.
        by_place = {chunk.offsets[0]: chunk for chunk in numbers.chunks}
        for chunk in ids.chunks:
            other = by_place[chunk.offsets[0]]
            yield self._chunk(chunk, torch.int64), self._chunk(other, torch.float32)

    def ids_of(self, stored: str) -> Iterator[Tensor]:
        """The ids alone, of a file that was verified."""
        for chunk in self.manifest.tensors[f"{stored}.ids"].chunks:
            yield self._chunk(chunk, torch.int64)

    def manifest_sha256(self) -> str:
        """Return the hash that proves the manifest, and with it every file."""
        return bytes(read_small_file(self.folder / SUMS_NAME, max_bytes=MAX_MANIFEST_BYTES)[:64]).decode()

    def _chunk(self, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        path = self.folder / chunk.file
        with open_regular(path) as descriptor:
            # Looked at once more, on the file that is open: its name may lead to another one by now.
            check_size(path, descriptor, self.manifest.files[chunk.file])
            data = read_exactly(path, descriptor, start=chunk.start, num_bytes=chunk.num_bytes)
        return torch.frombuffer(data, dtype=dtype).view(chunk.sizes)

    def state(self) -> dict[str, JSON]:
        """Everything that is not a tensor."""
        self.verify([STATE_NAME])
        path = self.folder / STATE_NAME
        try:
            return decode_state(read_small_file(path, max_bytes=self.manifest.files[STATE_NAME].size_bytes))
        except (ValueError, RecursionError) as error:
            raise damaged(path, expected="JSON", found=str(error)) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Torch asks before it chooses a storage by name; this one is chosen by hand."""
        return bool(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start again, with another checkpoint if one is given."""
        self.folder = self.folder if checkpoint_id is None else Path(checkpoint_id)
        self._manifest = None
        self._verified = set()
        self._places = {}

    def read_metadata(self, *_: object, **__: object) -> Metadata:
        """The manifest in torch's words."""
        return self.manifest.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: object, **__: object) -> None:
        """Remember where the chunks lie."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to prepare."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to prepare."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Verify the files that this rank needs, all of them before the first tensor changes, then fill its tensors."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].file, []).append(item)
        # All files before the first tensor: a damaged one leaves every tensor as it was.
        self.verify(by_file)
        for name, items in by_file.items():
            path = self.folder / name
            with open_regular(path) as descriptor, torch.no_grad():
                check_size(path, descriptor, self.manifest.files[name])
                for item in items:
                    # Detached: filling a weight is no step of autograd.
                    destination = planner.resolve_tensor(item).detach()
                    dtype = self.manifest.tensors[item.storage_index.fqn].dtype
                    place = self._places[item.storage_index]
                    _read_box(path, descriptor, place=place, dtype=dtype, item=item, destination=destination)
                    planner.commit_tensor(item, destination)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _read_box(
    path: Path, descriptor: int, *, place: StoredChunk, dtype: torch.dtype, item: ReadItem, destination: Tensor
) -> None:
    """Copy the box that `item` names out of a stored chunk into `destination`, a block of whole rows at a time."""
    # A scalar has no rows: it is read as one row of one number.
    sizes = place.sizes or (1,)
    first, *columns = tuple(item.storage_offsets) or (0,)
    num_rows, *lengths = tuple(item.lengths) or (1,)
    if not place.sizes:
        destination = destination.reshape(1)
    row_bytes = prod(sizes[1:]) * dtype.itemsize
    # One row at least, however long it is.
    step = max(1, BLOCK_BYTES // row_bytes)
    for row in range(0, num_rows, step):
        count = min(step, num_rows - row)
        data = read_exactly(
            path, descriptor, start=place.start + (first + row) * row_bytes, num_bytes=count * row_bytes
        )
        # Whole rows were read, since they lie together; the columns that are wanted are cut out of them.
        rows = torch.frombuffer(data, dtype=dtype).view(count, *sizes[1:])
        for dim, (column, length) in enumerate(zip(columns, lengths, strict=True), start=1):
            rows = rows.narrow(dim, column, length)
        destination.narrow(0, row, count).copy_(rows)


def tensor_data(item: WriteItem) -> TensorWriteData:
    """Return what torch knows of a tensor that is to be written.

    Raises:
        CheckpointError: the item is another object.
    """
    if item.tensor_data is None:
        raise _no_tensor(item.index.fqn, where="a save of a checkpoint")
    return item.tensor_data


def _no_tensor(name: str, *, where: str) -> CheckpointError:
    return CheckpointError(
        expected="tensors of a type that safetensors knows",
        found=f"{name!r} is not one",
        where=where,
        ways_out="keep other objects out of the state dict; pass them as JSON in `state`",
    )


def _entry(item: WriteItem) -> tuple[str, torch.dtype, tuple[int, ...], int]:
    """Name, type, shape and bytes of a chunk in its file. A part of a tensor is called `name@offset,offset`."""
    data = tensor_data(item)
    sizes = tuple(data.chunk.sizes)
    dtype = data.properties.dtype
    whole = sizes == tuple(data.size)
    # Two parts of one tensor may lie in a file, and need different names there.
    name = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"
    return name, dtype, sizes, prod(sizes) * dtype.itemsize


def _chunk(result: WriteResult, sizes: tuple[int, ...]) -> StoredChunk:
    written: Written = result.storage_data
    return StoredChunk(
        offsets=tuple(result.index.offset or ()),
        sizes=sizes,
        file=written.file,
        start=written.start,
        num_bytes=result.size_in_bytes,
    )
