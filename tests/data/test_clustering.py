"""Clustering by session moves rows and changes none."""

import errno
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.damage import damage
from ziggurat.data.clustering import cluster_by_session
from ziggurat.data.inspect.session_repeats import measure_sessions
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import DataError, SchemaError


def log(num_rows: int = 400, *, num_sessions: int = 37, seed: int = 0) -> pl.DataFrame:
    """A log of interleaved sessions with lists that repeat in them; some rows have no session."""
    rng = np.random.default_rng(seed)
    session = rng.integers(0, num_sessions, num_rows)
    history = [rng.integers(0, 99, rng.integers(0, 5)).tolist() for _ in range(num_sessions)]
    return pl.DataFrame(
        {
            "session": [None if each == 0 else f"s{each}" for each in session],
            "at": np.arange(num_rows) * 10,
            "history": [history[each] for each in session],
            "price": rng.normal(size=num_rows),
        }
    )


def runs(values: list) -> int:
    return sum(one is None or one != other for one, other in zip(values, [object(), *values[:-1]], strict=True))


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 4000])
@pytest.mark.parametrize("suffix", ["parquet", "csv"])
def test_sessions_lie_together_in_their_order_of_time(tmp_path: Path, bucket_bytes: int, suffix: str) -> None:
    frame = log()
    if suffix == "csv":
        frame = frame.drop("history")
        frame.write_csv(tmp_path / "log.csv")
    else:
        frame.write_parquet(tmp_path / "log.parquet")
    out = tmp_path / "out.parquet"
    told: list[tuple[Any, ...]] = []
    done = cluster_by_session(
        [tmp_path / f"log.{suffix}"],
        session="session",
        time="at",
        out=out,
        bucket_bytes=bucket_bytes,
        progress=lambda *parts: told.append(parts),
    )
    assert [each for each in told if each[0] == "reading"][-1] == ("reading", 400, 400), "no row is missing at the end"
    found = pl.read_parquet(out)
    if suffix == "csv":
        found = found.with_columns(pl.col("at").cast(pl.Int64), pl.col("price").cast(pl.Float64))
    assert found.sort("at").equals(frame)
    nulls = frame["session"].null_count()
    assert (done.num_rows, done.without_session, done.backwards, done.cut) == (400, nulls, 0, 0)
    assert done.num_sessions == runs(found["session"].to_list()) == 36 + nulls
    assert found.filter(pl.col("session").is_not_null()).select((pl.col("at").diff().over("session") > 0).all()).item()
    assert [path.name for path in tmp_path.iterdir() if path.name not in (f"log.{suffix}", "out.parquet")] == []


def test_clocks_that_run_backwards_are_counted_and_put_right(tmp_path: Path) -> None:
    frame = pl.DataFrame({"session": [1, 2, 1, 1, 2], "at": [5, 1, 3, 3, None], "row": [0, 1, 2, 3, 4]})
    frame.write_parquet(tmp_path / "log.parquet")
    for time, rows, backwards in (("at", [2, 3, 0, 1, 4], 1), ("", [0, 2, 3, 1, 4], 0)):
        out = tmp_path / f"out{time}.parquet"
        done = cluster_by_session([tmp_path / "log.parquet"], session="session", time=time, out=out)
        assert sorted(pl.read_parquet(out)["row"].to_list()) == [0, 1, 2, 3, 4]
        assert pl.read_parquet(out).filter(pl.col("session") == 1)["row"].to_list() == [
            r for r in rows if r in (0, 2, 3)
        ]
        assert done.backwards == backwards


def test_one_giant_session_takes_bounded_memory_and_is_counted(tmp_path: Path) -> None:
    frame = pl.DataFrame({"session": ["one"] * 300_000, "row": np.arange(300_000)})
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=100_000)
    out = tmp_path / "o.parquet"
    done = cluster_by_session([tmp_path / "log.parquet"], session="session", out=out, bucket_bytes=1 << 18)
    assert (done.num_sessions, done.cut) == (1, 1)
    assert pl.read_parquet(out)["row"].to_list() == list(range(300_000))


