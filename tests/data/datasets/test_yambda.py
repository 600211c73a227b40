"""Files of Yambda's form: what becomes of them, which are refused, and the recipe on them, stopped and resumed."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest
import torch

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.datasets.yambda import (
    CROSSES,
    DAY_S,
    NAME,
    best_made_auc,
    cross_of,
    fetch_yambda,
    made_yambda,
    yambda_schema,
)
from ziggurat.data.events.sequences import sequences_of
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.source import RawSource
from ziggurat.errors import ConfigError, DataError, MissingFileError
from ziggurat.models.sequence.ranker import SequenceRankerConfig
from ziggurat.ops.lookup import KernelChoice
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.rankers import yambda_rate
from ziggurat.recipes.run_config import DatasetConfig
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.studies.compare_finished import FINISHED
from ziggurat.studies.samples_to_target import mean_and_variation, samples_to_target
from ziggurat.training.config import Precision


def write(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, frame in made_yambda(users=30, tracks=60, days=6).items():
        frame.with_columns(**changes.get(name, {})).write_parquet(folder / f"{name}.parquet")
    return folder


CROSSED = [name for name, _, _ in CROSSES]


def crosses(uid: int, item: int, artist: int, album: int, moment: int, organic: int) -> tuple[tuple[int, ...], ...]:
    """What each cross is a number for, in the order of their columns."""
    hour = datetime.datetime.fromtimestamp(moment, datetime.UTC).hour
    return (
        (uid, artist), (uid, album), (uid, hour), (item, hour), (artist, hour), (uid, organic), (uid, artist, hour),
    )  # fmt: skip


def test_events_are_those_of_the_three_files_with_artist_album_and_crosses(tmp_path: Path) -> None:
    folder = write(tmp_path / "files")
    path = fetch_yambda(source=folder, cache=tmp_path)
    events = pl.read_parquet(path)
    names = ("listens", "likes", "dislikes", "artist_item_mapping", "album_item_mapping")
    parts = {name: pl.read_parquet(folder / f"{name}.parquet") for name in names}
    artists: dict[int, int] = {item: artist for artist, item in parts["artist_item_mapping"].iter_rows()}  # the last
    albums: dict[int, int] = {item: album for album, item in parts["album_item_mapping"].iter_rows()}
    assert len(parts["artist_item_mapping"]) > len(artists)  # some have two
    assert set(events["item_id"]) - set(artists)  # and some none
    wanted = []
    for uid, moment, item, organic, ratio, _ in parts["listens"].iter_rows():
        wanted.append((uid, item, moment, organic, "listen_plus" if ratio >= 50 else "skip", int(ratio >= 50), ratio))
    for name, event in (("likes", "like"), ("dislikes", "dislike")):
        wanted += [(uid, item, at, organic, event, None, None) for uid, at, item, organic in parts[name].iter_rows()]
    wanted = [(*each, artists.get(each[1], 0), albums.get(each[1], 0)) for each in wanted]
    columns = ["uid", "item_id", "timestamp", "is_organic", "event", "listen_plus", "played_ratio_pct"]
    assert events.select([*columns, "artist_id", "album_id"]).rows() == wanted
    # A number for each combination, and none for two.
    crossed = [
        crosses(uid, item, artist, album, moment, organic)
        for uid, item, moment, organic, *_, artist, album in events.select(
            "uid", "item_id", "timestamp", "is_organic", "artist_id", "album_id"
        ).iter_rows()
    ]
    for at, name in enumerate(CROSSED):
        pairs = set(zip((each[at] for each in crossed), events[name].to_list(), strict=True))
        assert len(pairs) == len({combination for combination, _ in pairs}) == len({number for _, number in pairs})
    assert events.schema["timestamp"] == pl.Int64
    before = path.stat().st_mtime_ns
    assert fetch(NAME, source=folder, cache=tmp_path) == path
    assert path.stat().st_mtime_ns == before
    write(folder, likes={"item_id": pl.col("item_id") + 1})
    assert fetch_yambda(source=folder, cache=tmp_path) != path


def test_crosses_keep_ids_of_the_published_sizes_apart() -> None:
    people = pl.Series([0, 1, 1_000_000, (1 << 31) - 1])
    others = pl.Series([0, 1, 9_390_623, (1 << 27) - 1])
    frame = people.to_frame("uid").join(others.to_frame("artist_id"), how="cross")
    frame = frame.join(pl.DataFrame({"timestamp": [0, 3_600, 86_399]}), how="cross")
    numbers = frame.select(cross_of(("uid", "artist_id", "hour")).alias("found"))["found"]
    assert numbers.n_unique() == len(frame)
    assert numbers.min() == 0


def test_crosses_of_a_sample_know_the_candidate_and_its_moment_alone(tmp_path: Path) -> None:
    """Neither what came of it nor anything that happened to others changes them."""
    folder = write(tmp_path / "files")
    events = pl.read_parquet(fetch_yambda(source=folder, cache=tmp_path))
    opposite = write(folder, listens={"played_ratio_pct": 100 - pl.col("played_ratio_pct")})
    pl.read_parquet(folder / "likes.parquet").head(0).write_parquet(folder / "likes.parquet")
    others = pl.read_parquet(fetch_yambda(source=opposite, cache=tmp_path))
    listens = pl.col("listen_plus").is_not_null()
    left, right = (frame.filter(listens).select("uid", *CROSSED) for frame in (events, others))
    assert left.equals(right)
    assert not events.filter(listens)["listen_plus"].equals(others.filter(listens)["listen_plus"])

    # A sample has those of its own event, whatever its history.
    events.write_parquet(tmp_path / "events.parquet")
    config = DataConfig(train=(str(tmp_path / "events.parquet"),), split=SplitConfig(by=SplitBy.WINDOWS))
    made = sequences_of(config, yambda_schema(share=4, people=1000), folder=tmp_path / "cache")
    known = {(str(row[0]), str(row[1]), row[2], *map(str, row[3:])) for row in events.filter(listens).select(
        "uid", "item_id", "timestamp", "artist_id", "album_id", *CROSSED).iter_rows()}  # fmt: skip
    count = 0
    for name in (*made.config.train, *made.config.valid, *made.config.test):
        samples = pl.from_arrow(pq.read_table(name))
        assert isinstance(samples, pl.DataFrame)
        columns = ("uid", "item_id", "asked_at", "artist_id", "album_id", *CROSSED)
        for user, item, asked, *rest in samples.select(columns).iter_rows():
            assert (user, item, asked[0], *rest) in known
        assert samples["question"].n_unique() == len(samples)
        assert (samples["history"].list.len() == samples["history_artist_id"].list.len()).all()
        count += len(samples)
    before = pl.int_range(pl.len()).over("uid")
    in_order = events.sort("uid", "timestamp", maintain_order=True)
    assert count == in_order.select(listens & (before >= 12)).to_series().sum()


def test_converted_events_that_were_cut_are_made_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "files")
    path = fetch_yambda(source=folder, cache=tmp_path)
    whole = path.read_bytes()
    flipped = bytes([*whole[:200], whole[200] ^ 1, *whole[201:]])
    for left in (whole[:-100], whole[: len(whole) // 2], b"", flipped):
        path.write_bytes(left)
        assert fetch_yambda(source=folder, cache=tmp_path) == path
        assert path.read_bytes() == whole


def test_a_flipped_bit_of_converted_events_is_found(tmp_path: Path) -> None:
    path = fetch_yambda(source=write(tmp_path / "files"), cache=tmp_path)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="differ from what was written"):
        list(RawSource([path]).frames(columns=("uid",)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"listens": {"played_ratio_pct": pl.col("played_ratio_pct").cast(pl.String)}}, "played_ratio_pct as String"),
        ({"likes": {"timestamp": pl.col("timestamp").cast(pl.Float32)}}, "timestamp as Float32"),
        ({"artist_item_mapping": {"artist_id": pl.lit("x")}}, "artist_id as String"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        fetch_yambda(source=write(tmp_path / "files", **changes), cache=tmp_path)
    write(tmp_path / "files")
    (tmp_path / "files" / "dislikes.parquet").write_bytes(b"PAR1 no file")
    with pytest.raises(DataError, match="a Parquet file of Yambda"):
        fetch_yambda(source=tmp_path / "files", cache=tmp_path)
    write(tmp_path / "files")
    (tmp_path / "files" / "album_item_mapping.parquet").unlink()
    with pytest.raises(MissingFileError, match="the album_item_mapping of Yambda") as raised:
        fetch_yambda(source=tmp_path / "files", cache=tmp_path)
    assert any("artist_item_mapping.parquet" in way for way in raised.value.ways_out)
    (tmp_path / "files" / "dislikes.parquet").unlink()
    for source in (tmp_path / "files", None):
        with pytest.raises(MissingFileError, match=r"yambda|Yambda"):
            fetch_yambda(source=source, cache=tmp_path)


def test_the_real_recipe_is_that_of_the_reference() -> None:
    config, model = recipe_named("yambda_stu"), recipe_named("yambda_stu").model
    assert isinstance(model, SequenceRankerConfig)
    assert (model.embedding_dim, model.num_layers, model.num_heads) == (512, 3, 4)
    assert (model.input_dropout, model.dropout, model.encoder_dim, model.task_weights) == (0.2, 0.1, 256, (0.2,))
    events = config.table_schema.events
    assert events is not None
    assert (events.max_length, events.pools, events.window) == (4086, ("listen_plus", "like", "skip"), DAY_S)
    assert (events.min_history, events.reach, events.candidates) == (4086, 20_000, 1)
    assert events.context == ("listener", *CROSSED)
    rows = {table.name: table.num_rows for table in config.table_schema.tables}
    assert rows == dict(
        user_x_artist=100_000_000, user_x_album=40_000_000, user_x_hour=24_000_000, item_x_hour=40_000_000,
        artist_x_hour=32_000_000, user_x_is_organic=2_000_000, user_x_artist_x_hour=40_000_000,
    )  # fmt: skip
    training = config.training
    assert (training.beta1, training.beta2, training.clip_norm) == (0.95, 0.999, 1.0)
    assert training.learning_rate == training.table_learning_rate == 1e-6 == yambda_rate(8192)
    assert training.schedule.warmup_steps == 24_000
    assert schema_for(NAME) == yambda_schema(share=1362)
    assert config.dataset == DatasetConfig(name=NAME)


def test_who_knows_what_people_like_reaches_the_best_auc() -> None:
    assert best_made_auc() == pytest.approx(0.7316, abs=1e-4)
    # Of ever more listens it is that of the two chances: a quarter of tastes, and 0.85 or 0.25 of being heard.
    heard = 0.25 * 0.85 + 0.75 * 0.25
    of_heard, of_skipped = 0.25 * 0.85 / heard, 0.25 * 0.15 / (1 - heard)
    assert best_made_auc(users=20_000, days=2) == pytest.approx((1 + of_heard - of_skipped) / 2, abs=0.01)


@pytest.mark.slow
def test_a_run_in_windows_goes_on_to_the_same_bits_and_tells_what_it_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    toy = recipe_named("yambda_stu_toy")
    assert isinstance(toy.model, SequenceRankerConfig)
    embedding = replace(toy.model.embedding, kernel=KernelChoice.TORCH)
    config = replace(
        toy,
        dataset=DatasetConfig(name=NAME, source=str(write(tmp_path / "files"))),
        model=replace(toy.model, embedding_dim=8, num_layers=1, embedding=embedding),
        training=replace(toy.training, threads=1, precision=Precision.FP32, evaluate_every=2),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_run(config, folder=whole)
    train_run(replace(config, training=replace(config.training, max_steps=3)), folder=parts)
    train_run(config, folder=parts, resume=True)
    mine, others = (load_run(folder).model.state_dict() for folder in (whole, parts))
    assert all(torch.equal(mine[name], others[name]) for name in mine)

    (easy,) = samples_to_target([whole], metric="auc", target=0.0)
    assert easy.samples == 2 * 128
    assert mean_and_variation([easy, replace(easy, samples=512)]) == pytest.approx((384.0, 181.01934 / 384))
    (hard,) = samples_to_target([whole], metric="auc", target=1.1)
    assert hard.samples is None
    assert mean_and_variation([easy, hard]) is None
    with pytest.raises(ConfigError, match="evaluations of validation data"):
        samples_to_target([whole], metric="full_mrr", target=1.0)
    out = str(tmp_path / "compared.json")
    assert main(["compare", str(whole), str(parts), "--target", "auc=0.0", "--json", out]) == 0
    written = FINISHED.read(out)
    assert [each["samples"] for each in written["samples_to_target"]["runs"]] == [easy.samples] * 2
    assert all(each["num_rows"] for each in written["runs"])
    assert "256 ± 0%" in capsys.readouterr().out
    assert main(["compare", str(whole), str(parts), "--target", "auc"]) == 2
    assert main(["compare", str(whole), str(parts), "--target", "auc=0.1", "--ranks", "0"]) == 2
    assert main(["compare", "table_hstu", "--target", "auc=0.1"]) == 2
    assert capsys.readouterr().err.count("ConfigError") == 3
