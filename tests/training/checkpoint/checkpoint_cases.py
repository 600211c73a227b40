"""Tensors of every kind, and checks that know what a step must contain. Shared by the tests of this folder."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode

# Forking from a server that has torch loaded costs 0.1 s a process; starting an interpreter seconds.
FORKSERVER = multiprocessing.get_context("forkserver")

SYNC = CheckpointConfig(mode=SaveMode.SYNC, keep=0)


def tensors_of(step: int) -> dict[str, Tensor]:
    """A small model's worth of tensors, a pure function of the step: every type, size and layout that matters."""
    random = torch.Generator().manual_seed(step)
    base = torch.randn(12, 8, generator=random)
    return {
        "table": base,
        "table.part": base[3:7],
        "table.columns": base[:, 2:5],
        "table.transposed": base.t(),
        "expanded": base[0].expand(4, 8),
        "bf16": base.bfloat16(),
        "fp16": base.half(),
        "fp64": base.double(),
        "fp8": base.to(torch.float8_e4m3fn),
        "int8": torch.randint(-128, 128, (11,), generator=random, dtype=torch.int8),
        "uint8": torch.randint(0, 256, (5056,), generator=random, dtype=torch.uint8),
        "int64": torch.randint(-(2**60), 2**60, (3, 1, 2), generator=random),
        "bool": torch.randint(0, 2, (9,), generator=random).bool(),
        "nan": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "empty": torch.empty(0),
        "no rows": torch.empty(0, 16, dtype=torch.int32),
        "scalar": torch.tensor(step, dtype=torch.float64),
        "count": torch.tensor(step),
    }


def state_of(step: int) -> dict:
    """State that goes with `tensors_of`."""
    return {"step": step, "epoch": 1, "name": "é ☃", "list": [1, 2.5, None, True], "nested": {"best": float("-inf")}}


def bits(tensor: Tensor) -> bytes:
    """The bytes of a tensor, so that NaN equals NaN and 0.0 differs from -0.0."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Equal names, types, shapes and bits."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits(found[name]) == bits(tensor), name


def save_steps(folder: Path, steps: range) -> CheckpointStore:
    """A store with a checkpoint of each step."""
    store = CheckpointStore(folder, config=SYNC)
    for step in steps:
        store.save(step, tensors=tensors_of(step), state=state_of(step))
    return store


def assert_loads(folder: Path, step: int) -> None:
    """The newest intact checkpoint is that of `step`, and is right to the bit."""
    checkpoint = CheckpointStore(folder).load()
    assert checkpoint.step == step
    assert_same(checkpoint.tensors, tensors_of(step))
    assert checkpoint.state == state_of(step)


def rewrite_manifest(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the manifest of a checkpoint and recompute SHA256SUMS, as somebody with bad intentions would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    changed = change(manifest)
    write_manifest_text(folder, json.dumps(manifest if changed is None else changed))


def write_manifest_text(folder: Path, text: str) -> None:
    """Put any text in place of the manifest, with fitting sums where it has files."""
    data = text.encode()
    (folder / "manifest.json").write_bytes(data)
    lines = [f"{hashlib.sha256(data).hexdigest()}  manifest.json\n"]
    with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        lines += [f"{record['sha256']}  {name}\n" for name, record in json.loads(text)["files"].items()]
    (folder / "SHA256SUMS").write_text("".join(lines))


class SystemCalls:
    """Stands in for functions of `os`: counts the calls, and does something at one of them.

    Args:
        at: number of the call (from 0) at which `action` runs; negative for never.
        action: called with the name of the function; what it raises, the call raises.
    """

    NAMES = ("open", "write", "fsync", "close", "rename", "link", "mkdir", "unlink", "rmdir", "posix_fadvise", "readv")

    def __init__(self, *, at: int = -1, action: Callable[[str], None] = lambda name: None) -> None:
        self.count = 0
        self.log: list[tuple[str, tuple]] = []
        self._at, self._action = at, action
        self._real = {name: getattr(os, name) for name in self.NAMES}

    def __enter__(self) -> SystemCalls:
        for name in self.NAMES:
            setattr(os, name, self._wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(os, name, function)

    def _wrapped(self, name: str) -> Callable:
        def call(*args, **kwargs):
            number, self.count = self.count, self.count + 1
            self.log.append((name, args))
            if number == self._at:
                if name == "close":  # which gives the descriptor back even when it fails
                    self._real[name](*args)
                self._action(name)
            return self._real[name](*args, **kwargs)

        return call
