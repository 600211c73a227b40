"""The demo of learning that goes on: drift, a teacher, students, a stream that is published, a server that follows.

    drifting windows ─┬─► teacher: larger, streams over all rows; what it says of the next two windows is logged
                      └─► a sixth of the rows, the student's ─┬─► student alone
                                                              ├─► frozen control: the history alone
                                                              └─► one file after the other, with the teacher
                                                                      ziggurat stream --follow --publish live
                                                                      ziggurat serve live ◄── asked 20 times a second,
                                                                      while versions change and are rolled back

A teacher helps where it knows what the student cannot: here it sees six times as many rows. A larger model over the
same rows, or one that has stood still for some windows while ids come and go, knows no more than the student does, and
then its scores take the student away from the labels: AUC falls. Rates are those with which a network learns pairs of
features in one pass of few steps (`--table-lr 0.2`); with a tenth of it neither model leaves the plateau of single
features, and nothing is there to be taught.

Stream and server are processes of their own, as they would be in service. Times are those of this machine: *from a row
to an answer* is from the moment at which the file of a window was renamed into the folder to the first answer of a
version that was trained on it. A window is over when a row of the next one has come, so the wait for the next file is
part of it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl

import ziggurat as zg
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.data.synthetic.drift import DriftConfig
from ziggurat.errors import DataError
from ziggurat.features.schema_io import read_schema
from ziggurat.files import write_figure
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.drifting import SCHEMA, WINDOWS, write_drifting
from ziggurat.runs.load import load_run
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.teachers.log import log_teacher
from ziggurat.serving.export.published_folder import Publication, is_published, read_pointer, roll_back
from ziggurat.training.records.windows import read_windows
from ziggurat.training.report.plots import BEST, INK, SECOND, plain_axes
from ziggurat.training.report.progress import Progress

NUM_WINDOWS = 12
HISTORY = 2  # windows before the stream begins
ROWS = 2_000  # of the student, a window
SHARE = 6  # the teacher sees so many times as many
REFRESHED = 2  # windows between two versions of the teacher
BATCH = 128
TABLE_RATE = 0.2
GROWING = "1000"
_LIMIT_S = 180.0  # for a version to come and be served, on a machine that is busy
_PAUSE_S = 0.05
_CONFIG = DriftConfig(window_rows=ROWS * SHARE, preference_rate=0.06, lifetime=8.0, popularity_decay=2.0)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request to the server.

    Args:
        at: seconds of the clock of this process when its answer was there.
        status: of HTTP; 0 where there was no answer.
        version: that answered, in hex.
        ms: from the first byte sent to the last one read.
    """

    at: float
    status: int
    version: str
    ms: float


