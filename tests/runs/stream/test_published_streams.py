"""Published streams: each window a version whose answers are those of a whole export, written as what changed."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.runs.stream.test_stream_runs import SCHEMA, config_of, events, weights_of
from tests.runs.stream.test_streams_on_ranks import config_in
from ziggurat.cli.main import main
from ziggurat.config import to_json
from ziggurat.data.streams.label_delay import DelayConfig, LabelDelay
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, ExportError
from ziggurat.features.extras import Extra
from ziggurat.features.schema_io import schema_to_toml
from ziggurat.ops.row_formats import RowFormat
from ziggurat.ops.table_optimizers import TableOptimizerKind
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.export.make import export_run
from ziggurat.runs.stream.publish import PublishConfig, PublishWindows
from ziggurat.runs.stream.publish import _is_before as is_before  # pyright: ignore[reportPrivateUsage]
from ziggurat.runs.stream.run import StreamResult, stream_run
from ziggurat.serving.export.published_folder import (
    Lease,
    is_version,
    publication_of,
    publishing,
    read_pointer,
    roll_back,
    served_folder,
    version_folder,
)
from ziggurat.serving.recommender import Recommender
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import AverageOver
from ziggurat.training.delayed_feedback import DelayedConfig, DelayedLoss
from ziggurat.training.distillation import DistilConfig, DistilHead


class Heard:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, what: str, *, total: int | None) -> None: ...

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None: ...

    def say(self, text: str) -> None:
        self.lines.append(text)

    def detail(self, text: str) -> None: ...

    def end(self) -> None: ...

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)


def published(
    base: Path, *, run: str = "run", config: RunConfig | None = None, growing: int = 60, **publish: Any
) -> tuple[StreamResult, Heard]:
    """Stream the files of a folder, and publish into `live` unless `publish` says otherwise."""
    heard = Heard()
    files = sorted(base.glob("*.parquet"))
    settings = PublishConfig(**{"folder": str(base / "live"), "max_delta_share": 100.0} | publish)
    result = stream_run(
        config or config_of(*files),
        folder=base / run,
        stream=StreamConfig(by="day", growing=growing),
        publish=settings,
        progress=heard,
    )
    return result, heard


def whole_state(export: Path) -> dict[str, torch.Tensor]:
    return dict(Recommender.load(export).chain.needed_ranker.packed.model.state_dict())


def same_bits(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    assert first.keys() == second.keys()
    return all(
        torch.equal(each.contiguous().view(torch.uint8), second[name].contiguous().view(torch.uint8))
        for name, each in first.items()
        if each.dim()
    )


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stream of six days that was published: `live` as deltas, `full` each version whole."""
    base = tmp_path_factory.mktemp("published")
    events(1500, days=6).write_parquet(base / "a.parquet")
    published(base)
    published(base, run="again", folder=str(base / "full"), max_deltas=0)
    return base


