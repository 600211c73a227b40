"""The manifest: a JSON file that says what a checkpoint holds, where each byte lies, and what proves it.

    step-000000001200/
      SHA256SUMS               hash of manifest.json, then of every file in it; `sha256sum --check SHA256SUMS`
      manifest.json            this file
      state.json               everything that is not a tensor
      rank-00000.safetensors   the chunks that rank 0 wrote
      rank-00001.safetensors   ...
      rows-000000001200-00000.safetensors   rows of tables on a disk that rank 0 wrote at this step, or an earlier one

torch.distributed.checkpoint keeps the same facts (`Metadata`: tensors, their chunks, where each chunk is stored) in
a pickle, which runs code when it is loaded, and checks nothing. Here they are JSON; `Manifest.metadata` rebuilds the
object that torch's planners expect.

Trust runs in one direction: SHA256SUMS proves manifest.json, manifest.json proves every other file, and SHA256SUMS
is recomputed from it, so no byte of the folder can change unnoticed. Hashes do not prove good intentions, so the
content is checked as well: names without folders, chunks inside their tensor, disjoint and complete, bytes inside
their file and never shared. What passes can be read without further care.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ziggurat.config import to_json
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint.errors import damaged
from ziggurat.training.checkpoint.files import CODE_DTYPES, DTYPE_CODES, FileRecord, read_small_file, write_file
from ziggurat.training.checkpoint.rows.sparse import PREFIX, SparseTensor, check_rows, entries_from_json

FORMAT = "ziggurat-checkpoint"
FORMAT_VERSION = 1
SPARSE_VERSION = 3  # of checkpoints that hold some rows of tables (`rows/`), in files of their own
MANIFEST_NAME = "manifest.json"
SUMS_NAME = "SHA256SUMS"
STATE_NAME = "state.json"
_TRIALS = 3  # to read two files of one checkpoint, which another process may replace meanwhile
MAX_MANIFEST_BYTES = 256 << 20  # more is not read: a damaged folder must not fill the memory
MAX_STATE_BYTES = 256 << 20
MAX_DIMENSIONS = 64
_FILE_NAME = re.compile(r"state\.json|rank-[0-9]{5}\.safetensors|rows-[0-9]{12}-[0-9]{5}\.safetensors")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FIRST_SUM = re.compile(rb"([0-9a-f]{64})  manifest\.json\n")


def rank_file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def rows_file_name(step: int, rank: int) -> str:
    """The file of rows of tables that a rank writes; later checkpoints keep its name."""
    return f"rows-{step:012d}-{rank:05d}.safetensors"


def rows_file_step(name: str) -> int | None:
    """The step whose rows a file has; None for another file."""
    return int(name.split("-")[1]) if name.startswith("rows-") else None


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A box of a tensor, and the bytes that hold it (row-major, little-endian) in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of any rank's: its whole shape and the chunks that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of a checkpoint.

    Args:
        step: training step; also the name of the folder.
        created: UTC time in ISO format, for people.
        torch_version: of the program that saved, for people.
        world_size: ranks that saved; any number may load.
        files: every file but the manifest and SHA256SUMS.
        tensors: by name.
        planner_data: what torch's planner keeps of nested state dicts: name → path; None for flat ones.
        sparse: tables of which some rows are stored, by name; see `rows/sparse.py`.
    """

    step: int
    created: str
    torch_version: str
    world_size: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, StoredTensor]
    planner_data: Mapping[str, Sequence[str | int]] | None = None
    sparse: Mapping[str, SparseTensor] = field(default_factory=dict)

    @property
    def named(self) -> dict[str, StoredTensor | SparseTensor]:
        """The entries that a run knows by name: tensors, and tables of which some rows are stored."""
        whole = {name: tensor for name, tensor in self.tensors.items() if not (self.sparse and name.startswith(PREFIX))}
        return {**whole, **self.sparse}

    def metadata(self) -> Metadata:
        """The same, as torch.distributed.checkpoint's planners expect it; chunks are found by `storage_data`."""
        tensors: dict[str, STORAGE_TYPES] = {}
        places: dict[MetadataIndex, StoredChunk] = {}
        for name, tensor in self.tensors.items():
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=tensor.dtype),
                size=torch.Size(tensor.shape),
                chunks=[
                    ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
                    for chunk in tensor.chunks
                ],
            )
            places.update({MetadataIndex(name, chunk.offsets): chunk for chunk in tensor.chunks})
        planner_data = {name: tuple(path) for name, path in (self.planner_data or {}).items()}
        return Metadata(tensors, planner_data=planner_data or None, storage_data=places)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json and SHA256SUMS durably; the last files of a checkpoint."""
    text = _text(_to_json(manifest)).encode()
    if len(text) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            expected=f"a manifest of at most {MAX_MANIFEST_BYTES} bytes",
            found=f"{len(text)} bytes for {len(manifest.tensors)} tensors",
            where=str(folder / MANIFEST_NAME),
            ways_out="save fewer and larger tensors",
        )
    # This order: without its sums the folder counts as none, so a kill in between leaves no checkpoint.
    write_file(folder / MANIFEST_NAME, text)
    write_file(folder / SUMS_NAME, _sums(text, manifest.files))


def read_manifest(folder: Path, *, step: int | None = None) -> Manifest:
    """Read and check the manifest of a checkpoint; the files that it lists are not read.

    Args:
        folder: of the checkpoint.
        step: what the manifest must say, if given.

    Raises:
        DamagedCheckpointError: names the file.
        CheckpointError: the format is newer than this program.
    """
    if folder.is_symlink() or not folder.is_dir():
        found = "a symbolic link" if folder.is_symlink() else "no such folder"
        raise damaged(folder, expected="a folder with a checkpoint", found=found)
    sums_path = folder / SUMS_NAME
    path = folder / MANIFEST_NAME
    sums, text = _read_together(sums_path, path)
    first = _FIRST_SUM.match(sums)
    # Before the manifest is parsed, so that bytes that nobody vouches for are never read as JSON.
    if first is None:
        raise damaged(
            sums_path, expected="the SHA-256 of manifest.json in the first line", found=repr(bytes(sums[:80]))
        )
    digest = hashlib.sha256(text).hexdigest()
    if digest != first[1].decode():
        raise damaged(path, expected=f"SHA-256 {first[1].decode()} (first line of {SUMS_NAME})", found=digest)
    try:
        manifest = _from_json(_parse(text), path)
    # The second is of JSON that is nested too deep to be read.
    except (ValueError, RecursionError) as error:
        raise damaged(path, expected="a manifest that agrees with itself", found=str(error)) from error
    # The other sums follow from the manifest, and must be those that are written.
    if bytes(sums) != _sums(text, manifest.files):
        raise damaged(sums_path, expected="the SHA-256 of every file, as in manifest.json", found="others")
    if step is not None and manifest.step != step:
        raise damaged(path, expected=f"step {step}, as the folder is called", found=f"step {manifest.step}")
    return manifest


def _read_together(sums_path: Path, path: Path) -> tuple[bytearray, bytearray]:
    """Return sums and manifest of one checkpoint, also where the same step is saved again between the two reads."""
    trial = 0
    while True:
        trial += 1
        sums = read_small_file(sums_path, max_bytes=MAX_MANIFEST_BYTES)
        text = read_small_file(path, max_bytes=MAX_MANIFEST_BYTES)
        first = _FIRST_SUM.match(sums)
        if first is not None and first[1].decode() == hashlib.sha256(text).hexdigest():
            return sums, text
        # They stay as they are where the checkpoint is damaged, and are others where it was replaced.
        if trial == _TRIALS or read_small_file(sums_path, max_bytes=MAX_MANIFEST_BYTES) == sums:
            return sums, text


def _text(data: Mapping[str, object]) -> str:
    """JSON with a line for each file and each tensor, for people."""
    lines = []
    for key, value in data.items():
        text = json.dumps(value)
        if isinstance(value, dict):
            text = "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(it)}" for name, it in value.items()) + "\n }"
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _sums(manifest_text: bytes | bytearray, files: Mapping[str, FileRecord]) -> bytes:
    lines = [f"{hashlib.sha256(manifest_text).hexdigest()}  {MANIFEST_NAME}\n"]
    lines += [f"{record.sha256}  {name}\n" for name, record in files.items()]
    return "".join(lines).encode()


def _to_json(manifest: Manifest) -> dict[str, object]:
    return {
        "format": FORMAT,
        "format_version": SPARSE_VERSION if manifest.sparse else FORMAT_VERSION,
        "step": manifest.step,
        "created": manifest.created,
        "torch": manifest.torch_version,
        "world_size": manifest.world_size,
        "files": {name: {"size_bytes": it.size_bytes, "sha256": it.sha256} for name, it in manifest.files.items()},
        "tensors": {
            name: {
                "dtype": DTYPE_CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "chunks": [
                    [list(chunk.offsets), list(chunk.sizes), chunk.file, chunk.start, chunk.num_bytes]
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in manifest.tensors.items()
        },
        "planner": None if manifest.planner_data is None else {k: list(v) for k, v in manifest.planner_data.items()},
        **({"sparse": {name: to_json(entry) for name, entry in manifest.sparse.items()}} if manifest.sparse else {}),
    }


def _parse(text: bytes | bytearray) -> object:
    def no_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
        # Of equal keys `json` keeps the last, and says nothing.
        result = dict(pairs)
        _require(len(result) == len(pairs), "a key occurs twice")
        return result

    def no_constants(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    return json.loads(text, object_pairs_hook=no_doubles, parse_constant=no_constants)


def _from_json(content: object, path: Path) -> Manifest:
    data = _dict(content)
    # The name of the format before anything else: another one says nothing by its keys.
    _require(data.get("format") == FORMAT, f"the format is {data.get('format')!r}, not {FORMAT!r}")
    data = _migrated(data)
    if data.get("format_version") not in (FORMAT_VERSION, SPARSE_VERSION):
        raise CheckpointError(
            expected=f"format version {FORMAT_VERSION} to {SPARSE_VERSION}",
            found=f"format version {data.get('format_version')!r}, saved with torch {data.get('torch')!r}",
            where=str(path),
            ways_out=("load it with the release of ziggurat that saved it, or a newer one", "load another checkpoint"),
        )
    files = {}
    for name, record in _dict(data.get("files")).items():
        _require(_FILE_NAME.fullmatch(name) is not None, f"a file may not be called {name!r}")
        record = _dict(record, "size_bytes", "sha256")
        digest = _string(record["sha256"])
        _require(_DIGEST.fullmatch(digest) is not None, f"{name!r} has no SHA-256")
        files[name] = FileRecord(size_bytes=_count(record["size_bytes"]), sha256=digest)
    _require(STATE_NAME in files, f"{STATE_NAME} is not among the files")
    # Exactly these keys: one more could be something that an older program must not pass over.
    keys = ("format", "format_version", "step", "created", "torch", "world_size", "files", "tensors", "planner")
    is_sparse = data["format_version"] == SPARSE_VERSION
    data = _dict(data, *keys, *(("sparse",) if is_sparse else ()))
    manifest = Manifest(
        step=_count(data["step"]),
        created=_string(data["created"]),
        torch_version=_string(data["torch"]),
        world_size=_count(data["world_size"]),
        files=files,
        tensors={name: _tensor(name, tensor, files) for name, tensor in _dict(data["tensors"]).items()},
        planner_data=None if data["planner"] is None else _planner_data(data["planner"]),
        sparse=entries_from_json(_dict(data["sparse"])) if is_sparse else {},
    )
    # Here, as it needs rows and tensors together.
    check_rows(manifest.sparse, manifest.tensors)
    _require_bytes_used(manifest.tensors, files)
    return manifest


def _migrated(data: dict[str, object]) -> dict[str, object]:
    """A manifest of an older version as today's. Version 2 had rows in the files of ranks, and says itself where."""
    return data | {"format_version": SPARSE_VERSION} if data.get("format_version") == 2 else data