@dataclass(kw_only=True)
class StreamDemo:
    """The results of the demo.

    Args:
        folder: where all of it lies.
        windows: names of those that were streamed.
        ne: by curve and window: streamed, frozen, best reachable.
        auc: mean over the windows behind the first, each before it was trained, by model.
        better_in: windows in which the student with the teacher was better than alone, and how many there are.
        transfer: gain of the student over the gain of its teacher; NaN where the teacher is no better.
        versions: of the published folder.
        asked: requests, in order.
        seen: seconds from the arrival of a window's file to the first answer that knows it, by window.
        rolled_back_s: from the command to the first answer of the version before.
        released_s: likewise, to the newest one.
        plots: of NE by window, and of versions served over time.
    """

    folder: Path
    windows: list[str] = field(default_factory=list)
    ne: dict[str, list[float]] = field(default_factory=dict)
    auc: dict[str, float] = field(default_factory=dict)
    better_in: tuple[int, int] = (0, 0)
    transfer: float = math.nan
    versions: tuple[Publication, ...] = ()
    asked: list[Asked] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    rolled_back_s: float = math.nan
    released_s: float = math.nan
    plots: tuple[Path, Path] = (Path(), Path())

    def summary(self) -> list[tuple[str, str, str]]:
        """Return what was shown, in figures, and where to look."""
        ne = {name: statistics.fmean(values) for name, values in self.ne.items()}
        answered = [each for each in self.asked if each.status == 200]
        spent = sorted(each.ms for each in answered)
        longest_s = max(each.seconds for each in self.versions)
        whole = [each for each in self.versions if not each.deltas]
        deltas = [each for each in self.versions if each.deltas]
        waits = sorted(self.seen.values())
        auc = ", ".join(f"{name} {value:.4f}" for name, value in self.auc.items())
        if math.isfinite(self.transfer):
            auc += f"; transfer ratio {self.transfer:.2f}"
        auc += f"; with the teacher better in {self.better_in[0]} of {self.better_in[1]} windows"
        below = sum(one < other for one, other in zip(self.ne["streamed"], self.ne["frozen"], strict=True))
        kib = 1 << 10
        bytes_of = {
            name: statistics.median(each.new_bytes for each in some) / kib if some else 0.0
            for name, some in (("whole", whole), ("delta", deltas))
        }
        return [
            (
                "NE by window, lower is better",
                ", ".join(f"{name} {value:.4f}" for name, value in ne.items())
                + f"; streamed below frozen in {below} of {len(self.windows)} windows",
                str(self.plots[0]),
            ),
            ("AUC of windows, higher is better", auc, str(self.folder / "alone/report.html")),
            (
                "versions published",
                f"{len(deltas)} as deltas of {bytes_of['delta']:,.0f} KiB, {len(whole)} whole "
                f"of {bytes_of['whole']:,.0f} KiB (medians); longest {longest_s:.1f} s",
                str(self.folder / "live"),
            ),
            (
                "answers while versions changed",
                f"{len(answered):,} of {len(self.asked):,}, by {len({each.version for each in answered})} versions; "
                f"median {statistics.median(spent):.1f} ms, p99 {spent[int(0.99 * len(spent))]:.1f} ms",
                str(self.plots[1]),
            ),
            (
                "from a row's arrival to an answer",
                f"median {statistics.median(waits):.1f} s, longest {waits[-1]:.1f} s, of {len(waits)} windows",
                str(self.folder / "stream/report.html"),
            ),
            (
                "roll back, and let it go on",
                f"{self.rolled_back_s:.1f} s to the version before, {self.released_s:.1f} s to the newest again",
                f"ziggurat rollback {self.folder / 'live'}",
            ),
        ]


def run_stream_demo(folder: Path, *, progress: Progress) -> StreamDemo:
    """Run the demo; what an earlier one left in the folder is made again.

    Args:
        folder: for all of it.
        progress: shows phases.

    Raises:
        DataError: stream or server ended, or a version did not come; with what they said.
    """
    folder = folder.absolute()
    for name in ("incoming", "rows", "live", "stream", "frozen", "teacher", "big", "alone"):
        shutil.rmtree(folder / name, ignore_errors=True)
    found = StreamDemo(folder=folder)
    progress.say(f"{NUM_WINDOWS} windows of {ROWS * SHARE:,} rows, whose preferences move and whose ids come and go")
    drifting = write_drifting(_CONFIG, folder=folder / "drifting", windows=NUM_WINDOWS, progress=progress)
    everything = sorted((drifting.folder / WINDOWS).glob("*.parquet"))[:NUM_WINDOWS]
    files = _sampled(everything, folder=folder / "rows")
    schema = drifting.folder / SCHEMA
    config = _config(files, schema=schema)
    begin = files[HISTORY].stem
    progress.say(f"\nthe frozen control: {HISTORY} windows are trained, and all later ones scored by that model")
    stream = StreamConfig(by="day", begin=begin, growing=int(GROWING))
    stream_run(config, folder=folder / "frozen", stream=replace(stream, frozen=True), progress=progress)
    progress.say("\na student alone: each window is scored, and then trained")
    stream_run(config, folder=folder / "alone", stream=stream, progress=progress)
    progress.say(
        f"\na teacher twice as wide that streams over {SHARE} times as many rows; what it says of the student's rows "
        f"is logged {REFRESHED} windows ahead"
    )
    _teach(found, everything, files, config=config)
    progress.say(
        "\nthe student with its teacher, published, and a server that follows it; files come one after the other"
    )
    _live(found, files, schema=schema, begin=begin, progress=progress)
    _curves(found, truth=drifting.truth)
    _compare(found)
    found.plots = (_draw_ne(found, folder / "ne.svg"), _draw_versions(found, folder / "versions.svg"))
    return found


