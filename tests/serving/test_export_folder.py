"""The export folder: whole or absent, and refused by name when a single bit of it is not as it was written."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from ziggurat.errors import ConfigError, ExportError, MissingFileError
from ziggurat.files import digest_of, sha256_of
from ziggurat.serving.export.export_folder import MANIFEST_NAME, open_export, replacing_export, seal_export


@pytest.fixture
def export(tmp_path: Path) -> Path:
    make(tmp_path / "films")
    return tmp_path / "films"


def make(path: Path, *, text: str = "weights") -> None:
    with replacing_export(path) as folder:
        (folder / "ranker" / "preprocessing").mkdir(parents=True)
        (folder / "ranker" / "weights.safetensors").write_text(text * 50)
        (folder / "ranker" / "preprocessing" / "main.json").write_text("{}")
        (folder / "empty").touch()
        seal_export(folder, sources=(), facts={"rows": 3}, made_with={"ziggurat": "1.0"})


def seal(path: Path, change: dict) -> None:
    """Rewrite keys of a manifest with a right checksum, as a forger would."""
    data = json.loads(path.read_text()) | change
    del data["sha256"]
    path.write_text(json.dumps(data | {"sha256": digest_of(data)}))


def reseal(folder: Path) -> str:
    """Write the checksums of the files as they are now, as a forger would; returns the version."""
    files = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    for name in files:
        path = folder / name
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    version = digest_of({name: entry["sha256"] for name, entry in files.items()})[:16]
    seal(folder / MANIFEST_NAME, {"files": files, "version_of_content": version})
    return version


def test_what_was_written_is_read(export: Path) -> None:
    opened = open_export(export)
    assert sorted(opened.manifest.files) == ["empty", "ranker/preprocessing/main.json", "ranker/weights.safetensors"]
    assert opened.manifest.facts == {"rows": 3}
    assert opened.has("ranker")
    assert not opened.has("rank")
    assert opened.file("empty").read_bytes() == b""
    with pytest.raises(ExportError, match="none"):
        opened.file("none.json")
    version = opened.version
    make(export)  # over the old one
    assert open_export(export).version == version
    make(export, text="other")
    assert open_export(export).version != version


def flip_and_load(export: Path, *, number: int, seed: int) -> None:
    draw = random.Random(seed)
    files = [path for path in sorted(export.rglob("*")) if path.is_file() and path.stat().st_size]
    for _ in range(number):
        path = draw.choice(files)
        content = path.read_bytes()
        changed = bytearray(content)
        changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ExportError) as caught:
            open_export(export)
        assert path.name in caught.value.where
        path.write_bytes(content)
    open_export(export)


def test_every_flipped_bit_is_found(export: Path) -> None:
    flip_and_load(export, number=100, seed=0)


@pytest.mark.slow
def test_two_thousand_flipped_bits_are_found(export: Path) -> None:
    flip_and_load(export, number=2000, seed=1)


@pytest.mark.parametrize("name", ["ranker/weights.safetensors", "empty", MANIFEST_NAME])
def test_other_files_in_the_place_of_one_are_refused(export: Path, name: str, tmp_path: Path) -> None:
    (export / "chain.json").touch()  # as every export has it: without a manifest it tells one from other folders
    path = export / name
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(ExportError, match=path.name):
        open_export(export)
    (tmp_path / "copy").write_bytes(content)
    path.symlink_to(tmp_path / "copy")
    with pytest.raises(ExportError, match="symbolic link"):
        open_export(export)
    path.unlink()
    os.mkfifo(path)  # would hang whoever opens it and waits
    with pytest.raises(ExportError, match="pipe"):
        open_export(export)
    path.unlink()
    path.mkdir()
    with pytest.raises(ExportError, match="folder"):
        open_export(export)


def test_longer_shorter_and_linked_folders_are_refused(export: Path, tmp_path: Path) -> None:
    path = export / "ranker" / "weights.safetensors"
    content = path.read_bytes()
    for changed in (content + b"x", content[:-1], b""):
        path.write_bytes(changed)
        with pytest.raises(ExportError, match="bytes"):
            open_export(export)
    path.write_bytes(content)
    shutil.move(export / "ranker", tmp_path / "elsewhere")
    (export / "ranker").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ExportError, match="symbolic link"):
        open_export(export)


def test_a_link_to_the_whole_folder_is_fine(export: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(export)
    assert open_export(tmp_path / "current").path == export


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../b", "", ".hidden", "a//b", "a\x00b", "a/b/c/d/e"])
def test_names_out_of_the_folder_are_refused(export: Path, name: str) -> None:
    entry = {"bytes": 0, "sha256": "0" * 64}
    seal(export / MANIFEST_NAME, {"files": {name: entry}})
    with pytest.raises(ExportError, match="plain letters"):
        open_export(export)


def test_forged_manifests_are_refused(export: Path) -> None:
    seal(export / MANIFEST_NAME, {"version": 99})
    with pytest.raises(ExportError, match="newer Ziggurat"):
        open_export(export)
    make(export)
    seal(export / MANIFEST_NAME, {"version_of_content": "0" * 16})
    with pytest.raises(ExportError, match="version"):
        open_export(export)
    (export / MANIFEST_NAME).write_text("{")
    with pytest.raises(ExportError, match="JSON"):
        open_export(export)


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        open_export(tmp_path / "none")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").touch()
    with pytest.raises(ConfigError, match="other files"):
        make(tmp_path / "photos")
    with pytest.raises(MissingFileError, match="a folder with other files"):
        open_export(tmp_path / "photos")
    (tmp_path / "film").write_text("mine")
    with pytest.raises(ConfigError, match="a file") as refused:
        make(tmp_path / "film")
    assert refused.value.ways_out[0] == f"--out {tmp_path / 'film_export'}"
    make(tmp_path / "film_export")
    assert (tmp_path / "film").read_text() == "mine"


def test_what_killed_exports_left_is_deleted(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [
        f".films.{gone.pid}.0011aabb.tmp",
        f".films.{gone.pid}.0011aabc.tmp",  # sealed: maybe the older export
        f".films.{os.getpid()}.0011aabb.tmp",
        f".films-2.{gone.pid}.0011aabb.tmp",
        f".films.{gone.pid}.0011aabd.tmp",  # written to a moment ago
    ]
    for place, name in enumerate(names):
        (tmp_path / name / "ranker").mkdir(parents=True)
        if place == 1:
            (tmp_path / name / MANIFEST_NAME).touch()
        for path in ((tmp_path / name).rglob("*"), [tmp_path / name]) if place != 4 else ():
            for each in path:
                os.utime(each, (0, 0))
    make(tmp_path / "films")
    assert {name for name in names if (tmp_path / name).exists()} == set(names[1:])
    make(tmp_path / "films")
    assert {name for name in names if (tmp_path / name).exists()} == set(names[2:])


def test_a_failed_export_leaves_the_old_one(export: Path) -> None:
    version = open_export(export).version
    with contextlib.suppress(RuntimeError), replacing_export(export) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert open_export(export).version == version
    assert [path.name for path in export.parent.iterdir()] == ["films"]
