"""Shards: what is prepared does not depend on them, on who prepares them, or on how often that ends early."""

from __future__ import annotations

import hashlib
import io
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.damage import damage
from tests.data.preprocess.test_prepare import SCHEMA, raw_frame
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.fit.shard_fit import ShardReader
from ziggurat.data.preprocess.fit.shards import Shard
from ziggurat.data.preprocess.fit.work import PublishedError, Work
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.bad_rows import BadRowPolicy
from ziggurat.errors import DataError, FileError
from ziggurat.features.schema import Categorical, Dense, Label, NumericTransform, Schema
from ziggurat.files import publish

FLAT = Schema(
    features=(
        Dense(name="price"),
        Dense(name="rank", column="price", transform=NumericTransform.QUANTILE),
        Categorical(name="user"),
    ),
    labels=(Label(name="click"),),
    time="time",
)


def some_files(folder: Path, *, kind: str) -> tuple[str, ...]:
    """Four files of 1,000 rows together; in the text ones a row is bad."""
    paths = []
    for index, (start, rows) in enumerate(((0, 300), (300, 20), (320, 480), (800, 200))):
        frame = raw_frame(rows, start=start)
        path = folder / f"{index}.{kind}"
        if kind == "parquet":
            frame.write_parquet(path)
        else:
            lines = frame.drop("tags").write_csv().splitlines()
            lines[5 + index] = "too,few"
            path.write_text("\n".join(lines) + "\n")
        paths.append(str(path))
    return tuple(paths)


def config_of(files: tuple[str, ...], by: SplitBy) -> DataConfig:
    return DataConfig(train=files, split=SplitConfig(by=by), rows_per_group=100, bad_rows=BadRowPolicy.QUARANTINE)