def _config(files: Sequence[Path], *, schema: Path) -> RunConfig:
    model = zg.DLRMConfig(
        embedding_dim=8, bottom=zg.MLPConfig(hidden_dims=(32,)), top=zg.MLPConfig(hidden_dims=(64, 32))
    )
    run = zg.table_run(model, read_schema(schema))
    loader = replace(run.training.loader, batch_size=BATCH)
    training = replace(run.training, epochs=1, threads=1, loader=loader, table_learning_rate=TABLE_RATE)
    data = replace(run.data, train=tuple(map(str, files)))
    return replace(run, data=data, training=training)


# --------------------------------------------------------------------------------------------------- teacher, student


def _sampled(files: Sequence[Path], *, folder: Path) -> list[Path]:
    """Write the student's share of the rows of each window."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for file in files:
        frame = pl.read_parquet(file).gather_every(SHARE)
        frame.write_parquet(folder / file.name)
        found.append(folder / file.name)
    return found


def _teach(found: StreamDemo, everything: Sequence[Path], files: Sequence[Path], *, config: RunConfig) -> None:
    """Stream a larger model over all rows, and log what it says of the student's rows before it has seen their time."""
    big = zg.DLRMConfig(
        embedding_dim=16, bottom=zg.MLPConfig(hidden_dims=(64,)), top=zg.MLPConfig(hidden_dims=(128, 64))
    )
    stream = StreamConfig(by="day", begin=files[HISTORY].stem, growing=int(GROWING))
    folder = found.folder / "big"
    for end in [*range(HISTORY, len(files), REFRESHED), len(files)]:
        known = tuple(map(str, everything[:end]))
        teacher = replace(config, model=big, data=replace(config.data, train=known))
        stream_run(teacher, folder=folder, stream=stream)
        new = [str(each) for each in files[end : end + REFRESHED]]
        if new:
            # All that it has seen is of days before those that it is asked about.
            watermark = f"{files[end - 1].stem}T23:59:59"
            log_teacher(load_run(folder), new, out=found.folder / "teacher", watermark=watermark)


def _compare(found: StreamDemo) -> None:
    """Take over the AUC of all windows, each before it was trained, of the student with and without its teacher."""
    runs = {"teacher": "big", "student alone": "alone", "student with the teacher": "stream"}
    by_window = {
        name: {each.name: each.metrics.get("auc") for each in read_windows(found.folder / run / "windows.jsonl")}
        for name, run in runs.items()
    }
    # The first window is scored before anything was learned from the teacher.
    shared = [each for each in found.windows[1:] if all(values.get(each) for values in by_window.values())]
    for name, values in by_window.items():
        found.auc[name] = statistics.fmean(values[each] or math.nan for each in shared)
    alone = by_window["student alone"]
    taught = by_window["student with the teacher"]
    found.better_in = sum((taught[each] or 0) > (alone[each] or 0) for each in shared), len(shared)
    gain = found.auc["teacher"] - found.auc["student alone"]
    if gain > 0:
        found.transfer = (found.auc["student with the teacher"] - found.auc["student alone"]) / gain


# ------------------------------------------------------------------------------------------------------------- live


class _Client:
    """Asks the server again and again, in a thread.

    Args:
        address: of the server.
        requests: bodies, one after the other.
        into: gets what was asked.
    """

    def __init__(self, address: str, *, requests: Sequence[dict[str, object]], into: list[Asked]) -> None:
        self._place = urlsplit(address)
        self._requests = requests
        self._into = into
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="client", daemon=True)

    def __enter__(self) -> _Client:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(30)

    def _run(self) -> None:
        number = 0
        while not self._ends.wait(_PAUSE_S):
            begin = time.perf_counter()
            status = 0
            version = ""
            # A connection each, as from many clients: one that is kept would stay with a worker that drains.
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                place = http.client.HTTPConnection(self._place.hostname or "", self._place.port, timeout=30)
                with contextlib.closing(place) as connection:
                    body = json.dumps(self._requests[number % len(self._requests)])
                    headers = {"Content-Type": "application/json", "X-Deadline-Ms": "5000"}
                    connection.request("POST", "/rank", body, headers)
                    response = connection.getresponse()
                    answer = json.loads(response.read())
                    status = response.status
                    version = str(answer.get("version", ""))
            now = time.perf_counter()
            self._into.append(Asked(at=now, status=status, version=version, ms=1e3 * (now - begin)))
            number += 1