def test_each_window_is_a_version_with_its_watermark(done: Path) -> None:
    pointer = read_pointer(done / "live")
    assert [each.name for each in pointer.versions] == [f"2000-05-0{day}" for day in range(1, 7)]
    assert [each.number for each in pointer.versions] == [1, 2, 3, 4, 5, 6]
    assert (pointer.current, pointer.last, pointer.held) == (6, 6, False)
    times = pl.read_parquet(done / "a.parquet")["at"]
    newest = [int(times.filter((times - 957_139_200) // 86_400 == day).max()) for day in range(6)]  # type: ignore[arg-type]
    shown = [str(np.datetime64(each, "s")).replace("T", " ") for each in newest]
    assert [each.watermark for each in pointer.versions] == shown
    assert [each.deltas for each in pointer.versions] == [0, 1, 2, 3, 4, 5]
    assert all(not each.deltas for each in read_pointer(done / "full").versions)
    windows = [json.loads(line) for line in (done / "run/windows.jsonl").read_text().splitlines()]
    assert [each.metrics.get("ne") for each in pointer.versions] == [each["metrics"].get("ne") for each in windows]


@pytest.mark.parametrize("number", [1, 2, 4, 6])
def test_base_and_deltas_answer_as_a_whole_export_bit_for_bit(done: Path, number: int) -> None:
    chain = version_folder(done / "live", number)
    whole = version_folder(done / "full", number)
    assert same_bits(whole_state(chain), whole_state(whole))
    frame = events(400, days=6, seed=5).drop("click", "at")
    ours = Recommender.load(chain)
    theirs = Recommender.load(whole)
    assert np.array_equal(ours.scores(frame), theirs.scores(frame))
    for row in frame.head(20).to_dicts():
        user = {"user": row["user"], "age": row["age"]}
        items = [{"item": str(item)} for item in range(12)]
        first, second = ours.rank(user, items), theirs.rank(user, items)
        assert [each.score for each in first.items] == [each.score for each in second.items]


def test_the_last_version_has_the_weights_and_scores_of_the_run(done: Path, tmp_path: Path) -> None:
    assert same_bits(whole_state(done / "live"), weights_of(done / "run"))
    exported = export_run(done / "run", out=tmp_path / "export", config=zg.ExportConfig(program=False))
    frame = events(400, days=6, seed=6).drop("click", "at")
    scores = Recommender.load(done / "live").scores(frame)
    assert np.array_equal(scores, Recommender.load(exported.path).scores(frame))


@pytest.mark.parametrize("beside", ["teacher", "delays", "average", "average over steps"])
def test_what_a_stream_has_beside_its_model_is_not_published(tmp_path: Path, beside: str) -> None:
    """Heads of teachers and networks of delays are not served; of an average it is the average that is."""
    frame = events(900, days=4)
    frame = frame.with_columns(score=pl.lit(0.2) + pl.col("click") * 0.5, known=pl.col("at") + 3600 * pl.col("click"))
    frame.write_parquet(tmp_path / "a.parquet")
    config = config_of(tmp_path / "a.parquet")
    stream = StreamConfig(by="day", growing=60)
    if beside == "teacher":
        schema = dataclasses.replace(config.table_schema, extras=(Extra(name="teacher", column="score"),))
        distil = DistilConfig(head=DistilHead.AUX_HEAD, adapter=True)
        config = dataclasses.replace(config, table_schema=schema, distil=distil)
    elif beside == "delays":
        config = dataclasses.replace(config, delayed=DelayedConfig(loss=DelayedLoss.DEFUSE))
        delay = DelayConfig(policy=LabelDelay.CORRECT, column="known", observe_s=600.0)
        stream = dataclasses.replace(stream, delay=delay)
    else:
        average = {"weight_average": 0.9} if beside == "average over steps" else {"average_over": AverageOver.WINDOW}
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, **average))  # type: ignore[arg-type]
    publish = PublishConfig(folder=str(tmp_path / "live"), max_delta_share=100.0)
    stream_run(config, folder=tmp_path / "run", stream=stream, publish=publish)
    versions = read_pointer(tmp_path / "live").versions
    assert [each.name for each in versions] == [f"2000-05-0{day}" for day in range(1, 5)]
    chosen = "averaged" if beside.startswith("average") else "metrics"
    told = [json.loads(line)[chosen] for line in (tmp_path / "run/windows.jsonl").read_text().splitlines()]
    assert [each.metrics for each in versions] == told
    days = (frame["at"].to_numpy() - 957_139_200) // 86_400
    for day, version in enumerate(versions[:-1], start=1):
        # The next window is scored before it is trained, so by what this version serves.
        rows = frame.filter(pl.Series(days == day))
        served = Recommender.load(version_folder(tmp_path / "live", version.number))
        scores = np.asarray(served.scores(rows.select("user", "item", "age")), dtype=np.float64).reshape(-1)
        right = np.where(rows["click"].to_numpy() == 1, scores, 1.0 - scores)
        assert -np.log(right).mean() == pytest.approx(told[day]["log_loss"], abs=1e-5)
    assert same_bits(whole_state(tmp_path / "live"), read_weights(tmp_path / "run"))


def test_publishing_changes_no_bit_of_the_stream(done: Path) -> None:
    alone = done / "alone"
    stream_run(config_of(done / "a.parquet"), folder=alone, stream=StreamConfig(by="day", growing=60))
    assert same_bits(weights_of(done / "run"), weights_of(alone))


def test_a_version_writes_what_changed_and_links_the_rest(tmp_path: Path) -> None:
    """Many ids in the history, few in each later day: new bytes follow the rows, not the table."""
    rng = np.random.default_rng(0)
    rows = 4000
    day = np.where(np.arange(rows) < 3400, 0, 1 + np.arange(rows) % 3)
    ids = np.where(day == 0, rng.integers(0, 20_000, rows), rng.integers(0, 40, rows))
    frame = pl.DataFrame(
        {
            "user": [f"u{each}" for each in ids],
            "item": rng.integers(0, 12, rows),
            "age": rng.normal(size=rows),
            "click": rng.integers(0, 2, rows),
            "at": 957_139_200 + day * 86_400 + rng.integers(0, 86_400, rows),
        }
    )
    frame.write_parquet(tmp_path / "a.parquet")
    published(tmp_path, growing=20_000)
    versions = read_pointer(tmp_path / "live").versions
    assert versions[0].new_bytes > 20_000 * 16
    for each in versions[1:]:
        assert each.rows < 100
        assert each.new_bytes < 40_000
    (base,) = {
        version_folder(tmp_path / "live", each.number).joinpath("ranker/weights.safetensors").stat().st_ino
        for each in versions
    }
    assert base


@pytest.mark.parametrize("tables", ["fp32", "int8"])
def test_rows_that_no_batch_names_are_found_by_comparison(tmp_path: Path, tables: str) -> None:
    """A table whose optimizer moves all rows, and one in few bits: versions are the run's weights all the same."""
    events(600, days=3).write_parquet(tmp_path / "a.parquet")
    config = config_of(tmp_path / "a.parquet")
    if tables == "fp32":
        embedding = dataclasses.replace(config.model.embedding, optimizer=TableOptimizerKind.ADAM_DENSE)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, embedding=embedding))
    else:
        config = dataclasses.replace(config, tables=TablesConfig(weights=RowFormat.INT8))
    published(tmp_path, config=config, growing=0)
    assert same_bits(whole_state(tmp_path / "live"), {n: e for n, e in read_weights(tmp_path / "run").items()})


