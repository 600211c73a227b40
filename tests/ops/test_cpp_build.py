"""Compiled libraries in the cache: whole or built again, whatever lies under their name, for whoever may read it."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import random
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ziggurat.errors import MissingDependencyError
from ziggurat.ops import cpp_build
from ziggurat.ops.cpp_build import CppLibrary, CppSource


@pytest.fixture
def source(tmp_path: Path) -> CppSource:
    path = tmp_path / "seven.cpp"
    path.write_text('extern "C" int seven() { return 7; }\n')
    return CppSource(path=path, without="do without")


def library(folder: Path) -> Path:
    (path,) = folder.glob("*.so")
    return path


def answer(library: ctypes.CDLL) -> int:
    return library.seven()


def compilers(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let the only compiler on the PATH be a script."""
    folder.mkdir()
    script = folder / "g++"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setattr(cpp_build.shutil, "which", lambda name: str(script) if name == "g++" else None)


def test_any_damage_to_a_kept_library_is_found_before_it_is_mapped(source: CppSource, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    assert answer(source.load(folder=folder)) == 7
    path = library(folder)
    whole = path.read_bytes()
    other = dataclasses.replace(source, flags=("-DOTHER",))
    other.load(folder=tmp_path / "other")
    damaged = [b"", whole[: len(whole) // 2], whole[:-1], whole + b"\0", library(tmp_path / "other").read_bytes()]
    draw = random.Random(5)
    for _ in range(200):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(content))
    for content in damaged:
        path.unlink()
        path.write_bytes(content)
        assert not cpp_build._is_intact(path)
    assert answer(source.load(folder=folder)) == 7
    assert path.read_bytes() == whole
    assert [each.name for each in folder.iterdir()] == [path.name]


def test_a_damaged_library_ends_no_process(source: CppSource, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    source.load(folder=folder)
    path = library(folder)
    whole = path.read_bytes()
    code = "import sys; from pathlib import Path; from ziggurat.ops.cpp_build import CppSource\n"
    code += "print(CppSource(path=Path(sys.argv[1])).load(folder=Path(sys.argv[2])).seven())"
    for content in (whole[:5000], bytes(len(whole))):
        path.unlink()
        path.write_bytes(content)
        command = [sys.executable, "-c", code, str(source.path), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
        assert f"{path} is damaged; it is built again" in done.stderr


def test_another_user_of_the_cache_can_read_it(source: CppSource, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        source.load(folder=tmp_path / "kernels")
    finally:
        os.umask(before)
    assert stat.S_IMODE(library(tmp_path / "kernels").stat().st_mode) == 0o644


def test_a_cache_that_cannot_be_written_gives_the_library_all_the_same(
    source: CppSource, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kernels").write_text("a file, where the folder should be")
    assert answer(source.load(folder=tmp_path / "kernels")) == 7
    assert "cannot be kept" in caplog.text


def test_processes_that_need_it_at_once_build_it_once(
    source: CppSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    compiler = cpp_build._compiler()
    compilers(tmp_path / "bin", monkeypatch, f'case "$*" in *-o*) echo x >> {calls};; esac; exec {compiler} "$@"')
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: answer(source.load(folder=tmp_path / "kernels")), range(4)))
    assert found == [7] * 4
    assert calls.read_text() == "x\n"
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_a_build_that_runs_out_of_time_is_told_ended_and_remembered(
    source: CppSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pids = tmp_path / "pids"
    real = cpp_build._compiler()
    compilers(tmp_path / "bin", monkeypatch, f'case "$*" in *-o*) sleep 60 & echo $! >> {pids}; wait;; esac')
    monkeypatch.setattr(cpp_build, "_BUILD_LIMIT_S", 0.5)
    monkeypatch.setattr(cpp_build, "_SLOW_S", 0.1)
    folder = tmp_path / "kernels"
    with caplog.at_level(logging.WARNING), pytest.raises(MissingDependencyError, match="took longer than"):
        source.load(folder=folder)
    assert "seven.cpp is being compiled" in caplog.text
    child = int(pids.read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}/cmdline").exists() and Path(f"/proc/{child}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "what the compiler started still runs"
    with pytest.raises(MissingDependencyError, match=r"0\.0 hours ago; to try again now: rm ") as caught:
        source.load(folder=folder)
    assert len(pids.read_text().splitlines()) == 1, "not tried again"
    (failure,) = folder.iterdir()
    assert f"rm {failure}" in caught.value.found
    os.utime(failure, (time.time() - 90_000, time.time() - 90_000))
    monkeypatch.setattr(cpp_build, "_compiler", lambda: real)
    monkeypatch.setattr(cpp_build, "_BUILD_LIMIT_S", 60.0)
    assert answer(source.load(folder=folder)) == 7


def test_what_killed_compilers_left_is_removed_an_hour_later(source: CppSource, tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    ended = subprocess.Popen(["true"])
    ended.wait()
    old, fresh = (folder / f".build.{ended.pid}.{name}.tmp" for name in ("00000000", "11111111"))
    for each in (old, fresh, folder / "mine"):
        each.mkdir(parents=True)
        (each / "half.so").write_bytes(b"half")
    for path in (*old.rglob("*"), old):
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    source.load(folder=folder)
    assert not old.exists()
    assert fresh.exists(), "written a moment ago, perhaps by a process of another machine"
    assert (folder / "mine" / "half.so").exists()


def test_needing_a_library_that_could_not_be_built_says_why() -> None:
    with pytest.raises(MissingDependencyError, match="no compiler"):
        CppLibrary.missing("no compiler").needed()