def _live(found: StreamDemo, files: Sequence[Path], *, schema: Path, begin: str, progress: Progress) -> None:
    folder = found.folder
    incoming = folder / "incoming"
    incoming.mkdir(parents=True)
    live = folder / "live"
    arrived: dict[str, float] = {}

    def arrive(file: Path) -> None:
        # Copied under another name and renamed: the stream never sees half a file.
        shutil.copyfile(file, incoming / f".{file.name}")
        arrived[file.stem] = time.perf_counter()
        (incoming / f".{file.name}").rename(incoming / file.name)

    for file in files[: HISTORY + 1]:
        arrive(file)
    stream = [
        *("stream", "table_dlrm", "--data.train", f"{incoming}/", "--schema", str(schema), "--by", "day"),
        *("--from", begin, "--growing", GROWING, "--follow", "--out", str(folder / "stream")),
        *("--publish", str(live), "--publish-keep", str(2 * NUM_WINDOWS), "--server", _socket(folder)),
        *("--dim", "8", "--model.bottom.hidden-dims", "32", "--model.top.hidden-dims", "64,32"),
        # Of so few rows a recipe would take another one, whose rate is another.
        *("--model.embedding.optimizer", "rowwise_adagrad", "--model.embedding.weight-decay", "0"),
        *("--batch-size", str(BATCH), "--table-lr", str(TABLE_RATE), "--threads", "1"),
        *("--teacher", str(folder / "teacher"), "--distil", "aux-head"),
    ]
    with _running(stream, log=folder / "stream.log") as said:
        _wait(lambda: is_published(live), what="the first version", said=said)
        server = ["serve", str(live), "--port", "0", "--threads", "1", "--server.admin-socket", _socket(folder)]
        with _running(server, log=folder / "serve.log") as served:
            _wait(lambda: "http://" in served.text, what="a server", said=served)
            address = next(word for word in served.text.split() if word.startswith("http://"))
            with _Client(address, requests=_requests(files[-1], schema=schema), into=found.asked):
                _wait(lambda: _answers(found) is not None, what="an answer", said=served)
                middle = (HISTORY + len(files)) // 2
                for position, file in enumerate(files[HISTORY + 1 :], start=HISTORY + 1):
                    arrive(file)
                    closed = files[position - 1].stem
                    _wait(lambda closed=closed: _is_served(found, live, closed), what=f"window {closed}", said=said)
                    first = next(each.at for each in found.asked if each.version == _version_of(live, closed))
                    found.seen[closed] = first - arrived[closed]
                    progress.say(f"window {closed} is in the answers {found.seen[closed]:.1f} s after its rows came")
                    if position == middle:
                        _roll_back(found, live, said=said, progress=progress)
    found.versions = read_pointer(live).versions


def _roll_back(found: StreamDemo, live: Path, *, said: _Said, progress: Progress) -> None:
    """Roll back, wait for answers of the version before, and let readers go on."""
    newest = read_pointer(live).newest.version
    begin = time.perf_counter()
    _, after = roll_back(live)
    before = after.version(after.current)
    assert before is not None, "a pointer lists its current version"
    _wait(lambda: _answers(found) == before.version, what="the version before", said=said)
    found.rolled_back_s = time.perf_counter() - begin
    progress.say(f"rolled back to version {before.number}: it answers after {found.rolled_back_s:.1f} s")
    begin = time.perf_counter()
    roll_back(live, to="newest")
    _wait(lambda: _answers(found) == newest, what="the newest version", said=said)
    found.released_s = time.perf_counter() - begin


def _answers(found: StreamDemo) -> str | None:
    """The version of the latest answer."""
    return next((each.version for each in reversed(found.asked[-20:]) if each.status == 200), None)


def _version_of(live: Path, window: str) -> str:
    """The version that was trained on a window last; "" where there is none yet."""
    return next((each.version for each in read_pointer(live).versions if each.name == window), "")