def _tensor(name: str, content: object, files: Mapping[str, FileRecord]) -> StoredTensor:
    data = _dict(content, "dtype", "shape", "chunks")
    code = _string(data["dtype"])
    _require(code in CODE_DTYPES, f"tensor {name!r} has the unknown dtype {code!r}")
    dtype = CODE_DTYPES[code]
    shape = _counts(data["shape"])
    _require(len(shape) <= MAX_DIMENSIONS, f"tensor {name!r} has {len(shape)} dimensions")
    # A size of 0 must not hide others whose product no 64 bits hold.
    _require(prod(max(size, 1) for size in shape) * dtype.itemsize < 1 << 63, f"tensor {name!r} is too large")
    chunks = []
    for item in _list(data["chunks"]):
        parts = _list(item)
        _require(len(parts) == 5, f"a chunk of {name!r} has not five parts")
        offsets, sizes, file, start, num_bytes = parts
        chunk = StoredChunk(
            offsets=_counts(offsets),
            sizes=_counts(sizes),
            file=_string(file),
            start=_count(start),
            num_bytes=_count(num_bytes),
        )
        _require(len(chunk.offsets) == len(chunk.sizes) == len(shape), f"a chunk of {name!r} has the wrong dimensions")
        ends = (offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True))
        _require(all(end <= size for end, size in zip(ends, shape, strict=True)), f"a chunk lies outside {name!r}")
        # Sizes that are written twice have to agree.
        _require(chunk.num_bytes == prod(chunk.sizes) * dtype.itemsize, f"a chunk of {name!r} has the wrong size")
        is_known = chunk.file in files and chunk.file != STATE_NAME
        _require(is_known, f"a chunk of {name!r} lies in the unknown file {chunk.file!r}")
        end = chunk.start + chunk.num_bytes
        _require(end <= files[chunk.file].size_bytes, f"a chunk of {name!r} ends outside {chunk.file}")
        chunks.append(chunk)
    _require(len(chunks) > 0, f"tensor {name!r} has no chunks")
    # Torch finds a chunk by its offsets, so that two of one place would hide each other.
    _require(len({chunk.offsets for chunk in chunks}) == len(chunks), f"two chunks of {name!r} begin at one place")
    # Boxes inside the tensor, with as many elements, that do not overlap: then nothing is missing.
    _require(sum(prod(chunk.sizes) for chunk in chunks) == prod(shape), f"the chunks do not fill {name!r}")
    _require(not _overlap(chunks, shape), f"chunks of {name!r} overlap")
    return StoredTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _overlap(chunks: Sequence[StoredChunk], shape: tuple[int, ...]) -> bool:
    """True if two boxes share an element: a sweep along the longest dimension."""
    # Empty boxes share nothing, and a box without a byte would be found to lie within others.
    boxes = [chunk for chunk in chunks if chunk.num_bytes > 0]
    # A scalar has no axis to sweep along; two chunks of one hold the same element.
    if len(boxes) < 2 or not shape:
        return len(boxes) > 1
    axis = max(range(len(shape)), key=lambda dim: shape[dim])
    boxes.sort(key=lambda box: box.offsets[axis])
    for index, box in enumerate(boxes):
        end = box.offsets[axis] + box.sizes[axis]
        for other in boxes[index + 1 :]:
            # Boxes are sorted, so that no later one can begin before the end, either.
            if other.offsets[axis] >= end:
                break
            if all(
                a < b + other_size and b < a + size
                for a, size, b, other_size in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
    return False


def _require_bytes_used(tensors: Mapping[str, StoredTensor], files: Mapping[str, FileRecord]) -> None:
    """Every byte of a file after its header belongs to exactly one chunk.

    So a small file cannot claim to hold a huge tensor, nor a huge file hide behind small tensors: how much a load reads
    follows from the shapes, which are compared with what is to be filled before the first file is opened.
    """
    _require(files[STATE_NAME].size_bytes <= MAX_STATE_BYTES, f"{STATE_NAME} has more than {MAX_STATE_BYTES} bytes")
    ranges: dict[str, list[tuple[int, int]]] = {}
    for tensor in tensors.values():
        for chunk in tensor.chunks:
            if chunk.num_bytes:
                ranges.setdefault(chunk.file, []).append((chunk.start, chunk.start + chunk.num_bytes))
    for file, record in files.items():
        if file == STATE_NAME:
            continue
        spans = sorted(ranges.get(file, []))
        # Sorted by their first byte, so that neighbours alone have to be compared.
        _require(all(before[1] <= after[0] for before, after in pairwise(spans)), f"chunks in {file} share bytes")
        _require(all(before[1] == after[0] for before, after in pairwise(spans)), f"bytes of {file} are in no chunk")
        # What lies before the first chunk is the header of the file.
        header, end = (spans[0][0], spans[-1][1]) if spans else (record.size_bytes, record.size_bytes)
        _require(header <= MAX_MANIFEST_BYTES, f"{file} begins with a header of {header} bytes")
        _require(end == record.size_bytes, f"{record.size_bytes - end} bytes of {file} are in no chunk")


def _planner_data(data: object) -> dict[str, tuple[str | int, ...]]:
    return {name: tuple(map(_name_or_number, _list(path))) for name, path in _dict(data).items()}


def _name_or_number(part: object) -> str | int:
    if type(part) is str or type(part) is int:
        return part
    raise ValueError("a path is not names and numbers")


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def _dict(value: object, *keys: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not an object")
    _require(not keys or set(value) == set(keys), f"keys {sorted(value)} instead of {sorted(keys)}")
    return value


def _list(value: object) -> list[object]:
    if isinstance(value, list):
        return value
    raise ValueError(f"{value!r:.80} is not a list")


def _string(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(f"{value!r:.80} is not text")


def _count(value: object) -> int:
    # Not `isinstance`, to which True is an integer.
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    raise ValueError(f"{value!r:.80} is not a count")


def _counts(value: object) -> tuple[int, ...]:
    return tuple(_count(item) for item in _list(value))
