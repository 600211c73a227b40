"""Every verb of the command line that writes, on a small folder of data, runs and exports: for attacks on writing.

`make_victim` fills a folder; a `Verb` is one command line there, what it makes, and which files it may change.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.end_to_end.test_main_job import events
from tests.serving.server.running import UnixConnection

_ANY_MODEL = (
    *("--training.loader.batch-size", "64", "--training.checkpoint-every", "3", "--training.precision", "fp32"),
    *("--training.learning-rate", "0.01"),
)
_TRAINING = (*_ANY_MODEL, "--model.embedding-dim", "4", "--model.embedding.kernel", "torch")
_SMALL = ("--model.top.hidden-dims", "8", "--model.bottom.hidden-dims", "8")
_DATA = ("--data.train", "log.parquet", "--schema", "my.toml")
_TRAIN = ("train", "table_dlrm", *_DATA, *_TRAINING, *_SMALL, "--training.epochs", "2")
_RETRIEVE = ("train", "table_two_tower", *_DATA, *_TRAINING, "--model.negatives-block", "64", "--training.epochs", "1")
_AUTO = ("train", "auto", *_DATA, *_ANY_MODEL, "--training.epochs", "1")
_OF_DEMO = ("movielens_logistic_regression", "movielens_dlrm", "movielens_dcn_v2")
_PATIENCE_S = 100.0  # a machine that does much beside takes long to start a server, and to swap
SERVED = "served.json"  # beside the folder: what a client of the server was told


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A command line, what it makes, and what it may change.

    Args:
        arguments: of the command line.
        result: reads what was made; equal values mean the same result.
        writes: patterns of files that may be changed or come into being.
        out: the files or folders that are given to it for its results; an older one may be there.
        again: the command line that goes on with what an interrupted one left, where it is another.
        beside: what another process does while the verb runs (a client of the server).
        as_good: says of another result, and of that on a sound disk, whether it is as good.
        share: cases of it in a round of all verbs: more where a case is cheap and much is written.
    """

    arguments: tuple[str, ...]
    result: Callable[[], Any]
    writes: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    again: Callable[[], tuple[str, ...]] | None = None
    beside: Callable[[int], None] | None = None
    as_good: Callable[[Any, Any], bool] | None = None
    share: int = 1

    def is_same(self, found: Any, expected: Any) -> bool:
        """Return whether a result is what the verb makes on a sound disk, or as good."""
        return found == expected or (self.as_good is not None and found is not None and self.as_good(found, expected))


def _sha(*names: str) -> list[str]:
    return [hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in names]


def run_of(folder: str) -> Any:
    """Return weights, log and ledger of a run, and the fingerprint of its preprocessing."""
    from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
    from ziggurat.training.checkpoint import CheckpointStore, Match
    from ziggurat.training.records.log import read_records

    last = CheckpointStore(Path(folder) / "checkpoints").load(None, into=None, match=Match.SUBSET)
    weights = {name: hashlib.sha256(bytes(value.numpy().tobytes())).hexdigest() for name, value in last.tensors.items()}
    log = [{k: v for k, v in each.items() if k != "timing"} for each in read_records(Path(folder) / "metrics.jsonl")]
    return [weights, log, _sha(f"{folder}/ledger.bin"), load_preprocessing(Path(folder) / "preprocessing").fingerprint]


def _export_of(folder: str) -> Any:
    from ziggurat.serving.export.export_folder import open_export

    files = open_export(folder).manifest.files
    return sorted([name, entry.sha256] for name, entry in files.items() if not name.endswith(".pt2"))


def _prepared() -> Any:
    from ziggurat.recipes.run_config import load_config
    from ziggurat.runs.execute import prepare_run

    prepared = prepare_run(load_config("run"))
    datasets = (prepared.train, prepared.valid, prepared.test)
    return [prepared.preprocessing.fingerprint, [each.digest for each in datasets if each is not None]]


def _parquet(name: str) -> Any:
    import polars as pl

    return str(pl.read_parquet(name).to_dict(as_series=False))


def _without(value: Any, names: tuple[str, ...]) -> Any:
    """Return JSON without the keys that differ from one sound run to the next: times, speeds, paths."""
    if isinstance(value, dict):
        return {key: _without(item, names) for key, item in value.items() if not any(name in key for name in names)}
    return [_without(item, names) for item in value] if isinstance(value, list) else value


_TIMES = ("_s", "per_s", "sha256", "date", "machine", "seconds", "time", "git", "versions", "folder", "load")


