"""A full or broken disk, a folder without write access: a clear error, earlier checkpoints untouched, life goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.training.checkpoint.checkpoint_cases import (
    FORKSERVER,
    SYNC,
    SystemCalls,
    assert_loads,
    save_steps,
    state_of,
    tensors_of,
)
from ziggurat.errors import CheckpointError
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode


def raising(number: int) -> Callable[[str], None]:
    """An action that fails like the operating system."""

    def fail(_: str) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("mode", SaveMode)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_or_broken_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, mode) -> None:
    save_steps(tmp_path, range(1, 3))
    store = CheckpointStore(tmp_path, config=CheckpointConfig(mode=mode))
    with monkeypatch.context() as patched:
        patched.setattr(os, call, lambda *_: raising(number)(""))
        with pytest.raises(CheckpointError, match=os.strerror(number)) as caught, store:
            store.save(3, tensors=tensors_of(3), state=state_of(3))
    assert "step-000000000003" in caught.value.where
    assert any("training can go on" in way for way in caught.value.ways_out)
    store.wait()  # told once
    assert not any(entry.name.startswith(".p") for entry in tmp_path.iterdir())
    assert_loads(tmp_path, 2)
    store.save(3, tensors=tensors_of(3), state=state_of(3))
    store.wait()
    assert_loads(tmp_path, 3)


@pytest.mark.parametrize("mode", SaveMode)
def test_no_earlier_checkpoint_is_spoken_of_where_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: SaveMode, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path / "new", config=CheckpointConfig(mode=mode))
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda *_: raising(errno.EFBIG)(""))
        with pytest.raises(CheckpointError, match="File too large") as caught, store:
            store.save(3, tensors=tensors_of(3), state=state_of(3))
    assert caught.value.ways_out == ("raise the limit on file sizes (ulimit -f)",)
    assert "ways out" not in caplog.text  # the error that is raised says them


@pytest.mark.parametrize("ask", ["save", "load", "verify", "discard_after"])
def test_the_next_call_tells_what_happened_in_the_background(tmp_path: Path, monkeypatch, ask: str) -> None:
    store = save_steps(tmp_path, range(1, 3))
    store = CheckpointStore(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda *_: raising(errno.ENOSPC)(""))
        store.save(3, tensors=tensors_of(3), state=state_of(3))
        assert store._thread is not None
        store._thread.join()
    calls = {
        "save": lambda: store.save(4, tensors=tensors_of(4), state=state_of(4)),
        "load": store.load,
        "verify": lambda: store.verify(1),
        "discard_after": lambda: store.discard_after(2),
    }
    with pytest.raises(CheckpointError, match="No space left"):
        calls[ask]()
    calls[ask]()
    store.wait()


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, memoryview(data)[:7]))
    save_steps(tmp_path, range(1, 2))
    assert_loads(tmp_path, 1)


def test_a_disk_that_lies_is_found_before_publication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = save_steps(tmp_path, range(1, 2))
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if len(data) > 5000:
            data = memoryview(bytes(data[:-1]) + bytes([data[-1] ^ 1]))
        return real(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors"):
            store.save(2, tensors={"w": torch.randint(0, 256, (9000,), dtype=torch.uint8)}, state={})
    assert store.steps() == [1]
    assert_loads(tmp_path, 1)


def _save(store: CheckpointStore, step: int, content: int) -> str:
    """Save and wait; what went wrong, in the system's words, or nothing."""
    try:
        store.save(step, tensors=tensors_of(content), state=state_of(content))
        store.wait()
    except CheckpointError as error:
        return error.found
    return ""


def _fail_at_every_call(folder: Path, *, step: int, stride: int) -> None:
    """Fail each system call of a save in turn; whatever the outcome, something intact is there, and saving works."""
    at, failed, saved = 0, 0, 0
    while True:
        here = folder / str(at)
        save_steps(here, range(1, 2))
        store = CheckpointStore(here, config=SYNC)
        store.load()
        with SystemCalls(at=at, action=raising(errno.EIO)) as calls:
            told = _save(store, step, 20)
        assert told in ("", "Input/output error")
        failed, saved = failed + bool(told), saved + (not told)
        checkpoint = CheckpointStore(here).load()
        assert checkpoint.skipped == ()
        assert checkpoint.state in (state_of(20), state_of(1))
        store.save(step + 1, tensors=tensors_of(21), state=state_of(21))
        assert store.load().state == state_of(21)
        assert not any(entry.name.startswith((".partial", ".replaced")) for entry in here.iterdir()), at
        shutil.rmtree(here)
        if calls.count <= at:
            break
        at += stride
    assert failed > saved > 0


