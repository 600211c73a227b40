"""Touched rows are those of the batches in their order; `ziggurat tables` counts them, and bytes of formats."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.training.growing.test_growing_runs import GROWING, growing_dataset
from tests.training.tiny import tiny_dataset
from ziggurat.cli.main import main
from ziggurat.config import override
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.features.schema import NUM_RESERVED_ROWS, UNKNOWN_ROW
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.tables.growth import limits_of, logged_growth, short_of_rows
from ziggurat.runs.tables.table_report import tables_report, why_not_measured
from ziggurat.runs.tables.touched_rows import touched_rows

LOADER = LoaderConfig(batch_size=32, shuffle_buffer_rows=200, prefetch=0, seed=3)


def test_touched_rows_are_those_of_the_batches() -> None:
    dataset = tiny_dataset(300)
    found = touched_rows(dataset, loader=LOADER, samples=200)
    assert (found.counted_from, found.num_samples, found.epochs) == (4, 128, 1)
    batches = [batch for _, batch in zip(range(8), Loader(dataset, config=LOADER).batches(epoch=0), strict=False)]
    for index, (rows, lookups) in enumerate(found.batches["tags"]):
        values = batches[index].jagged.of(0, batch_size=32).values.numpy()
        assert np.repeat(rows, lookups).tolist() == sorted(values.tolist())
    users = np.concatenate([batch.single[0].numpy() for batch in batches])
    assert found.rows_touched("user") == len(np.unique(users))
    assert found.per_sample("user")[0] == 1.0
    assert found.per_sample("user")[1] == sum(len(rows) for rows, _ in found.batches["user"][4:]) / 128
    together = found.trace(["user", "tags"])
    assert together.num_rows == 43 + 13
    assert together.rows[: together.bounds[1]].tolist() == [
        *found.batches["user"][0][0],
        *(found.batches["tags"][0][0] + 43),
    ]


def test_small_data_are_read_twice_so_that_no_row_is_new() -> None:
    found = touched_rows(tiny_dataset(300), loader=LOADER, samples=10_000)
    assert (found.counted_from, found.num_samples, found.epochs) == (10, 300, 2)
    assert len(found.batches["user"]) == 20


def test_a_trace_keeps_a_share_of_the_rows_where_there_are_too_many() -> None:
    found = touched_rows(tiny_dataset(300), loader=LOADER, samples=300)
    whole, some = found.trace(["user"]), found.trace(["user"], most_touches=50)
    assert whole.share == 1.0
    assert 0 < some.share < 0.5
    assert (some.all_touches, some.all_lookups) == (whole.all_touches, whole.all_lookups)
    assert 0 < len(some.rows) < len(whole.rows)
    assert set(some.rows.tolist()) < set(whole.rows.tolist())


def test_ids_of_a_table_that_grows_are_admitted_to_its_rows() -> None:
    found = touched_rows(growing_dataset(300), loader=LOADER, samples=600)
    for name, growing in GROWING.items():
        num_rows = growing.num_ids + NUM_RESERVED_ROWS
        assert num_rows // 2 < found.rows_touched(name) <= num_rows
    first_rows, first_lookups = found.batches["user"][0]
    assert first_rows.tolist()[0] == UNKNOWN_ROW
    assert first_lookups[0] > 1  # nobody who comes once has a row yet
    assert found.trace(["user", "tags"]).rows.max() < 33 + 8
    last: dict[int, int] = {}
    for number, (rows, _) in enumerate(found.batches["user"]):
        last |= dict.fromkeys(rows.tolist(), number)
    ages = sorted(len(found.batches["user"]) - 1 - number for number in last.values())
    assert sorted(found.ages("user").tolist()) == ages


def test_lines_say_how_many_lookups_met_an_unknown_id(tmp_path: Path) -> None:
    found = touched_rows(growing_dataset(300), loader=LOADER, samples=600)
    counts = found.growing["user"]
    assert counts["known"] + counts["unknown"] == 600
    assert counts["new"] - counts["evicted"] == counts["ids"] == 30
    config = override(recipe_named("synthetic_dlrm"), {"tables.weights": "int8"})
    shown = tables_report(config, found, names=["user"]).lines()
    share = counts["unknown"] / 600
    assert any(line.startswith("growing   user: 30 ids") and f"{share:.1%} of the look-ups" in line for line in shown)
    cached = override(config, {"tables.cache": "0.1"})
    (own,) = (each.own_hits for each in tables_report(cached, found, names=["user"]).tables)
    assert own is not None
    assert own.cache_rows == 32, "a tenth of 32 rows is one set of 32 ways"


@pytest.mark.parametrize(
    ("unknown", "evicted", "ids", "is_short"),
    [(10, 0, 30, False), (25, 0, 30, True), (5, 20, 30, True), (25, 0, 29, False), (0, 0, 30, False)],
)
def test_a_growing_table_that_is_too_small_is_said(
    unknown: int, evicted: int, ids: int, is_short: bool, tmp_path: Path
) -> None:
    counts = {"known": 100 - unknown, "unknown": unknown, "new": 1, "evicted": evicted, "ids": ids}
    train = {"kind": "train", "step": 1, **{f"growing/user/{name}": count for name, count in counts.items()}}
    lines = [train, {"kind": "valid", "step": 1}]
    log = tmp_path / "metrics.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *lines]))
    inputs = growing_dataset(600).inputs
    (found,) = logged_growth(log, limits=limits_of(inputs)).values()
    assert (found.limit, found.lookups, found.unknown_share) == (30, 200, unknown / 100)
    assert found.full_share == (ids == 30)
    said = short_of_rows(log, inputs)
    assert bool(said) == is_short
    assert not said or "growing table 'user' is too small for the ids that come: " in said[0]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ziggurat.recipes.run_config import run_config_to_json
    from ziggurat.training.records.run_folder import CONFIG

    folder = tmp_path_factory.mktemp("run")
    changes = {"dataset.rows": "600", "training.loader.batch-size": "64", "tables.weights": "int8"}
    config = override(recipe_named("synthetic_dlrm"), changes)
    CONFIG.write(folder / "config.json", run_config_to_json(config))
    return folder / "config.json"


def test_the_verb(config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "tables.json", tmp_path / "curves.svg"
    assert main(["tables", str(config_file), "--json", str(out), "--plot", str(picture)]) == 0
    shown, found = capsys.readouterr().out, json.loads(out.read_text())
    table = found["tables"][0]
    assert table["row_format"] == "int8"
    assert table["weight_bytes"] == table["num_rows"] * (table["dim"] + 4)
    assert f"{table['num_rows']:,} × {table['dim']}" in shown
    assert 0 < table["rows_touched"] <= table["num_rows"]
    hits = [each["touches"] for each in table["hits"]]
    assert hits == sorted(hits)
    assert found["shared"][0]["num_rows"] == sum(each["num_rows"] for each in found["tables"])
    assert picture.read_text().lstrip().startswith("<?xml")


def test_rows_on_a_disk_are_counted_there_and_what_is_held_in_memory(tmp_path: Path) -> None:
    config = override(recipe_named("synthetic_dlrm"), {"tables.memory": "20%", "tables.disk": str(tmp_path)})
    touched = touched_rows(growing_dataset(300), loader=LOADER, samples=600)
    config = dataclasses.replace(config, tables=dataclasses.replace(config.tables, in_memory=("tags",)))
    found = {each.name: each for each in tables_report(config, touched).tables}
    user, tags = found["user"], found["tags"]
    numbers = 4 * user.dim + 4
    assert (user.weight_bytes, user.state_bytes, tags.disk_bytes) == (0, 0, 0)
    assert user.disk_bytes == 4096 * -(-user.num_rows // (4096 // (numbers + 4)))
    assert user.cache_bytes == int(0.2 * user.num_rows * (numbers + 9))
    assert user.own_hits is not None
    assert user.own_hits.touches < user.hits[3].touches + 0.01
    assert user.map_bytes > 0
    assert tags.weight_bytes == tags.num_rows * tags.dim * 4
    lines = "\n".join(tables_report(config, touched).lines())
    on_disk = [each for each in found.values() if each.disk_bytes]
    assert f"disk      {sum(each.num_rows for each in on_disk):,} rows of {len(on_disk)} tables" in lines
    assert "maps of ids" in lines


def test_rows_on_the_host_are_counted_there_and_what_the_device_holds() -> None:
    config = override(recipe_named("synthetic_dlrm"), {"tables.device-memory": "20%"})
    touched = touched_rows(growing_dataset(300), loader=LOADER, samples=600)
    config = dataclasses.replace(config, tables=dataclasses.replace(config.tables, in_memory=("tags",)))
    report = tables_report(config, touched)
    found = {each.name: each for each in report.tables}
    user, tags = found["user"], found["tags"]
    assert (user.place.value, user.weight_bytes, user.disk_bytes) == ("host", 4 * user.num_rows * user.dim, 0)
    assert user.cache_bytes == int(0.2 * user.num_rows * (4 * user.dim + 4)) + 4 * user.num_rows
    assert user.own_hits is not None
    assert user.own_hits.touches >= user.hits[3].touches
    assert (tags.place.value, tags.own_hits) == ("memory", None)
    lines = "\n".join(report.lines())
    assert f"host      {sum(each.num_rows for each in found.values() if each is not tags):,} rows of" in lines
    assert "on device the run's own: predicted" in lines
    assert "fp32 on host" in str(report.rows())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--table", "nothing"], "nothing"),
        (["--samples", "1"], "--samples"),
        (["--plot", "curves.doc"], "--plot"),
    ],
)
def test_what_is_refused(config_file: Path, words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tables", str(config_file), *words]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "ConfigError" in error


def test_shuffles_of_a_run_are_taken() -> None:
    dataset = tiny_dataset(300)
    ordered = touched_rows(dataset, loader=LoaderConfig(batch_size=32, shuffle=Shuffle.NONE, prefetch=0), samples=64)
    first = dataset.read_group(0).column("user").to_numpy()[:32]
    assert np.repeat(*ordered.batches["user"][0]).tolist() == sorted(first.tolist())


def test_a_run_that_is_shorter_than_the_steps_between_lines_of_its_log_is_told_so(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    assert why_not_measured(None, log_every=50) == "the run has no log"
    log.write_text('{"kind": "valid", "step": 12}\n')
    told = "not in the log, which has a line every 50 steps, and the run has 12"
    assert why_not_measured(log, log_every=50) == told
    log.write_text('{"kind": "train", "step": 50}\n')
    assert why_not_measured(log, log_every=50) == "not in the log"