def _json(name: str) -> Any:
    return _without(json.loads(Path(name).read_text()), _TIMES)


def _exists(*names: str) -> list[bool]:
    return [Path(name).stat().st_size > 0 for name in names]


def _has_begun(folder: str) -> bool:
    return Path(folder, "metrics.jsonl").exists() or any(Path(folder, "checkpoints").glob("step-*"))


def _train_again() -> tuple[str, ...]:
    return ("train", "new", "--resume") if _has_begun("new") else (*_TRAIN, "--out", "new")


def _auto_again() -> tuple[str, ...]:
    return ("train", "auto", "--resume", "--out", "auto") if _has_begun("auto") else (*_AUTO, "--out", "auto")


def _one_output(
    arguments: tuple[str, ...],
    name: str,
    result: Callable[[], Any],
    *also: str,
    share: int = 2,
    replaces: bool = True,
) -> Verb:
    """Return a verb that writes one file or folder, and replaces an older one or not."""
    writes = (name, f"{name}/**", *also)
    return Verb(arguments=arguments, result=result, out=(name,) if replaces else (), writes=writes, share=share)


# ----------------------------------------------------------------------------------------------------------- the server


def _asked(connection: http.client.HTTPConnection, path: str, data: Any) -> list[Any]:
    connection.request("POST", path, json.dumps(data))
    answer = connection.getresponse()
    body = json.load(answer)
    connection.close()
    items = [each["id"] for each in body["items"]] if "items" in body else body.get("error")
    return [answer.status, items]


def _ask_server(server: int) -> None:
    """Ask the server, let it swap to another export, ask again, and end it; write what it said."""
    said: list[Any] = []
    output = Path.cwd().with_name("output.txt")
    found = None
    end = time.monotonic() + _PATIENCE_S
    while not found and time.monotonic() < end and os.getppid() == server:
        time.sleep(0.01)
        found = re.search(r"all routes: http://([^:]+):(\d+)", output.read_text(errors="replace"))
    with contextlib.suppress(OSError):
        if found:
            host = found[1]
            port = int(found[2])
            request = {"user": {"user_id": 7}, "k": 3}
            for step in ("before", "swap", "after"):
                try:
                    if step == "swap":
                        said.append(
                            _asked(
                                UnixConnection("a.sock", timeout_s=_PATIENCE_S),
                                "/admin/swap",
                                {"export": str(Path("other").resolve())},
                            )
                        )
                    else:
                        said.append(
                            _asked(http.client.HTTPConnection(host, port, timeout=_PATIENCE_S), "/recommend", request)
                        )
                except (OSError, ValueError, http.client.HTTPException) as problem:
                    said.append([0, repr(problem)])
            Path.cwd().with_name(SERVED).write_text(json.dumps(said))
    with contextlib.suppress(OSError):
        os.kill(server, signal.SIGTERM)


def _served() -> Any:
    return json.loads(Path.cwd().with_name(SERVED).read_text())


def _serves_on(said: Any, expected: Any) -> bool:
    """Return whether a swap was refused in four parts, and the old export answers as before."""
    before, (status, error), after = said
    whole = isinstance(error, dict) and all(error.get(part) for part in ("expected", "found", "where", "ways_out"))
    return status != 200 and whole and before == after == expected[0]


