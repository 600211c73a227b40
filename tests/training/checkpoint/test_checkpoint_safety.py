"""Checkpoints made with bad intentions: nothing is executed, nothing outside the folder is read, nothing crashes."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.checkpoint.checkpoint_cases import (
    SYNC,
    assert_loads,
    rewrite_manifest,
    save_steps,
    write_manifest_text,
)
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint import CheckpointStore, DamagedCheckpointError


@pytest.fixture
def crafted(tmp_path: Path) -> Path:
    """A checkpoint to be tampered with."""
    store = CheckpointStore(tmp_path, config=SYNC)
    store.save(1, tensors={"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5)}, state={"x": 1})
    return tmp_path / "step-000000000001"


class _Bomb:
    """Leaves a mark where a pickle of it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def test_a_pickle_in_the_folder_is_never_executed(tmp_path: Path) -> None:
    import pickle

    mark = tmp_path / "executed"
    bomb = pickle.dumps(_Bomb(mark))
    save_steps(tmp_path, range(1, 3))
    folder = tmp_path / "step-000000000002"
    for name in (".metadata", "metadata.pkl", "__0_0.distcp", "rank-00009.safetensors"):
        (folder / name).write_bytes(bomb)
    assert_loads(tmp_path, 2)
    for name in ("manifest.json", "SHA256SUMS", "state.json", "rank-00000.safetensors"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(bomb)
        assert_loads(tmp_path, 1)
        (folder / name).write_bytes(kept)
    assert not mark.exists()
    pickle.loads(bomb)
    assert mark.exists()  # the bomb works


def _set(*path: Any) -> Callable[[dict], None]:
    """A change that sets the value at a path."""

    def change(manifest: dict) -> None:
        *keys, last, value = path
        for key in keys:
            manifest = manifest[key]
        manifest[last] = value

    return change


FILE = "rank-00000.safetensors"
CHUNK = ("tensors", "a", "chunks", 0)
RECORD = {"size_bytes": 4, "sha256": "0" * 64}
HUGE = 1 << 62


def _two_chunks(first: list, second: list) -> Callable[[dict], None]:
    return _set("tensors", "a", "chunks", [first, second])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_set("files", "../secret", RECORD), "may not be called '../secret'"),
        (_set("files", "/etc/passwd", RECORD), "may not be called"),
        (_set("files", "a/rank-00000.safetensors", RECORD), "may not be called"),
        (_set("files", "rank-00000.safetensors\n", RECORD), "may not be called"),
        (_set("files", FILE, "size_bytes", -1), "not a count"),
        (_set("files", FILE, "size_bytes", True), "not a count"),
        (_set("files", FILE, "size_bytes", 1e3), "not a count"),
        (_set("files", FILE, "size_bytes", HUGE), "bytes"),
        (_set("files", FILE, "sha256", "0" * 63), "no SHA-256"),
        (_set("files", FILE, RECORD | {"more": 1}), "keys"),
        (lambda manifest: manifest["files"].pop("state.json"), "state.json is not among the files"),
        (lambda manifest: manifest["files"].pop(FILE), "unknown file"),
        (lambda manifest: manifest.pop("tensors"), "keys"),
        (_set("more", 1), "keys"),
        (_set("format", "other"), "the format is 'other'"),
        (_set("step", 2), "step 2"),
        (_set("step", "1"), "not a count"),
        (_set("tensors", []), "not an object"),
        (_set("tensors", "a", "dtype", "F31"), "unknown dtype 'F31'"),
        (_set("tensors", "a", "dtype", ["F32"]), "not text"),
        (_set("tensors", "a", "dtype", "F64"), "wrong size"),
        (_set("tensors", "a", "shape", [4, 3, 1]), "wrong dimensions"),
        (_set("tensors", "a", "shape", [1 << 40, 3]), "do not fill"),
        (_set("tensors", "a", "shape", [HUGE, HUGE, 0]), "too large"),
        (_set("tensors", "a", "shape", [1] * 100_000), "100000 dimensions"),
        (_set("tensors", "a", "shape", [-4, -3]), "not a count"),
        (_set("tensors", "a", "chunks", []), "no chunks"),
        (_set("tensors", "a", "chunks", [[]]), "five parts"),
        (_set(*CHUNK, 0, [1, 0]), "outside 'a'"),
        (_set(*CHUNK, 1, [HUGE, HUGE]), "outside 'a'"),
        (_set(*CHUNK, 2, "../../secret"), "unknown file"),
        (_set(*CHUNK, 2, "state.json"), "unknown file"),
        (_set(*CHUNK, 2, "manifest.json"), "unknown file"),
        (_set(*CHUNK, 3, 1 << 40), "ends outside"),
        (_set(*CHUNK, 3, -8), "not a count"),
        (_set(*CHUNK, 4, 40), "wrong size"),
        (_set(*CHUNK, 4, 48.0), "not a count"),
        (lambda manifest: manifest["tensors"].update(c=manifest["tensors"]["a"]), "share bytes"),
        (_two_chunks([[0, 0], [2, 3], FILE, 0, 24], [[0, 0], [2, 3], FILE, 24, 24]), "begin at one place"),
        (_two_chunks([[0, 0], [2, 3], FILE, 0, 24], [[1, 0], [2, 3], FILE, 24, 24]), "overlap"),
        (_two_chunks([[0, 0], [1, 3], FILE, 0, 12], [[1, 0], [1, 3], FILE, 12, 12]), "do not fill"),
        (_set("planner", {"a": [["x"]]}), "a path is not names"),
        (_set("planner", []), "not an object"),
    ],
)
def test_a_crafted_manifest_is_refused(crafted: Path, change: Callable[[dict], object], told: str) -> None:
    (crafted.parent / "secret").write_bytes(b"1234")
    rewrite_manifest(crafted, lambda manifest: change(manifest) and None)
    with pytest.raises(DamagedCheckpointError) as caught:
        CheckpointStore(crafted.parent).load(1)
    assert told in caught.value.found + caught.value.expected
    assert crafted.name in caught.value.where


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        '{"format": "ziggurat-checkpoint", "format": "ziggurat-checkpoint"}',
        '{"format": NaN}',
        '{"format": 1e999}',
        "[" * 100_000,
        '{"a":' * 100_000,
        "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1"),
        '{"step": ' + "9" * 10_000 + "}",
    ],
)
def test_what_is_no_manifest_is_refused(crafted: Path, text: str) -> None:
    write_manifest_text(crafted, text)
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json"):
        CheckpointStore(crafted.parent).load(1)


