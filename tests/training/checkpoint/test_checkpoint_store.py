"""Saving, loading, replacing, keeping, pinning: what a run does with its checkpoints when nothing goes wrong."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.training.checkpoint.checkpoint_cases import (
    FORKSERVER,
    SYNC,
    assert_loads,
    assert_same,
    bits,
    save_steps,
    state_of,
    tensors_of,
)
from ziggurat.config import from_json, to_json
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.training.checkpoint import (
    CheckpointConfig,
    CheckpointReader,
    CheckpointStore,
    Match,
    SaveMode,
    manifest,
    retention,
)
from ziggurat.training.checkpoint import store as store_module
from ziggurat.training.checkpoint.files import DTYPE_CODES


@pytest.mark.parametrize("mode", SaveMode)
def test_every_kind_of_tensor_comes_back_bit_for_bit(tmp_path: Path, mode: SaveMode) -> None:
    store = CheckpointStore(tmp_path, config=CheckpointConfig(mode=mode))
    store.save(7, tensors=tensors_of(7), state=state_of(7))
    checkpoint = store.load()
    assert checkpoint.step == 7
    assert checkpoint.skipped == ()
    assert_same(checkpoint.tensors, tensors_of(7))
    assert checkpoint.state == state_of(7)
    assert list(checkpoint.state) == list(state_of(7))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_type_shape_and_stride(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensors = {}
    for index in range(data.draw(st.integers(0, 5))):
        dtype = data.draw(st.sampled_from(list(DTYPE_CODES)))
        shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, dtype.itemsize), dtype=torch.uint8)
        whole = raw.view(dtype).squeeze(-1) if dtype.itemsize > 1 else raw.view(dtype).reshape(shape)
        order = data.draw(st.permutations(range(len(shape))))
        narrow = [slice(data.draw(st.integers(0, 2)), None, data.draw(st.integers(1, 2))) for _ in shape]
        tensors[f"t{index}"] = whole.permute(order)[tuple(narrow)]
    folder = tmp_path_factory.mktemp("any")
    store = CheckpointStore(folder, config=SYNC)
    store.save(0, tensors=tensors, state={})
    assert_same(store.load().tensors, tensors)
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    store.load(into=into)
    assert_same(into, tensors)


def test_tensors_larger_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("files", "storage"):
        monkeypatch.setattr(f"ziggurat.training.checkpoint.{module}.BLOCK_BYTES", 100)
    tensors = {"tall": torch.randn(999, 3), "wide": torch.randn(3, 999).t(), "row": torch.randn(1, 999)}
    store = CheckpointStore(tmp_path, config=SYNC)
    store.save(0, tensors=tensors, state={})
    assert_same(store.load().tensors, tensors)


def test_loads_into_tensors_of_any_stride(tmp_path: Path) -> None:
    store = save_steps(tmp_path, range(1, 2))
    model = torch.nn.Linear(8, 12, bias=False)
    buffer = torch.zeros(20, 20)
    into = tensors_of(9) | {"table": model.weight, "table.part": buffer[2:18:4, 4:20:2], "expanded": torch.empty(4, 8)}
    checkpoint = store.load(into=into)
    assert checkpoint.tensors is into
    assert_same(into, tensors_of(1))
    assert bits(model.weight) == bits(tensors_of(1)["table"])
    assert int((buffer != 0).sum()) == 4 * 8


def test_other_tools_can_read_and_check_the_files(tmp_path: Path) -> None:
    save_steps(tmp_path, range(3, 4))
    folder = tmp_path / "step-000000000003"
    subprocess.run(["sha256sum", "--strict", "--check", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)
    assert_same(load_file(folder / "rank-00000.safetensors"), tensors_of(3))
    assert json.loads((folder / "state.json").read_text())["step"] == 3
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["torch"] == torch.__version__
    assert manifest["format_version"] == 1


def test_two_hundred_asynchronous_saves_equal_their_snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # durability is not what this asks for
    store = CheckpointStore(tmp_path, config=CheckpointConfig(keep=0))
    weight = torch.zeros(64, 64)
    for step in range(200):
        weight.fill_(step)
        state: dict = {"list": [step]}
        store.save(step, tensors={"weight": weight, "row": weight[3]}, state=state)
        weight.fill_(-1)
        state["list"].append("later")
    store.wait()
    for step in range(200):
        checkpoint = store.load(step)
        assert bool((checkpoint.tensors["weight"] == step).all())
        assert bool((checkpoint.tensors["row"] == step).all())
        assert checkpoint.state == {"list": [step]}


def test_save_returns_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    gate = threading.Event()
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: gate.wait(60) and real(descriptor))
    store.save(1, tensors=tensors_of(1), state=state_of(1))
    assert store.steps() == []
    gate.set()
    store.wait()
    assert store.steps() == [1]


def _save_and_end(folder: str) -> None:
    CheckpointStore(folder).save(1, tensors={"w": torch.ones(1_000_000)}, state={})


def test_a_process_that_ends_finishes_the_checkpoint(tmp_path: Path) -> None:
    process = FORKSERVER.Process(target=_save_and_end, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert bool((CheckpointStore(tmp_path).load().tensors["w"] == 1).all())


def test_keeps_the_newest_and_the_pinned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, config=CheckpointConfig(keep=2))
    for step in range(1, 7):
        store.save(step, tensors=tensors_of(step), state=state_of(step), pinned=step == 2)
    store.wait()
    assert store.steps() == [2, 5, 6]
    store.unpin(2)
    store.pin(5)
    store.save(7, tensors=tensors_of(7), state=state_of(7))
    store.wait()
    assert store.steps() == [5, 6, 7]
    assert CheckpointStore(tmp_path).leftovers == ()
    with pytest.raises(CheckpointError, match="no checkpoint of step 99"):
        store.pin(99)


def test_keep_zero_keeps_all_and_less_is_refused(tmp_path: Path) -> None:
    assert save_steps(tmp_path, range(8)).steps() == list(range(8))
    with pytest.raises(ConfigError, match="keep"):
        CheckpointConfig(keep=-1)


def test_text_in_place_of_an_enum_is_its_member_or_refused() -> None:
    assert CheckpointConfig(mode="async").mode is SaveMode.ASYNC  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="async"):
        CheckpointConfig(mode="asynk")  # pyright: ignore[reportArgumentType]


def test_config_survives_json() -> None:
    config = CheckpointConfig(keep=5, mode=SaveMode.SYNC)
    assert from_json(CheckpointConfig, to_json(config), where="test") == config


def test_the_latest_step_may_be_saved_again(tmp_path: Path) -> None:
    store = save_steps(tmp_path, range(1, 3))
    store.save(2, tensors=tensors_of(9), state=state_of(9), pinned=True)
    assert store.steps() == [1, 2]
    assert_same(store.load(2).tensors, tensors_of(9))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        ".lock",
        "step-000000000001",
        "step-000000000002",
        "step-000000000002.pinned",
    ]


def test_a_reader_sees_one_of_two_checkpoints_of_a_step_that_is_saved_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, config=SYNC)
    store.save(1, tensors=tensors_of(1), state=state_of(1))
    read = manifest.read_small_file

    def saved_again_behind(path: Path, *, max_bytes: int) -> bytearray:
        found = read(path, max_bytes=max_bytes)
        monkeypatch.setattr(manifest, "read_small_file", read)
        store.save(1, tensors=tensors_of(9), state=state_of(9))
        return found

    monkeypatch.setattr(manifest, "read_small_file", saved_again_behind)
    found = manifest.read_manifest(tmp_path / "step-000000000001", step=1)
    assert found == manifest.read_manifest(tmp_path / "step-000000000001")


def test_a_new_run_in_an_old_folder_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 4))
    store = CheckpointStore(tmp_path, config=SYNC)
    for step in (1, 3):
        with pytest.raises(CheckpointError, match="later than every checkpoint"):
            store.save(step, tensors={}, state={})
    store.load()
    store.save(3, tensors=tensors_of(3), state=state_of(3))
    store.save(4, tensors=tensors_of(4), state=state_of(4))
    assert store.steps() == [1, 2, 3, 4]


def test_going_on_from_an_earlier_step_must_be_said(tmp_path: Path) -> None:
    save_steps(tmp_path, range(1, 5))
    store = CheckpointStore(tmp_path, config=SYNC)
    store.pin(4)
    assert store.load(2).step == 2
    with pytest.raises(CheckpointError, match=r"discard_after\(2\)"):
        store.save(3, tensors=tensors_of(3), state=state_of(3))
    assert store.discard_after(2) == [3, 4]
    store.save(3, tensors=tensors_of(3), state=state_of(3))
    assert_loads(tmp_path, 3)


@pytest.mark.parametrize("step", [-1, 10**12])
def test_impossible_steps(tmp_path: Path, step: int) -> None:
    with pytest.raises(CheckpointError, match=str(step)):
        CheckpointStore(tmp_path, config=SYNC).save(step, tensors={}, state={})


def test_nothing_to_load(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "not yet")
    assert store.steps() == []
    with pytest.raises(CheckpointError, match="an intact checkpoint"):
        store.load()
    with pytest.raises(CheckpointError, match="no checkpoint of step 3"):
        store.load(3)
    assert not (tmp_path / "not yet").exists()


def test_names_that_do_not_fit_are_told_with_the_nearest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, config=SYNC)
    store.save(1, tensors={"tables.user.weight": torch.ones(2), "head.bias": torch.ones(1)}, state={})
    into = {"table.user.weight": torch.zeros(2), "head.bias": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"'table\.user\.weight' \(nearest: 'tables\.user\.weight'\)"):
        store.load(into=into)
    with pytest.raises(CheckpointError, match=r"no place for: 'tables\.user\.weight'"):
        store.load(into={"head.bias": into["head.bias"]})
    assert float(into["head.bias"]) == 0.0
    store.load(into={"head.bias": into["head.bias"]}, match=Match.SUBSET)
    assert float(into["head.bias"]) == 1.0


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(2).double(), torch.zeros(2).int()])
def test_types_and_shapes_that_do_not_fit_change_nothing(tmp_path: Path, wrong: torch.Tensor) -> None:
    store = CheckpointStore(tmp_path, config=SYNC)
    store.save(1, tensors={"a": torch.ones(2), "b": torch.ones(2)}, state={})
    right = torch.zeros(2)
    with pytest.raises(CheckpointError, match="'b'"):
        store.load(into={"a": right, "b": wrong})
    assert not right.any()


@pytest.mark.parametrize(
    ("tensors", "state", "told"),
    [
        ({"w": 3}, {}, "int for 'w'"),
        ({"": torch.ones(1)}, {}, "''"),
        ({"__metadata__": torch.ones(1)}, {}, "__metadata__"),
        ({"w": torch.ones(2, device="meta")}, {}, "'w'"),
        ({"w": torch.eye(2).to_sparse()}, {}, "sparse"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, {}, "complex64"),
        ({}, {"a": {"b": [1, (2, 3)]}}, r"state\['a'\]\['b'\]\[1\]"),
        ({}, {"a": {1: 2}}, r"state\['a'\]"),
        ({}, {"a": torch.ones(1)}, "Tensor"),
        ({}, {"a": object()}, "object"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, tensors: dict, state: dict, told: str) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match=told):
        store.save(1, tensors=tensors, state=state)
    assert list(tmp_path.iterdir()) == []
    store.save(1, tensors={}, state={})
    store.wait()
    assert store.steps() == [1]


def test_one_save_at_a_time_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    real = os.fsync
    save_steps(tmp_path, range(1, 2))
    monkeypatch.setattr(os, "fsync", lambda descriptor: gate.wait(60) and real(descriptor))
    first, second = CheckpointStore(tmp_path), CheckpointStore(tmp_path)
    first.save(2, tensors=tensors_of(2), state=state_of(2))
    monkeypatch.setattr(retention, "_PATIENCE_S", 0.1)
    with pytest.raises(CheckpointError, match="still running"):
        second.save(3, tensors=tensors_of(3), state=state_of(3))
    reader = CheckpointStore(tmp_path)  # a reader must not clean up under a living writer
    assert reader.leftovers == ()
    assert reader.load().step == 1
    gate.set()
    first.wait()
    second.save(3, tensors=tensors_of(3), state=state_of(3))
    second.wait()
    assert second.steps() == [1, 2, 3]


@pytest.mark.parametrize("moment", ["before its files are verified", "before they are read"])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, moment: str
) -> None:
    """As by a run that goes on in another process, and keeps the newest alone."""
    writer = CheckpointStore(tmp_path, config=CheckpointConfig(keep=1, mode=SaveMode.SYNC))
    writer.save(1, tensors=tensors_of(1), state=state_of(1))
    reader = CheckpointStore(tmp_path)
    place, name = (CheckpointReader, "verify") if "verified" in moment else (store_module, "read_tensors")
    read = getattr(place, name)

    def behind_the_writer(*arguments: object, **settings: object) -> object:
        monkeypatch.setattr(place, name, read)
        step = writer.steps()[-1] + 1
        writer.save(step, tensors=tensors_of(step), state=state_of(step))
        return read(*arguments, **settings)

    monkeypatch.setattr(place, name, behind_the_writer)
    checkpoint = reader.load()
    assert (checkpoint.step, checkpoint.skipped) == (2, ())
    assert_same(checkpoint.tensors, tensors_of(2))
    assert "damaged" not in caplog.text
    if place is CheckpointReader:
        monkeypatch.setattr(place, name, behind_the_writer)
        with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
            reader.load(2)


def test_a_save_waits_for_a_process_that_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    store = save_steps(tmp_path, range(1, 2))
    reader = retention.FolderLock(tmp_path)
    reader.acquire()
    timer = threading.Timer(0.2, reader.release)
    timer.start()
    store.save(2, tensors=tensors_of(2), state=state_of(2))
    timer.join()
    store.wait()
    assert store.steps() == [1, 2]


def test_who_reads_a_folder_leaves_alone_what_is_being_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = save_steps(tmp_path, range(1, 4))
    delete = retention._delete
    left: list[str] = []

    def before_a_reader(path: Path) -> None:
        left.extend(CheckpointStore(tmp_path).leftovers)
        delete(path)

    monkeypatch.setattr(retention, "_delete", before_a_reader)
    assert store.discard_after(1) == [2, 3]
    assert left == []
    assert store.steps() == [1]


def test_context_manager_waits_and_does_not_hide_errors(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, tensors=tensors_of(1), state=state_of(1))
    assert_loads(tmp_path, 1)

    def fail() -> None:
        with CheckpointStore(tmp_path) as store:
            store.load()
            store.save(2, tensors=tensors_of(2), state=state_of(2))
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert_loads(tmp_path, 2)


def test_leftovers_are_removed_and_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, range(1, 3))
    for name in (".partial-step-000000000003", ".pruned-step-000000000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-000000000003.pinned").touch()
    (tmp_path / "step-000000000002").rename(tmp_path / ".replaced-step-000000000002")
    (tmp_path / "step-000000000002.pinned").touch()
    (tmp_path / "mine.txt").touch()
    with caplog.at_level(logging.WARNING):
        store = CheckpointStore(tmp_path)
    assert set(store.leftovers) == {
        ".partial-step-000000000003",
        ".pruned-step-000000000000",
        ".replaced-step-000000000002",
        "step-000000000003.pinned",
    }
    assert ".partial-step-000000000003" in caplog.text
    assert store.steps() == [1, 2]
    assert (tmp_path / "mine.txt").exists()
    assert (tmp_path / "step-000000000002.pinned").exists()
    assert_loads(tmp_path, 2)
    assert CheckpointStore(tmp_path).leftovers == ()


def _peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _measure_memory(folder: str, mode: SaveMode, sender) -> None:
    size = 128 << 20
    tensors = {f"table {index}": torch.ones(size // 16 // 4, 4) for index in range(4)}
    into = {"table 0": torch.zeros(size // 16 // 4, 4)}
    with CheckpointStore(folder, config=CheckpointConfig(mode=mode)) as store:
        store.save(0, tensors={"small": torch.ones(9)}, state={})
        store.wait()
        before = _peak_bytes()
        store.save(1, tensors=tensors, state={})
    saved = _peak_bytes()
    store.load(1, into=into, match=Match.SUBSET)
    sender.send(((saved - before) / size, (_peak_bytes() - saved) / size))


@pytest.mark.parametrize(("mode", "copies"), [(SaveMode.SYNC, 0), (SaveMode.ASYNC, 1)])
def test_memory_is_one_copy_at_most(tmp_path: Path, mode: SaveMode, copies: int) -> None:
    receiver, sender = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_measure_memory, args=(str(tmp_path), mode, sender))
    process.start()
    sender.close()
    saving, loading = receiver.recv()
    process.join()
    assert copies - 0.2 < saving < copies + 0.25
    assert loading < 0.25


@pytest.mark.gpu
@pytest.mark.parametrize("mode", SaveMode)
def test_tensors_on_a_device(tmp_path: Path, mode: SaveMode) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tensors = {name: tensor.cuda() for name, tensor in tensors_of(1).items()}
    tensors["tall"] = torch.randn(3_000_000, 4, device="cuda")
    tensors["columns"] = tensors["tall"][:, 1:3]
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    with CheckpointStore(tmp_path, config=CheckpointConfig(mode=mode)) as store:
        store.save(1, tensors=tensors, state={})
        for tensor in tensors.values():
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(tensor.untyped_storage()).zero_()
    assert_same(store.load().tensors, expected)
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for name, tensor in expected.items()}
    store.load(into=into)
    assert_same(into, expected)