def read_weights(run: Path) -> dict[str, torch.Tensor]:
    """The weights of a run, tables in few bits decoded."""
    model = zg.load_run(run).model
    state = dict(model.state_dict())
    for name, place in model.embeddings.tables.places.items():
        state[f"embeddings.tables.{name}.weight"] = model.embeddings.tables.rows(name).read(0, place.num_rows)
    return state


# ------------------------------------------------------------------------------------------------- once, and again


def test_a_window_whose_publishing_died_is_published_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events(400, days=4).write_parquet(tmp_path / "a.parquet")
    published(tmp_path, run="whole", folder=str(tmp_path / "reference"))
    lives = 0
    for moment in ("_write", "_check", "_lead_to", "_tell"):
        with monkeypatch.context() as patch:
            left = [3]
            original = getattr(PublishWindows, moment)

            def dies(*args: Any, _call: Any = original, _left: list[int] = left, **kwargs: Any) -> Any:
                _left[0] -= 1
                if not _left[0]:
                    raise KeyboardInterrupt
                return _call(*args, **kwargs)

            patch.setattr(PublishWindows, moment, dies)
            with pytest.raises(KeyboardInterrupt):
                published(tmp_path, run=f"cut-{moment}", folder=str(tmp_path / moment))
        lives += 1
        half = tmp_path / moment / "versions/.000003.999999.0123abcd.tmp"
        half.mkdir()
        (half / "chain.json").write_text("{")
        published(tmp_path, run=f"cut-{moment}", folder=str(tmp_path / moment))
        ours, theirs = read_pointer(tmp_path / moment).versions, read_pointer(tmp_path / "reference").versions
        assert [each.window for each in ours] == [each.window for each in theirs] == [1, 2, 3, 4]
        for each in ours:
            states = [whole_state(version_folder(tmp_path / name, each.number)) for name in (moment, "reference")]
            assert same_bits(*states)
        assert not half.exists()
        assert sorted(os.listdir(tmp_path / moment / "versions")) == [f"{each.number:06}" for each in ours]
    assert lives == 4


def test_a_stream_that_goes_on_from_an_older_checkpoint_publishes_nothing_twice(tmp_path: Path) -> None:
    frame = events(1500, days=6)
    day = (frame["at"] - 957_139_200) // 86_400
    frame.filter(day < 5).write_parquet(tmp_path / "a.parquet")
    published(tmp_path)
    before = read_pointer(tmp_path / "live").versions
    checkpoints = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    shutil.rmtree(checkpoints[-1])
    frame.filter(day >= 5).write_parquet(tmp_path / "b.parquet")
    files = config_of(tmp_path / "a.parquet", tmp_path / "b.parquet")
    _, heard = published(tmp_path, config=files)
    after = read_pointer(tmp_path / "live").versions
    assert after[: len(before)] == before
    assert [each.window for each in after] == [1, 2, 3, 4, 5, 6]
    assert [each.watermark for each in after] == sorted(each.watermark for each in after)
    assert same_bits(whole_state(tmp_path / "live"), weights_of(tmp_path / "run"))
    assert not heard.has("with other weights")