def content(prepared: PreparedData) -> dict[str, str]:
    """Every file and its hash."""
    files = [path for path in prepared.folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(prepared.folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("by", [SplitBy.RANDOM, SplitBy.TIME])
def test_shards_change_no_byte(tmp_path, kind, by):
    config, schema = config_of(some_files(tmp_path, kind=kind), by), SCHEMA if kind == "parquet" else FLAT
    whole = prepare(config, schema=schema, folder=tmp_path / "whole")
    seen: list[str] = []
    parts = prepare(
        config,
        schema=schema,
        folder=tmp_path / "whole",
        shard_bytes=1,
        progress=lambda phase, done, total: seen.append(phase),
    )
    assert parts.reused
    assert not seen
    expected = content(whole)
    parts = prepare(config, schema=schema, folder=tmp_path / "parts", shard_bytes=1)
    # The quarantine has another name in another cache, so the summary differs by it.
    different = {name for name, digest in content(parts).items() if expected[name] != digest}
    assert different <= ({"prepared.json"} if kind == "csv" else set())
    assert len(content(parts)) == len(expected)
    assert parts.summary.splits == whole.summary.splits
    assert sum(parts.summary.quarantined.values()) == (4 if kind == "csv" else 0)


EVERY_UNIT = [pytest.param(number, marks=() if number in (2, 5, 8) else pytest.mark.slow) for number in range(1, 12)]


@pytest.mark.parametrize("units", EVERY_UNIT)
def test_killed_after_any_unit_it_goes_on_to_the_same_bytes(tmp_path, monkeypatch, units):
    config = config_of(some_files(tmp_path, kind="csv"), SplitBy.RANDOM)
    keep, fit = Work.keep, ShardReader.fit
    kept: list[str] = []
    fitted: list[int] = []

    def killed(self: Work, name: str, result: dict, **options: Any) -> None:
        if len(kept) == units:
            raise KeyboardInterrupt
        kept.append(name)
        keep(self, name, result, **options)

    def counted(self: ShardReader, shard, **arguments):
        fitted.append(shard.index)
        return fit(self, shard, **arguments)

    monkeypatch.setattr(ShardReader, "fit", counted)
    with monkeypatch.context() as patch:
        patch.setattr(Work, "keep", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, schema=FLAT, folder=tmp_path / "cache", shard_bytes=1)
    finished = [int(name[-4:]) for name in kept if name.startswith("shard-")]
    fitted.clear()
    prepared = prepare(config, schema=FLAT, folder=tmp_path / "cache", shard_bytes=1)
    assert sorted([*finished, *fitted]) == [0, 1, 2, 3], "no shard is read again"
    assert not list((tmp_path / "cache").glob(".*.work"))
    first = content(prepared)
    assert content(prepare(config, schema=FLAT, folder=tmp_path / "cache")) == first
    whole = prepare(config, schema=FLAT, folder=tmp_path / "whole")
    assert prepared.train.digest == whole.train.digest
    assert prepared.preprocessing.fingerprint == whole.preprocessing.fingerprint


@pytest.mark.parametrize("shard_bytes", [1, 1 << 30])
def test_damage_to_what_an_early_end_left_is_found_and_made_anew(tmp_path, monkeypatch, shard_bytes):
    config = config_of(some_files(tmp_path, kind="csv"), SplitBy.RANDOM)
    expected = content(prepare(config, schema=FLAT, folder=tmp_path / "cache", shard_bytes=shard_bytes))
    (folder,) = (tmp_path / "cache").glob("????????????????")
    monkeypatch.setattr("ziggurat.data.preprocess.build.publish", stop)
    draw = random.Random(shard_bytes)
    said = 0
    for _ in range(6):
        shutil.rmtree(folder, ignore_errors=True)
        with pytest.raises(KeyboardInterrupt):
            prepare(config, schema=FLAT, folder=tmp_path / "cache", shard_bytes=shard_bytes)
        (work,) = (tmp_path / "cache").glob(".*.work")
        files = sorted(path for path in work.rglob("*") if path.is_file() and path.stat().st_size)
        chosen = draw.choice(files)
        first, *inner = chosen.relative_to(work).parts
        # A note that is torn is forgotten without a word; what a unit left is not.
        is_left = first.startswith("fitted-") and chosen.suffix == ".npz"
        is_left |= bool(inner) and first.startswith("shard-")
        is_left |= first == "out" and chosen.name.startswith(("part-", "vocabulary", "preprocessing"))
        what = damage(chosen, draw)
        with monkeypatch.context() as patch:
            patch.setattr("ziggurat.data.preprocess.build.publish", publish)
            prepared = prepare(config, schema=FLAT, folder=tmp_path / "cache", shard_bytes=shard_bytes)
        assert content(prepared) == expected, what
        assert not is_left or "was damaged, and is made anew" in prepared.note, what
        said += is_left
        assert not list((tmp_path / "cache").glob(".*.work"))
    assert said


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_folder_that_nobody_marked_is_not_taken_for_unfinished_work(tmp_path):
    config = config_of(some_files(tmp_path, kind="csv"), SplitBy.RANDOM)
    (folder,) = [prepare(config, schema=FLAT, folder=tmp_path / "cache").folder]
    shutil.rmtree(folder)
    mine = folder.with_name(f".{folder.name}.work")
    mine.mkdir()
    (mine / "letter.txt").write_text("mine")
    with pytest.raises(FileError, match="nobody marked"):
        prepare(config, schema=FLAT, folder=tmp_path / "cache")
    assert (mine / "letter.txt").read_text() == "mine"
    (mine / "letter.txt").unlink()
    prepare(config, schema=FLAT, folder=tmp_path / "cache")


def test_a_lock_that_cannot_be_made_or_closed_is_no_bare_error_of_the_system(tmp_path, monkeypatch):
    with pytest.raises(FileError, match=r"to write \.x\.lock"), Work(tmp_path / "gone" / "x", waiting=lambda: None):
        pass

    class Full(io.StringIO):
        def close(self) -> None:
            super().close()
            raise OSError(5, "Input/output error")

    with Work(tmp_path / "x", waiting=lambda: None) as work:
        monkeypatch.setattr(work, "_locked", lambda kind: True)
        work._lock.close()
        work._lock = Full()


def test_several_share_the_shards(tmp_path, monkeypatch):
    config = config_of(some_files(tmp_path, kind="parquet"), SplitBy.TIME)
    fit, together = ShardReader.fit, threading.Barrier(2, timeout=20)
    made: list[int] = []

    def counted(self: ShardReader, shard, **arguments):
        if len(made) < 2:
            made.append(shard.index)
            together.wait()  # both work at the same time, or this times out
        else:
            made.append(shard.index)
        return fit(self, shard, **arguments)

    monkeypatch.setattr(ShardReader, "fit", counted)
    prepared: list[PreparedData] = []

    def work() -> None:
        prepared.append(prepare(config, schema=SCHEMA, folder=tmp_path / "cache", shard_bytes=1))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == [0, 1, 2, 3]
    alone = prepare(config, schema=SCHEMA, folder=tmp_path / "alone")
    assert content(prepared[0]) == content(alone)


def test_budget_of_bad_rows_holds_for_all_shards_together(tmp_path):
    files = some_files(tmp_path, kind="csv")
    config = DataConfig(
        train=files, split=SplitConfig(by=SplitBy.RANDOM), bad_rows=BadRowPolicy.QUARANTINE, bad_row_budget=3
    )
    with pytest.raises(DataError, match="at most 3 bad rows"):
        prepare(config, schema=FLAT, folder=tmp_path / "cache", shard_bytes=1)
    assert not list((tmp_path / "cache").glob(".*.work"))


def test_notes_of_before_a_restart_of_the_machine_are_not_believed(tmp_path, monkeypatch):
    with Work(tmp_path / "x", waiting=lambda: None) as work:
        work.start()
        work.keep("unit", {"value": 1})
        assert work.note("unit") == {"value": 1}
        monkeypatch.setattr("ziggurat.data.preprocess.fit.work.boot_id", lambda: "after a power cut")
        assert work.note("unit") is None
        (work.folder / "torn.json").write_text('{"by"')
        assert work.note("torn") is None


def test_notes_that_were_exchanged_are_not_believed(tmp_path):
    with Work(tmp_path / "x", waiting=lambda: None) as work:
        work.start()
        for name in ("a", "b"):
            work.keep(name, {"value": name})
        one, other = work.folder / "a.json", work.folder / "b.json"
        content = one.read_bytes()
        one.write_bytes(other.read_bytes())
        other.write_bytes(content)
        assert work.note("a") is None
        assert work.note("b") is None


def test_units_that_another_process_publishes_while_they_are_looked_at_are_not_damaged(tmp_path, monkeypatch):
    with Work(tmp_path / "x", waiting=lambda: None) as first, Work(tmp_path / "x", waiting=lambda: None) as second:
        first.start()
        (first.folder / "out").mkdir()
        (first.folder / "out" / "part").write_text("content")
        first.keep("unit", {}, left=[first.folder / "out"])
        look = second._is_as_noted

        def behind_the_publisher(left):
            (first.folder / "out").rename(first.target)
            return look(left)

        monkeypatch.setattr(second, "_is_as_noted", behind_the_publisher)
        with pytest.raises(PublishedError):
            second.start()
        assert second.damaged == []


def test_a_unit_whose_note_cannot_be_read_back_is_an_error_and_not_left_out(tmp_path, monkeypatch):
    with Work(tmp_path / "x", waiting=lambda: None) as work:
        work.start()
        assert work.each(["a", "b"], lambda name: {"value": name}) == [{"value": "a"}, {"value": "b"}]
        monkeypatch.setattr(work, "_work_off", lambda names, make, leaves: None)
        monkeypatch.setattr(work, "_read", lambda name: None)
        with pytest.raises(FileError, match="cannot be read back"):
            work.each(["a", "b"], lambda name: {"value": name})


@pytest.mark.parametrize("by", [SplitBy.RANDOM, SplitBy.TIME])
def test_a_large_text_file_is_cut_for_several_processes_and_no_byte_changes(tmp_path, monkeypatch, by):
    some_files(tmp_path, kind="csv")
    path = tmp_path / "2.csv"
    path.write_text(path.read_text().replace("\n", "\n\n", 7))  # blank lines, which are bad rows
    config = config_of((str(tmp_path / "0.csv"), str(path)), by)
    whole = prepare(config, schema=FLAT, folder=tmp_path / "whole")
    seen: list[Shard] = []
    fit = ShardReader.fit

    def noted(self: ShardReader, shard, **arguments):
        seen.append(shard)
        return fit(self, shard, **arguments)

    monkeypatch.setattr(ShardReader, "fit", noted)
    parts = prepare(config, schema=FLAT, folder=tmp_path / "parts", shard_bytes=1, num_processes=3)
    assert [each.part is not None for each in seen].count(True) == 2
    expected = content(whole)
    assert {name for name, digest in content(parts).items() if expected[name] != digest} <= {"prepared.json"}
    assert parts.summary.splits == whole.summary.splits
    assert parts.summary.quarantined == whole.summary.quarantined