TB = 10**12


def _claim_a_terabyte(crafted: Path, *, shape: list[int], start: int) -> None:
    """Let one file be a terabyte of nothing, and the manifest say that tensor 'a' begins at byte `start` of it."""
    manifest = json.loads((crafted / "manifest.json").read_text())
    os.truncate(crafted / FILE, TB)
    manifest["files"][FILE]["size_bytes"] = TB
    chunk = [[0, 0], shape, FILE, start, 4 * shape[0] * shape[1]]
    manifest["tensors"] = {"a": {"dtype": "F32", "shape": shape, "chunks": [chunk]}}
    write_manifest_text(crafted, json.dumps(manifest))


def test_a_terabyte_behind_small_tensors_is_refused(crafted: Path) -> None:
    _claim_a_terabyte(crafted, shape=[4, 3], start=64)
    with pytest.raises(DamagedCheckpointError, match=r"bytes of rank-00000\.safetensors are in no chunk"):
        CheckpointStore(crafted.parent).load(1, into={"a": torch.zeros(4, 3)})


def test_a_terabyte_of_holes_is_not_read(crafted: Path) -> None:
    rows = (TB - 2**10) // 8
    _claim_a_terabyte(crafted, shape=[rows, 2], start=TB - 8 * rows)
    store = CheckpointStore(crafted.parent)
    with pytest.raises(DamagedCheckpointError, match="the rest are holes"):
        store.verify(1)
    with pytest.raises(CheckpointError, match="shape"):
        store.load(1, into={"a": torch.zeros(4, 3)})  # compared before a byte is read
    with pytest.raises(CheckpointError, match=r"tensors that fit .* free of"):
        store.load(1)