def _is_served(found: StreamDemo, live: Path, window: str) -> bool:
    version = _version_of(live, window)
    return bool(version) and _answers(found) == version


def _requests(file: Path, *, schema: Path, number: int = 64) -> list[dict[str, object]]:
    """Requests of rows of a window: what the user brings, and one item with nothing of its own."""
    names = {feature.name for feature in read_schema(schema).features}
    frame = pl.read_parquet(file, n_rows=number)
    rows = frame.select([name for name in frame.columns if name in names]).to_dicts()
    return [{"user": row, "items": [{}]} for row in rows]


def _socket(folder: Path) -> str:
    """The path of the admin socket; relative, since such paths are short."""
    place = folder / "live.sock"
    with contextlib.suppress(ValueError):
        return str(place.relative_to(Path.cwd()))
    return str(place)


@dataclass(kw_only=True)
class _Said:
    """The process of a verb, and its log.

    Args:
        process: runs.
        log: file that it writes.
    """

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def text(self) -> str:
        """All that it has said."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def _running(words: Sequence[str], *, log: Path) -> Iterator[_Said]:
    """Run a verb in a process of its own, and end it with the block."""
    with log.open("wb") as file:
        command = [sys.executable, "-m", "ziggurat", *words]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield _Said(process=process, log=log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(true: object, *, what: str, said: _Said) -> None:
    """Wait until something is so.

    Raises:
        DataError: it is not, or the process has ended.
    """
    assert callable(true)
    end = time.monotonic() + _LIMIT_S
    while not true():
        if said.process.poll() is not None or time.monotonic() > end:
            raise DataError(
                expected=f"{what} within {_LIMIT_S:g} s",
                found=said.text.strip()[-1500:] or "no word from it",
                where=str(said.log),
                ways_out=("see its log", "see docs/guides/learning-that-goes-on.md"),
            )
        time.sleep(_PAUSE_S)


# ------------------------------------------------------------------------------------------------------------- plots


def _curves(found: StreamDemo, *, truth: pl.DataFrame) -> None:
    """Take over NE by window of the stream, of the frozen control, and the best that any model could reach."""
    streamed = {each.name: each.metrics.get("ne") for each in read_windows(found.folder / "stream/windows.jsonl")}
    frozen = {each.name: each.metrics.get("ne") for each in read_windows(found.folder / "frozen/windows.jsonl")}
    (column,) = [name for name in truth.columns if name.endswith(" best ne")]
    best = dict(zip(truth["name"].to_list(), truth[column].to_list(), strict=True))
    found.windows = [name for name, value in streamed.items() if value is not None and name in frozen]
    for label, values in (("streamed", streamed), ("frozen", frozen), ("best reachable", best)):
        found.ne[label] = [float(values[name] or math.nan) for name in found.windows]


def _draw_ne(found: StreamDemo, path: Path) -> Path:
    figure, axes = plain_axes("NE of each window, before it is trained")
    styles = ((INK, "-"), (SECOND, "-"), (BEST, ":"))
    for (label, values), (color, style) in zip(found.ne.items(), styles, strict=True):
        axes.plot(range(len(values)), values, color=color, linestyle=style, lw=1.4, label=label)
    axes.set_xticks(range(len(found.windows)), [name[5:] for name in found.windows], fontsize=8)
    axes.set_xlabel("window (month-day)", fontsize=8)
    axes.legend(frameon=False, fontsize=8)
    write_figure(figure, path)
    return path


def _draw_versions(found: StreamDemo, path: Path) -> Path:
    figure, axes = plain_axes("Version that answers; down and up again: the roll back")
    axes.set_ylabel("number of the version", fontsize=8)
    axes.set_xlabel("seconds since the first request", fontsize=8)
    number = {each.version: each.number for each in found.versions}
    start = found.asked[0].at
    answered = [each for each in found.asked if each.version in number]
    times = [each.at - start for each in answered]
    axes.step(times, [number[each.version] for each in answered], where="post", color=INK, lw=1.4, label="version")
    failed = [each.at - start for each in found.asked if each.status != 200]
    if failed:
        axes.plot(failed, [0] * len(failed), "x", color=SECOND, label="no answer")
    axes.legend(frameon=False, fontsize=8)
    write_figure(figure, path)
    return path