def test_lists_that_repeat_compress(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    histories = rng.integers(0, 2**40, (200, 30))
    session = np.repeat(np.arange(200), 16)
    order = rng.permutation(len(session))
    frame = pl.DataFrame({"session": session[order], "history": histories[session[order]].tolist()})
    frame.write_parquet(tmp_path / "log.parquet", compression="zstd", use_pyarrow=True)
    done = cluster_by_session([tmp_path / "log.parquet"], session="session", out=tmp_path / "out.parquet")
    assert done.bytes_after["history"] < 0.5 * done.bytes_before["history"]
    assert pq.read_metadata(tmp_path / "out.parquet").num_rows == 3200


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    with pytest.raises(SchemaError, match="sesion"):
        cluster_by_session([tmp_path / "log.parquet"], session="sesion", out=tmp_path / "out.parquet")
    with pytest.raises(DataError, match="another one exists"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", out=tmp_path / "log.parquet")
    out = tmp_path / "whole.parquet"
    cluster_by_session([tmp_path / "log.parquet"], session="session", out=out)
    assert cluster_by_session([tmp_path / "log.parquet"], session="session", out=out).reused
    content = bytearray(out.read_bytes())
    content[100] ^= 1
    out.write_bytes(content)
    with pytest.raises(DataError, match="or one that is damaged"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", out=out)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "log.parquet").read_bytes()[:-100])
    with pytest.raises(DataError):
        cluster_by_session([tmp_path / "cut.parquet"], session="session", out=tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize("kind", ["rows", "end"])
def test_a_full_disk_is_named_while_rows_are_spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    real = pa.OSFile

    class Full:
        """A file of which Arrow's writer is told by Python, and which cannot be closed."""

        def __init__(self, path: str, mode: str = "rb") -> None:
            self._file = real(path, mode)

        def close(self) -> None:
            self._file.close()
            raise OSError(errno.ENOSPC, "No space left on device")

    class Writer:
        def __init__(self, *_: object, **__: object) -> None: ...

        def write_table(self, _: object) -> None: ...

        def close(self) -> None:
            if kind == "rows":
                raise OSError(errno.ENOSPC, "No space left on device")

    log().write_parquet(tmp_path / "log.parquet")
    monkeypatch.setattr(pa.ipc, "new_file", Writer)
    if kind == "end":
        monkeypatch.setattr(pa, "OSFile", Full)
    with pytest.raises(DataError, match="No space left on device"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", out=tmp_path / "out.parquet")
    monkeypatch.undo()
    cluster_by_session([tmp_path / "log.parquet"], session="session", out=tmp_path / "out.parquet")


@pytest.mark.parametrize("moment", ["reading", "writing"])
def test_a_call_that_ends_early_goes_on_to_the_same_bytes(tmp_path: Path, moment: str) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    seen: list[str] = []

    def ends(phase: str, done: int, total: int | None) -> None:
        if phase == moment:
            raise KeyboardInterrupt

    def cluster(out: str, **settings):
        return cluster_by_session(
            [tmp_path / "log.parquet"], session="session", out=tmp_path / out, bucket_bytes=4000, **settings
        )

    expected = cluster("whole.parquet")
    with pytest.raises(KeyboardInterrupt):
        cluster("out.parquet", progress=ends)
    assert not (tmp_path / "out.parquet").exists()
    done = cluster("out.parquet", progress=lambda phase, *_: seen.append(phase))
    assert ("reading" in seen) == (moment == "reading"), "what was read is not read again"
    assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert done == expected
    seen.clear()
    again = cluster("out.parquet", progress=lambda phase, *_: seen.append(phase))
    assert again.reused
    assert not seen
    assert again.num_sessions == expected.num_sessions
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.parquet", "out.parquet", "whole.parquet"]


def test_damage_to_what_an_early_end_left_is_found_and_made_anew(tmp_path: Path) -> None:
    log().write_parquet(tmp_path / "log.parquet")

    def cluster(out: str, progress: Any = None) -> None:
        files = [tmp_path / "log.parquet"]
        cluster_by_session(files, session="session", out=tmp_path / out, bucket_bytes=4000, progress=progress)

    def ends(phase: str, done: int, total: int | None) -> None:
        if phase == "writing":
            raise KeyboardInterrupt

    cluster("whole.parquet")
    draw = random.Random(3)
    for _ in range(25):
        with pytest.raises(KeyboardInterrupt):
            cluster("out.parquet", ends)
        buckets = [path for path in (tmp_path / ".out.parquet.work" / "buckets").iterdir() if path.stat().st_size]
        what = damage(draw.choice(buckets), draw)
        seen: list[str] = []
        cluster("out.parquet", lambda phase, *_: seen.append(phase))  # noqa: B023
        assert (tmp_path / "out.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes(), what
        assert "was damaged, and is made anew: spread-" in seen[0]
        assert "reading" in seen
        (tmp_path / "out.parquet").unlink()


@pytest.mark.parametrize(
    ("session", "num_sessions", "without"),
    [
        ([None, "a", None, "a", "", "b", ""], 2 + 4, 4),
        ([float("nan"), 1.0, None, 1.0, float("nan"), 2.0, 1.0], 2 + 3, 3),
        ([None] * 7, 7, 7),
        ([5] * 7, 1, 0),
        (list("abcdefg"), 7, 0),
    ],
)
def test_rows_without_a_session_stand_each_for_itself(
    tmp_path: Path, session: list, num_sessions: int, without: int
) -> None:
    frame = pl.DataFrame({"session": session, "row": range(7)}, strict=False)
    frame.write_parquet(tmp_path / "log.parquet")
    done = cluster_by_session([tmp_path / "log.parquet"], session="session", out=tmp_path / "o.parquet", bucket_bytes=9)
    assert (done.num_sessions, done.without_session) == (num_sessions, without)
    assert pl.read_parquet(tmp_path / "o.parquet").sort("row").equals(frame)
    assert measure_sessions(tmp_path / "log.parquet", session="session").num_sessions == num_sessions


def test_a_session_in_two_files_of_unlike_types_is_one(tmp_path: Path) -> None:
    for part, kind in enumerate((pl.Int64, pl.Int32, pl.Float64)):
        pl.DataFrame({"session": pl.Series(range(50), dtype=kind)}).write_parquet(tmp_path / f"{part}.parquet")
    files = [tmp_path / f"{part}.parquet" for part in range(3)]
    done = cluster_by_session(files, session="session", out=tmp_path / "out.parquet", bucket_bytes=100)
    assert done.num_sessions == 50
    assert runs(pl.read_parquet(tmp_path / "out.parquet")["session"].to_list()) == 50


def test_times_that_nobody_can_read_are_counted_and_last(tmp_path: Path) -> None:
    frame = pl.DataFrame({"session": ["a"] * 5, "at": ["3", "soon", None, "1", "2"], "row": range(5)})
    frame.write_parquet(tmp_path / "log.parquet")
    done = cluster_by_session([tmp_path / "log.parquet"], session="session", time="at", out=tmp_path / "out.parquet")
    assert pl.read_parquet(tmp_path / "out.parquet")["row"].to_list() == [3, 4, 0, 1, 2]
    assert done.without_time == 2
    frame.with_columns(at=pl.lit("soon")).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="'soon', and none in the first 5 rows"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", time="at", out=tmp_path / "no.parquet")
    frame.with_columns(at=pl.lit(None, dtype=pl.String)).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="none in any row"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", time="at", out=tmp_path / "no.parquet")
    assert not (tmp_path / "no.parquet").exists()


@pytest.mark.parametrize("change", [{"session": pl.Series([[1], [2]])}, {"first:": pl.Series([1, 2])}])
def test_lists_as_sessions_and_our_own_names_are_refused(tmp_path: Path, change: dict[str, pl.Series]) -> None:
    pl.DataFrame({"session": [1, 2]}).with_columns(**change).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(SchemaError, match="one session a row"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", out=tmp_path / "out.parquet")


def test_what_cannot_be_clustered_is_refused_before_a_row_is_read(tmp_path: Path) -> None:
    log().write_parquet(tmp_path / "log.parquet")
    pl.DataFrame({"price": [1.0]}).write_parquet(tmp_path / "products.parquet")
    files, read = [tmp_path / "log.parquet", tmp_path / "products.parquet"], []

    def refused(files: list[Path], out: str, **settings: str) -> SchemaError | DataError:
        with pytest.raises((SchemaError, DataError)) as caught:
            cluster_by_session(
                files, out=out, progress=lambda *told: read.append(told), **{"session": "session", **settings}
            )
        assert not read
        return caught.value

    unequal = refused(files, str(tmp_path / "out.parquet"))
    assert unequal.where.endswith("products.parquet")
    assert "without session, at, history" in unequal.found
    assert "List" in refused(files[:1], str(tmp_path / "out.parquet"), session="history").found
    unwritable = refused(files[:1], str(tmp_path / "log.parquet" / "out.parquet"))
    assert unwritable.expected == "to write out.parquet"
    misspelt = refused(files[:1], str(tmp_path / "out.parquet"), session="Sesion")
    assert misspelt.where.startswith("--session")
    assert misspelt.ways_out[0] == "--session session"
    assert not any("schema" in way for way in misspelt.ways_out)
    assert refused(files[:1], str(tmp_path / "out.parquet"), time="att").ways_out[0] == "--time at"


def test_the_separator_of_text_is_guessed(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("visit;at\na;1\nb;2\na;3\n")
    cluster_by_session([tmp_path / "log.csv"], session="visit", time="at", out=tmp_path / "out.parquet")
    assert pl.read_parquet(tmp_path / "out.parquet")["at"].to_list() in (["1", "3", "2"], ["2", "1", "3"])


def test_what_is_no_time_is_refused_with_the_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    frames = RawSource.frames

    def counted(self: RawSource):
        for chunk in frames(self, chunk_rows=10):
            read.append(chunk.num_rows)
            yield chunk

    monkeypatch.setattr(RawSource, "frames", counted)
    log().with_columns(at=pl.lit("soon")).write_parquet(tmp_path / "log.parquet")
    with pytest.raises(DataError, match="'soon'"):
        cluster_by_session([tmp_path / "log.parquet"], session="session", time="at", out=tmp_path / "no.parquet")
    assert read == [10]


def test_dates_are_read_in_the_order_that_all_rows_show(tmp_path: Path) -> None:
    """A bucket may have dates of one kind alone: 03/01/2024 is before 02/14/2024 if the day stands first."""
    times = ["02/14/2024 10:00", "02/03/2024 10:00", "01/12/2024 10:00", "03/01/2024 10:00"]
    frame = pl.DataFrame({"session": ["a", "b", "b", "b"], "at": times})
    frame.write_csv(tmp_path / "log.csv")
    out = tmp_path / "out.parquet"
    done = cluster_by_session([tmp_path / "log.csv"], session="session", time="at", out=out)
    assert pl.read_parquet(out)["at"].to_list() == [times[0], times[2], times[1], times[3]]
    assert (done.without_time, done.backwards) == (0, 1)
    frame[1:].write_csv(tmp_path / "log.csv")
    with pytest.raises(DataError, match="whether the day or the month stands first"):
        cluster_by_session([tmp_path / "log.csv"], session="session", time="at", out=tmp_path / "two.parquet")


def test_text_is_dates_or_numbers_in_every_bucket(tmp_path: Path) -> None:
    """As the first rows show: a bucket of numbers alone is one without times, not one in another order of time."""
    times = ["2024-01-02", "2024-01-01", "9", "1"]
    pl.DataFrame({"session": [1, 1, 2, 2], "at": times}).write_parquet(tmp_path / "log.parquet")
    out = tmp_path / "out.parquet"
    done = cluster_by_session([tmp_path / "log.parquet"], session="session", time="at", out=out, bucket_bytes=1)
    assert done.without_time == 2
    assert sorted(pl.read_parquet(out)["at"].to_list()) == sorted(times)


def test_categories_of_several_files_are_texts(tmp_path: Path) -> None:
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    for path, sessions in zip(files, (["b", "a"], ["a", "c"]), strict=True):
        tags = pl.Series([sessions, sessions[:1]], dtype=pl.List(pl.Categorical))
        pl.DataFrame({"session": pl.Series(sessions, dtype=pl.Categorical), "tags": tags}).write_parquet(path)
    cluster_by_session(files, session="session", out=tmp_path / "out.parquet")
    found = pl.read_parquet(tmp_path / "out.parquet")
    assert found.to_dict(as_series=False) == {
        "session": ["b", "a", "a", "c"],
        "tags": [["b", "a"], ["b"], ["a", "c"], ["a"]],
    }