@pytest.mark.parametrize("step", [2, 1])
def test_errors_at_system_calls_throughout_a_save(tmp_path: Path, step: int) -> None:
    _fail_at_every_call(tmp_path, step=step, stride=4)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1])
def test_errors_at_every_system_call_of_a_save(tmp_path: Path, step: int) -> None:
    _fail_at_every_call(tmp_path, step=step, stride=1)


def test_every_file_is_on_disk_before_its_name_counts(tmp_path: Path) -> None:
    store = save_steps(tmp_path, range(1, 2))
    with SystemCalls() as calls:
        store.save(2, tensors=tensors_of(2), state=state_of(2))
    opened: dict[str, str] = {}
    events = []
    for name, args in calls.log:
        if name == "open" and args[1] & (os.O_WRONLY | os.O_DIRECTORY):
            opened["last"] = Path(args[0]).name
        elif name == "fsync":
            events.append(f"fsync {opened['last']}")
        elif name == "rename":
            events.append(f"rename {Path(args[1]).name}")
    assert events == [
        "fsync rank-00000.safetensors",
        "fsync state.json",
        "fsync manifest.json",
        "fsync SHA256SUMS",
        "fsync .partial-step-000000000002",
        "rename step-000000000002",
        f"fsync {tmp_path.name}",
    ]


def _save_with_limit(folder: str, limit: int) -> None:
    store = CheckpointStore(folder)
    store.load()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    with pytest.raises(CheckpointError, match="File too large") as caught, store:
        store.save(3, tensors={"w": torch.ones(100_000)}, state={})
    assert "ulimit -f" in str(caught.value)


@pytest.mark.parametrize("limit", [10_000, 399_999])
def test_a_limit_on_file_sizes(tmp_path: Path, limit: int) -> None:
    save_steps(tmp_path, range(1, 3))
    process = FORKSERVER.Process(target=_save_with_limit, args=(str(tmp_path), limit))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert CheckpointStore(tmp_path).leftovers == ()
    assert_loads(tmp_path, 2)


def _without_write_access(folder: str) -> None:
    if os.getuid() == 0:  # to whom everything is allowed
        os.setuid(65534)
    store = CheckpointStore(folder)
    assert store.load().step == 2  # reading needs no write access, not even for the lock
    assert _save(store, 3, 3) == "Permission denied"


def test_a_folder_without_write_access(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save_steps(folder, range(1, 3))
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path.name.startswith(("pytest", "popen", tmp_path.name)):
            path.chmod(0o755)
    (folder / ".lock").chmod(0o444)
    folder.chmod(0o555)
    process = FORKSERVER.Process(target=_without_write_access, args=(str(folder),))
    process.start()
    process.join()
    folder.chmod(0o755)
    assert process.exitcode == 0
    assert_loads(folder, 2)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        CheckpointStore(tmp_path / "file" / "checkpoints", config=SYNC).save(1, tensors={}, state={})


def test_no_memory_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, tensors = CheckpointStore(tmp_path), tensors_of(1)

    def no_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("ziggurat.training.checkpoint.snapshot.torch.empty", no_memory)
        with pytest.raises(CheckpointError, match="mode = sync"):
            store.save(1, tensors=tensors, state=state_of(1))
    store.save(1, tensors=tensors, state=state_of(1))
    store.wait()
    assert_loads(tmp_path, 1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_process_without_descriptors_takes_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    store = save_steps(tmp_path, range(1, 3))
    real_open = os.open

    def open_(path: str | os.PathLike[str], *arguments: int, **options: int) -> int:
        if "step-000000000002" in os.fspath(path):
            raise OSError(number, os.strerror(number))
        return real_open(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_)
        with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
            CheckpointStore(tmp_path).load(into=None)
    assert "step-000000000002" in caught.value.where
    store.wait()
    assert_loads(tmp_path, 2)