def test_another_stream_into_the_folder_waits_for_its_time(tmp_path: Path, done: Path) -> None:
    """Windows that end before what is published would bring readers back in time."""
    shutil.copytree(done / "live", tmp_path / "live")
    frame = pl.concat([pl.read_parquet(done / "a.parquet"), events(250, days=1, first_day=6)])
    frame.write_parquet(tmp_path / "a.parquet")
    _, heard = published(tmp_path, run="other")
    versions = read_pointer(tmp_path / "live").versions
    assert [(each.number, each.name) for each in versions[6:]] == [(7, "2000-05-06"), (8, "2000-05-07")]
    assert heard.has("of another stream")
    assert versions[6].deltas == 0


# ------------------------------------------------------------------------------------------------------- damage


def test_a_damaged_base_is_left_and_the_next_version_written_whole(tmp_path: Path) -> None:
    frame = events(1500, days=6)
    day = (frame["at"] - 957_139_200) // 86_400
    frame.filter(day < 4).write_parquet(tmp_path / "a.parquet")
    published(tmp_path)
    base = version_folder(tmp_path / "live", 4) / "ranker/weights.safetensors"
    content = bytearray(base.read_bytes())
    content[-1] ^= 1
    base.write_bytes(content)
    with pytest.raises(ExportError, match=r"weights\.safetensors"):
        Recommender.load(tmp_path / "live")
    frame.filter(day >= 4).write_parquet(tmp_path / "b.parquet")
    _, heard = published(tmp_path, config=config_of(tmp_path / "a.parquet", tmp_path / "b.parquet"))
    assert heard.has("whole")
    versions = read_pointer(tmp_path / "live").versions
    assert [each.deltas for each in versions] == [0, 1, 2, 3, 0, 1, 2]
    # What readers have now is damaged, so its window is published again before the next one.
    assert [each.window for each in versions] == [1, 2, 3, 4, 4, 5, 6]
    assert same_bits(whole_state(tmp_path / "live"), weights_of(tmp_path / "run"))


def test_a_delta_that_names_what_the_model_lacks_is_refused(tmp_path: Path, done: Path) -> None:
    from ziggurat.serving.export.deltas import ChangedRows, Delta, lay_over

    loaded = Recommender.load(version_folder(done / "live", 1)).chain.needed_ranker.packed
    dim = 4
    for tables, dense in (
        ({"nobody": ChangedRows(rows=torch.tensor([3]), values=torch.zeros(1, dim))}, {}),
        ({"user": ChangedRows(rows=torch.tensor([10_000]), values=torch.zeros(1, dim))}, {}),
        ({"user": ChangedRows(rows=torch.tensor([5, 5]), values=torch.zeros(2, dim))}, {}),
        ({"user": ChangedRows(rows=torch.tensor([0]), values=torch.ones(1, dim))}, {}),
        ({"user": ChangedRows(rows=torch.tensor([3]), values=torch.zeros(1, dim + 1))}, {}),
        ({}, {"nothing.weight": torch.zeros(1)}),
    ):
        path = tmp_path / "000002.safetensors"
        Delta(dense=dense, tables=tables).save(path)
        with pytest.raises(ExportError, match="000002"):
            lay_over(loaded.model, loaded.preprocessing, [path])


# ------------------------------------------------------------------------------------------------ pointer, rollback