VERBS: dict[str, Verb] = {
    "train": Verb(
        arguments=(*_TRAIN, "--out", "new"), result=lambda: run_of("new"), writes=("new/**",), again=_train_again
    ),
    "resume": Verb(
        arguments=("train", "run", "--resume", "--training.epochs", "3"),
        result=lambda: run_of("run"),
        writes=("run/**",),
    ),
    "train auto": Verb(
        arguments=(*_AUTO, "--out", "auto"), result=lambda: run_of("auto"), writes=("auto/**",), again=_auto_again
    ),
    "demo": Verb(
        arguments=("demo", "--no-ranks", "--out", "demo"),
        result=lambda: [run_of(f"demo/{name}") for name in _OF_DEMO],
        writes=("demo/**",),
    ),
    "data fetch": Verb(
        arguments=("data", "fetch", "yambda-events", "--source", "music"),
        result=lambda: _parquet(str(next(Path("cache").glob("yambda-events*/**/events.parquet")))),
        share=8,
    ),
    "prepare": Verb(arguments=("prepare", "table_dlrm", *_DATA), result=_prepared, share=12),
    "cluster-by-session": _one_output(
        ("data", "cluster-by-session", "log.parquet", "--session", "user_id", "--out", "clustered.parquet"),
        "clustered.parquet",
        lambda: _parquet("clustered.parquet"),
        "clustered.parquet.*",
        replaces=False,
        share=12,
    ),
    "inspect": _one_output(
        ("data", "inspect", "log.parquet", "--write-schema", "guess.toml"), "guess.toml", lambda: _sha("guess.toml")
    ),
    "predict": _one_output(("predict", "run", "log.parquet", "--out", "out.csv"), "out.csv", lambda: _sha("out.csv")),
    "predict parquet": _one_output(
        ("predict", "run", "log.parquet", "--out", "out.parquet"),
        "out.parquet",
        lambda: _parquet("out.parquet"),
        share=8,
    ),
    "evaluate": _one_output(
        ("evaluate", "run", "log.parquet", "--json", "out.json"), "out.json", lambda: _json("out.json")["metrics"]
    ),
    "evaluate --report": Verb(
        arguments=("evaluate", "run", "log.parquet", "--report"),
        result=lambda: _json("run/evaluations/evaluated.json")["metrics"],
        writes=("run/evaluations/*", "run/report.html"),
    ),
    "embeddings": _one_output(
        ("embeddings", "run", "user_id", "--out", "vectors.parquet"),
        "vectors.parquet",
        lambda: _parquet("vectors.parquet"),
    ),
    "importance": Verb(
        arguments=(
            *("importance", "run", "--rounds", "1", "--json", "imp.json", "--csv", "imp.csv", "--plot", "imp.svg"),
        ),
        result=lambda: [_json("imp.json"), _sha("imp.csv"), _exists("imp.svg")],
        out=("imp.json", "imp.csv", "imp.svg"),
        writes=("imp.*",),
        share=6,
    ),
    "tables": _one_output(
        ("tables", "run", "--json", "tables.json"), "tables.json", lambda: _json("tables.json"), share=4
    ),
    "quantise": _one_output(
        ("quantise", "run", "--formats", "int8", "--json", "costs.json"),
        "costs.json",
        lambda: _json("costs.json"),
        share=6,
    ),
    "export": _one_output(("export", "run", "--out", "ex"), "ex", lambda: _export_of("ex"), share=1),
    "export retrieval": _one_output(
        ("export", "retrieval", "--out", "found"), "found", lambda: _export_of("found"), share=2
    ),
    "recommend": _one_output(
        ("recommend", "films", "users.parquet", "--k", "5", "--out", "lists.parquet"),
        "lists.parquet",
        lambda: _parquet("lists.parquet"),
        "lists.parquet.*/**",
        "lists.parquet.*",
        share=8,
    ),
    "index recall": _one_output(
        ("index", "recall", "films", "--k", "5", "--users", "8", "--plot", "recall.svg"),
        "recall.svg",
        lambda: _exists("recall.svg"),
        share=1,
    ),
    "serve": Verb(
        arguments=(
            "serve",
            "films",
            "--port",
            "0",
            "--server.admin-socket",
            "a.sock",
            "--server.spares",
            "0",
            "--server.linger-s",
            "0.05",
        ),
        result=_served,
        writes=("a.sock", ".ziggurat-served-*", ".ziggurat-served-*/**"),
        beside=_ask_server,
        as_good=_serves_on,
    ),
    "towers partition": Verb(
        arguments=("towers", "partition", "run", "--towers", "2", "--out", "towers.json"),
        result=lambda: [_json("towers.json"), _exists("towers.svg")],
        out=("towers.json", "towers.svg"),
        writes=("towers.*",),
    ),
    "plan": _one_output(
        ("plan", "run", "--cluster", "h100x8", "--budget-s", "0.05", "--save", "plan.json"),
        "plan.json",
        lambda: _exists("plan.json"),
    ),
    "simulate": _one_output(
        ("simulate", "run", "--cluster", "h100x8", "--budget-s", "0.05", "--plot", "steps.svg"),
        "steps.svg",
        lambda: _exists("steps.svg"),
        share=1,
    ),
    "cluster show": _one_output(
        ("cluster", "show", "h100x8", "--out", "cluster.toml"), "cluster.toml", lambda: _sha("cluster.toml")
    ),
    "cluster probe": _one_output(
        ("cluster", "probe", "--minutes", "0", "--out", "probe.json"),
        "probe.json",
        lambda: _exists("probe.json"),
        "probe.*",
        replaces=False,
    ),
    "compare": Verb(
        arguments=(
            *("compare", "table", *_DATA, "--models", "dlrm", "--seeds", "2", "--protocol", "recipe", *_TRAINING),
            *("--training.epochs", "1", "--out", "studies", "--json", "compared.json"),
        ),
        result=lambda: [_json("compared.json"), _exists("compared.md", "compared.svg")],
        out=("compared.json",),
        writes=("studies/**", "compared.*"),
    ),
    "scale": Verb(
        arguments=(
            *("scale", "dlrm", "--compute", "1x..4x", "--points", "3", "--data", "table", *_DATA),
            *("--training.loader.batch-size", "64", "--out", "scales", "--json", "scaled.json"),
        ),
        result=lambda: [_json("scaled.json"), _exists("scaled.md")],
        out=("scaled.json",),
        writes=("scales/**", "scaled.*"),
    ),
    "report": Verb(arguments=("report", "run"), result=lambda: _exists("run/report.html"), writes=("run/report.html",)),
    "report --baseline": Verb(
        arguments=("report", "run", "--baseline"),
        result=lambda: _exists("run/report.html"),
        writes=("run/report.html", "run/baseline*", "run/baseline*/**"),
    ),
}