@pytest.mark.parametrize("text", ["[1]", '"text"', "{", "[" * 100_000])
def test_a_crafted_state_is_refused(crafted: Path, text: str) -> None:
    data = text.encode()
    (crafted / "state.json").write_bytes(data)
    record = {"size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_manifest(crafted, _set("files", "state.json", record))
    into = {"a": torch.zeros(4, 3), "b": torch.zeros(5)}
    with pytest.raises(DamagedCheckpointError, match=r"state\.json"):
        CheckpointStore(crafted.parent).load(1, into=into)
    assert not into["a"].any()


def test_an_unknown_version_is_told_and_not_skipped(crafted: Path) -> None:
    store = CheckpointStore(crafted.parent, config=SYNC)
    store.load()
    store.save(2, tensors={"a": torch.ones(1)}, state={})
    rewrite_manifest(crafted.parent / "step-000000000002", _set("format_version", 4))
    for step in (None, 2):
        with pytest.raises(CheckpointError, match="format version 4") as caught:
            CheckpointStore(crafted.parent).load(step)
        assert not isinstance(caught.value, DamagedCheckpointError)
        assert torch.__version__ in caught.value.found
    assert store.load(1).step == 1


def _values(manifest: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all values in a manifest."""
    paths = [path] if path else []
    items = (
        manifest.items() if isinstance(manifest, dict) else enumerate(manifest) if isinstance(manifest, list) else ()
    )
    for key, value in items:
        paths += _values(value, (*path, key))
    return paths


def _fuzz(crafted: Path, *, count: int) -> int:
    """Replace random values of the manifest by others; how many were accepted (another program's truth, but safe)."""
    randomness = random.Random(count)
    manifest = json.loads((crafted / "manifest.json").read_text())
    paths = _values(manifest)
    odd = [
        None,
        True,
        -1,
        0,
        1,
        2,
        3,
        4,
        5,
        12,
        48,
        2**31,
        2**62,
        2**64,
        10**400,
        1.5,
        "",
        "a",
        FILE,
        "F16",
        "I32",
        "F64",
    ]
    odd += [[], {}, [0], [0, 0], [4, 3], [3, 4], [12], [2**62, 0], {"a": 1}, [[]], "../x", "state.json", "\0", "é"]
    accepted = 0
    for _ in range(count):
        changed = copy.deepcopy(manifest)
        for _ in range(randomness.choice([1, 1, 1, 2, 3])):
            *keys, last = randomness.choice(paths)
            try:
                place = changed
                for key in keys:
                    place = place[key]
                place[last] = copy.deepcopy(randomness.choice(odd))
            except (KeyError, IndexError, TypeError):
                continue  # an earlier change took the place away
        write_manifest_text(crafted, json.dumps(changed))
        try:
            checkpoint = CheckpointStore(crafted.parent).load(1)
        except CheckpointError:
            continue
        accepted += 1
        assert all(tensor.numel() <= 17 for tensor in checkpoint.tensors.values())
    return accepted


def test_three_hundred_random_changes_of_the_manifest(crafted: Path) -> None:
    assert _fuzz(crafted, count=300) < 100


@pytest.mark.slow
def test_ten_thousand_random_changes_of_the_manifest(crafted: Path) -> None:
    assert _fuzz(crafted, count=10_000) < 3000


def test_a_partial_folder_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", range(1, 2))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    (tmp_path / "run" / ".partial-step-000000000002").symlink_to(tmp_path / "mine")
    store = CheckpointStore(tmp_path / "run", config=SYNC)
    assert store.leftovers == (".partial-step-000000000002",)
    store.load()
    (tmp_path / "run" / ".partial-step-000000000002").symlink_to(tmp_path / "mine")
    store.save(2, tensors={}, state={})
    assert (tmp_path / "mine" / "precious").exists()
    assert store.steps() == [1, 2]
    shutil.rmtree(tmp_path / "run")