def test_rolled_back_readers_stay_until_they_are_released(tmp_path: Path) -> None:
    frame = events(1500, days=6)
    day = (frame["at"] - 957_139_200) // 86_400
    frame.filter(day < 4).write_parquet(tmp_path / "a.parquet")
    published(tmp_path)
    live = tmp_path / "live"
    before, after = roll_back(live)
    assert (before.current, after.current, after.held) == (4, 3, True)
    assert served_folder(live) == version_folder(live, 3)
    frame.filter(day >= 4).write_parquet(tmp_path / "b.parquet")
    _, heard = published(tmp_path, config=config_of(tmp_path / "a.parquet", tmp_path / "b.parquet"))
    assert read_pointer(live).current == 3
    assert heard.has("readers stay at version 3")
    assert main(["rollback", str(live), "--to", "newest"]) == 0
    assert (read_pointer(live).current, read_pointer(live).held) == (6, False)
    assert main(["rollback", str(live), "--to", read_pointer(live).versions[1].version]) == 0
    assert read_pointer(live).current == 2
    assert main(["rollback", str(live), "--to", "77"]) == 2
    assert main(["rollback", str(tmp_path)]) == 2
    roll_back(live)
    with pytest.raises(ConfigError, match="oldest"):
        roll_back(live)


def test_nobody_is_sent_back_to_a_damaged_version(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done / "live", tmp_path / "live")
    (version_folder(tmp_path / "live", 5) / "golden.json").write_text("{}")
    with pytest.raises(ExportError, match="golden"):
        roll_back(tmp_path / "live")
    assert read_pointer(tmp_path / "live").current == 6


def test_old_versions_go_and_those_in_use_stay(tmp_path: Path) -> None:
    frame = events(1500, days=6)
    day = (frame["at"] - 957_139_200) // 86_400
    frame.filter(day < 2).write_parquet(tmp_path / "a.parquet")
    published(tmp_path, keep=2)
    live = tmp_path / "live"
    served = version_folder(live, 1)
    assert is_version(served)
    assert not is_version(live)
    (live / "versions/mine").mkdir()
    (live / "versions/000099").mkdir()  # a name of ours with nothing of ours in it
    lease = Lease(served)
    frame.filter(day >= 2).write_parquet(tmp_path / "b.parquet")
    published(tmp_path, keep=2, config=config_of(tmp_path / "a.parquet", tmp_path / "b.parquet"))
    assert sorted(os.listdir(live / "versions")) == ["000001", "000005", "000006", "000099", "mine"]
    Recommender.load(served)
    Recommender.load(live)  # its files are links to those of versions that are gone
    lease.release()
    published(tmp_path, keep=2, config=config_of(tmp_path / "a.parquet", tmp_path / "b.parquet"))


def test_one_stream_at_a_time_publishes_into_a_folder_of_its_own(tmp_path: Path) -> None:
    from ziggurat.serving.export import published_folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published_folder, "_PATIENCE_S", 0.1)
        with (
            publishing(tmp_path / "live"),
            pytest.raises(ConfigError, match="another one"),
            publishing(tmp_path / "live"),
        ):
            pass
    (tmp_path / "other").mkdir()
    (tmp_path / "other/letters.txt").write_text("mine")
    with pytest.raises(ConfigError, match="letters"), publishing(tmp_path / "other"):
        pass
    with publishing(tmp_path / "live"):
        pass


def test_a_damaged_pointer_is_named(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done / "live", tmp_path / "live")
    path = tmp_path / "live/published.json"
    path.write_text(path.read_text().replace('"current": 6', '"current": 5'))
    with pytest.raises(ExportError, match=r"published\.json"):
        Recommender.load(tmp_path / "live")


def test_settings_that_cannot_be_published_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    schema = dataclasses.replace(SCHEMA, labels=(zg.Label(name="click"), zg.Label(name="buy")))
    events(300, days=2).with_columns(buy=pl.col("click")).write_parquet(tmp_path / "a.parquet")
    config = config_of(tmp_path / "a.parquet", schema=schema)
    with pytest.raises(ConfigError, match="--publish-value 'click"):
        published(tmp_path, config=config)
    published(tmp_path, config=config, value="click + 2 * buy")
    assert Recommender.load(tmp_path / "live").info().value_model == "click + 2 * buy"
    with pytest.raises(ConfigError, match="something else"):
        published(tmp_path, config=config, value="click", server=str(tmp_path / "a.parquet"))
    toml = tmp_path / "s.toml"
    toml.write_text(schema_to_toml(SCHEMA))
    assert main(["stream", "table_dlrm", "--schema", str(toml), "--server", "a.sock"]) == 2