def _ratings(num_rows: int) -> Any:
    """Return made up ratings with the columns of MovieLens-1M."""
    import polars as pl

    row = pl.int_range(num_rows, eager=True)
    film = row * 7 % 40
    person = row * 11 % 30
    return pl.DataFrame(
        {
            "user_id": person.cast(pl.Int32),
            "movie_id": "film " + film.cast(pl.String),
            "rating": (1 + (film + person) % 5).cast(pl.Int32),
            "timestamp": 978_300_000 + 60 * row,
            "gender": pl.Series(["F", "M"]).gather(person % 2),
            "age": (18 + person % 4).cast(pl.Int32),
            "occupation": (person % 6).cast(pl.Int32),
            "zip_code": (10_000 + person % 9).cast(pl.String),
            "title": "film " + film.cast(pl.String),
            "year": (1990 + film % 9).cast(pl.Int32),
            "genres": pl.Series([["Drama"], ["Drama", "Comedy"]]).gather(film % 2),
        }
    )


def verbs_in_turn(chosen: str) -> list[str]:
    """Return one round of verbs: each once, then again those of a larger share.

    Args:
        chosen: names with commas between; "" for all.
    """
    names = chosen.split(",") if chosen else list(VERBS)
    most = max(VERBS[name].share for name in names)
    return [name for turn in range(most) for name in names if turn < VERBS[name].share]


def make_victim() -> None:
    """Fill the working folder with data, a schema, two runs and two exports; prepared data is not left in the cache.

    MovieLens lies in the cache, as if it had been fetched: a few ratings of it, made up.
    """
    import ziggurat
    from ziggurat.cli.main import main
    from ziggurat.data.datasets import movielens
    from ziggurat.data.datasets.fetch import write_dataset
    from ziggurat.data.datasets.yambda import made_yambda

    frame = events(600)
    frame.write_parquet("log.parquet")
    frame.select("user_id").unique(maintain_order=True).write_parquet("users.parquet")
    schema = ziggurat.Schema(
        features=(
            ziggurat.Categorical(name="user_id"),
            ziggurat.Categorical(name="item"),
            ziggurat.Dense(name="price"),
            ziggurat.MultiHot(name="tags"),
        ),
        labels=(ziggurat.Label(name="click"),),
        time="timestamp",
        group="user_id",
        items=ziggurat.Items(id="item", features=("item",)),
    )
    ziggurat.write_schema(schema, "my.toml")
    ratings = {movielens.FILE: _ratings(400)}
    write_dataset(Path("cache", movielens.NAME), ratings, origin="made up", members={}, notes="")
    Path("music").mkdir()
    for name, listens in made_yambda(users=20, tracks=30, days=3).items():
        listens.write_parquet(f"music/{name}.parquet")
    assert main([*_TRAIN, "--out", "run"]) == 0
    assert main([*_RETRIEVE, "--out", "retrieval"]) == 0
    assert main(["export", "retrieval", "--ranker", "run", "--out", "films"]) == 0
    assert main(["export", "retrieval", "--ranker", "run", "--out", "other", "--tables", "bf16", "--allow"]) == 0
    shutil.rmtree("cache/prepared")
