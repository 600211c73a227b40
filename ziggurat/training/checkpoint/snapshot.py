"""What goes into a checkpoint: tensors of flat names, JSON for the rest, and a copy of both that training cannot touch.

An asynchronous save returns as soon as the values are copied; the copy is what a background thread writes. (Torch's
own asynchronous save of host tensors once wrote *later* values: pytorch issue 144657.) Only the chunks that this rank
writes are copied, into host memory (from a GPU through two locked blocks, `pinned.py`), and each is given back once it
is written: at most one copy beyond the model.

State is JSON in the strict sense: what is loaded equals what was saved. Tuples (they would come back as lists), keys
that are not text and objects are refused by name; NaN and infinity are allowed, in Python's notation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from ziggurat.config import JSON
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint.files import DTYPE_CODES
from ziggurat.training.checkpoint.pinned import to_host

_RESERVED_NAMES = ("", "__metadata__")


class SnapshotPlanner(DefaultSavePlanner):
    """Torch's planner for a flat dict of tensors, able to hold copies of what this rank writes."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies: dict[MetadataIndex, Tensor] = {}

    def copy_plan(self, plan: SavePlan) -> None:
        """Copy every chunk of `plan` to host memory; later changes of the tensors are not seen."""
        name = ""
        try:
            for item in plan.items:
                name = item.index.fqn
                source = super().lookup_object(item.index).detach()
                self._copies[item.index] = to_host(source)
        # Torch's own allocator raises RuntimeError where the host's memory is full.
        except (MemoryError, RuntimeError) as error:
            raise CheckpointError(
                expected="host memory for a copy of what is saved",
                found=str(error).splitlines()[0],
                where=f"tensor {name!r}",
                ways_out=("save with mode = sync, which needs no copy", "free host memory"),
            ) from error
        self.state_dict = {}  # the live tensors are not needed any more, nor kept alive

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The copy of a chunk, handed over once; the live tensor if no copies were made."""
        copy = self._copies.pop(index, None)
        return super().lookup_object(index) if copy is None else copy


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    """Raise `CheckpointError` for what cannot be saved, naming the tensor."""
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name in _RESERVED_NAMES:
            raise _cannot_save("a name", f"{name!r}", "rename the tensor")
        if not isinstance(tensor, Tensor):
            raise _cannot_save(
                "a tensor",
                f"{type(tensor).__name__} for {name!r}",
                "pass what is not a tensor in `state`, as JSON",
            )
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise _cannot_save(
                "a sharded or replicated tensor",
                f"{name!r} has partial sums: {tensor.placements}",
                "redistribute it to Shard or Replicate first",
            )
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPE_CODES or tensor.is_meta:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
            raise _cannot_save(
                f"a dense tensor with values, of one of the types {known}",
                f"{name!r} is {tensor.dtype}, {tensor.layout} on {tensor.device}",
                "convert it before saving",
            )


def encode_state(state: Mapping[str, JSON]) -> bytes:
    """State as JSON text; raises `CheckpointError` with the path of what would not come back as it is."""
    _check_json(dict(state), "state")
    return json.dumps(dict(state), indent=1).encode()


def decode_state(text: bytes | bytearray) -> dict[str, JSON]:
    """Return what `encode_state` was given; raise ValueError or RecursionError for anything else."""
    state = json.loads(text)
    if not isinstance(state, dict):
        raise ValueError(f"{type(state).__name__} instead of an object")
    return state


def _check_json(value: object, path: str) -> None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_json(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _cannot_save("text as a key", f"{key!r}", "write the key as text", where=path)
            _check_json(item, f"{path}[{key!r}]")
    else:
        raise _cannot_save(
            "null, boolean, number, text, list or dict",
            f"{type(value).__name__}: {value!r:.80}",
            ("pass tensors in `tensors`", "turn tuples into lists, and objects into dicts of plain values"),
            where=path,
        )


def _cannot_save(
    expected: str, found: str, ways_out: str | tuple[str, ...], *, where: str = "save(tensors=…)"
) -> CheckpointError:
    return CheckpointError(expected=expected, found=found, where=where, ways_out=ways_out)