def test_folders_that_nobody_can_publish_into_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    events(300, days=2).write_parquet(tmp_path / "a.parquet")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/one.txt").write_text("mine")
    (tmp_path / "foreign/versions/000001").mkdir(parents=True)
    (tmp_path / "foreign/versions/000001/one.txt").write_text("mine")
    for folder, words in (
        ("", "an empty text"),
        ("s3://bucket/live", "a URL"),
        (str(tmp_path / "letters"), "one.txt"),
        (str(tmp_path / "a.parquet"), "a file"),
        (str(tmp_path / "letters/one.txt/live"), "a file"),
        (str(tmp_path / "run/stream/live"), "whose files are read"),
        (str(tmp_path / "foreign"), r"000001 in versions"),
    ):
        with pytest.raises((ConfigError, ExportError), match=words):
            published(tmp_path, folder=folder)
        assert not (tmp_path / "run").exists()
    config = config_of(tmp_path)
    with pytest.raises(ConfigError, match="whose files are read"):
        published(tmp_path, config=config)
    assert (tmp_path / "foreign/versions/000001/one.txt").read_text() == "mine"


def test_versions_stay_where_their_pointer_is_gone(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path / "all")
    live = tmp_path / "all/live"
    versions = sorted(os.listdir(live / "versions"))
    (live / "published.json").rename(tmp_path / "kept.json")
    with pytest.raises(ExportError, match=r"published\.json beside versions") as caught:
        published(tmp_path / "all")
    assert sorted(os.listdir(live / "versions")) == versions
    assert f"mv {live / 'versions'} {tmp_path / 'all/live-versions'}" in caught.value.ways_out
    with pytest.raises(ExportError, match=r"published\.json beside versions") as refused:
        roll_back(live)
    assert refused.value.ways_out == caught.value.ways_out
    (live / "versions").rename(tmp_path / "all/live-versions")
    published(tmp_path / "all")
    assert read_pointer(live).current == 1


def test_a_damaged_pointer_is_published_into_again_when_its_folder_was_moved_aside(tmp_path: Path, done: Path) -> None:
    shutil.copytree(done, tmp_path / "all")
    live = tmp_path / "all/live"
    path = live / "published.json"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ExportError) as caught:
        published(tmp_path / "all")
    way = next(each for each in caught.value.ways_out if each.startswith("mv "))
    subprocess.run(way.split(), check=True)
    published(tmp_path / "all")
    assert read_pointer(live).current == 1
    assert same_bits(whole_state(live), whole_state(version_folder(tmp_path / "all/live-damaged", 6)))


def test_an_older_pointer_takes_no_number_again_and_removes_no_version(tmp_path: Path) -> None:
    events(600, days=4).write_parquet(tmp_path / "a.parquet")
    frame = pl.read_parquet(tmp_path / "a.parquet")
    day = pl.col("at") < frame["at"].min() + 2 * 86_400
    frame.filter(day).write_parquet(tmp_path / "a.parquet")
    published(tmp_path)
    older = (tmp_path / "live/published.json").read_bytes()
    frame.filter(~day).write_parquet(tmp_path / "b.parquet")
    published(tmp_path)
    versions = set(os.listdir(tmp_path / "live/versions"))
    assert len(versions) == 4
    (tmp_path / "live/published.json").write_bytes(older)
    published(tmp_path)
    assert set(os.listdir(tmp_path / "live/versions")) == {*versions, "000005"}
    assert read_pointer(tmp_path / "live").current == 5


def test_a_version_that_is_gone_is_named_with_commands_that_lead_on(tmp_path: Path, done: Path) -> None:
    live = tmp_path / "live"
    shutil.copytree(done / "live", live)
    roll_back(live, to="4")
    shutil.rmtree(version_folder(live, 4))
    with pytest.raises(ExportError, match="version 4") as caught:
        Recommender.load(live)
    assert f"ziggurat rollback {live} --to newest" in caught.value.ways_out
    with pytest.raises(ExportError) as refused:
        roll_back(live, to="4")
    assert f"ziggurat rollback {live} --to 5" in refused.value.ways_out
    assert main(["rollback", str(live), "--to", "newest"]) == 0
    assert Recommender.load(live).version == read_pointer(live).newest.version


# ------------------------------------------------------------------------------------------------------------ ranks


def on_ranks(rank: int, base: str, growing: int) -> int:
    config = config_in(Path(base), world_size=2)
    publish = PublishConfig(folder=f"{base}/live", max_delta_share=100.0)
    stream = StreamConfig(by="day", growing=growing)
    return stream_run(config, folder=Path(base) / "ranks", stream=stream, publish=publish).steps


@pytest.mark.parametrize("growing", [0, 60])
def test_ranks_publish_the_weights_that_they_have_together(tmp_path: Path, growing: int) -> None:
    events(500, days=4).write_parquet(tmp_path / "events.parquet")
    run_ranks(on_ranks, 2, str(tmp_path), growing, timeout_s=120.0)
    versions = read_pointer(tmp_path / "live").versions
    assert [each.deltas for each in versions] == [0, 1, 2, 3]
    assert same_bits(whole_state(tmp_path / "live"), weights_of(tmp_path / "ranks"))


def test_every_second_window_is_published(tmp_path: Path) -> None:
    events(600, days=5).write_parquet(tmp_path / "a.parquet")
    published(tmp_path, every=2)
    assert [each.window for each in read_pointer(tmp_path / "live").versions] == [2, 4]


def test_a_stream_that_goes_on_unpublished_says_where_it_was_published(tmp_path: Path) -> None:
    events(600, days=3).write_parquet(tmp_path / "a.parquet")
    published(tmp_path)
    config = config_of(tmp_path / "a.parquet")
    cut = StreamConfig(by="day", growing=60)
    heard = Heard()
    stream_run(config, folder=tmp_path / "run", stream=cut, progress=heard)
    assert heard.has(f"not published: this stream was published into {tmp_path / 'live'} before")
    heard = Heard()
    stream_run(config, folder=tmp_path / "other", stream=cut, progress=heard)
    stream_run(config, folder=tmp_path / "other", stream=cut, progress=heard)
    assert not heard.has("not published")


def test_under_delay_a_watermark_is_of_rows_that_were_trained(tmp_path: Path) -> None:
    frame = events(600, days=4)
    rng = np.random.default_rng(3)
    # Some labels are known at once, others a day later, and of the third day none within its window.
    wait = np.where((frame["at"].to_numpy() - 957_139_200) // 86_400 == 2, 86_400, rng.integers(0, 2, 600) * 86_400)
    frame.with_columns(known=pl.col("at") + pl.Series(wait)).write_parquet(tmp_path / "a.parquet")
    delay = DelayConfig(policy=LabelDelay.WAIT, column="known")
    stream_run(
        config_of(tmp_path / "a.parquet"),
        folder=tmp_path / "run",
        stream=StreamConfig(by="day", delay=delay),
        publish=PublishConfig(folder=str(tmp_path / "live")),
    )
    at = frame["at"].to_numpy()
    days = (at - 957_139_200) // 86_400
    known = days + wait // 86_400
    versions = read_pointer(tmp_path / "live").versions
    assert [each.window for each in versions] == [1, 2, 3, 4]
    for number, each in enumerate(versions):
        newest = int(at[known <= number].max())
        assert each.watermark == str(np.datetime64(newest, "s")).replace("T", " ")
    # Which the newest row of the third day is not: its label came a day later.
    assert versions[2].watermark < "2000-05-03" < versions[3].watermark


def test_a_version_says_which_it_is_to_those_who_load_it(done: Path) -> None:
    newest = read_pointer(done / "live").newest
    info = Recommender.load(done / "live").info()
    assert info.published is not None
    assert info.published.text() == f"version 6, window 2000-05-06, rows up to {newest.watermark}"
    said = info.published_now()
    assert said["number"] == newest.number
    assert said["window"] == newest.name
    assert said["watermark"] == newest.watermark
    assert 0 <= float(str(said["age_s"])) < 3600
    assert float(str(said["watermark_age_s"])) > 20 * 365 * 86_400  # rows of the year 2000
    assert info.to_json()["published"].keys() == said.keys()
    damaged = {"published": {**to_json(newest), "number": "one"}}
    with pytest.raises(ExportError, match="number"):
        publication_of(damaged, where="export.json")
    assert publication_of({}, where="export.json") is None


def test_watermarks_within_a_second_are_told_apart() -> None:
    """A version of an older Ziggurat has no fractions."""
    assert is_before("2026-01-01 00:00:00", "2026-01-01 00:00:00.5")
    assert is_before("2026-01-01 00:00:00.123", "2026-01-01 00:00:00.123456")
    assert not is_before("2026-01-01 00:00:01", "2026-01-01 00:00:00.9")
    assert is_before("9.5", "10")
    assert not is_before("", "10")
