"""Files of Yambda's form: what becomes of them, which are refused, and the recipe on them, stopped and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.datasets import fetch, schema_for
from ziggurat.data.datasets.yambda import DAY_S, NAME, fetch_yambda, made_yambda, yambda_schema
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
    for name, frame in made_yambda(users=30, tracks=40, days=5).items():
        frame.with_columns(**changes.get(name, {})).write_parquet(folder / f"{name}.parquet")
    return folder


def test_events_are_those_of_the_three_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "files")
    path = fetch_yambda(source=folder, cache=tmp_path)
    events = pl.read_parquet(path)
    parts = {name: pl.read_parquet(folder / f"{name}.parquet") for name in ("listens", "likes", "dislikes")}
    wanted = []
    for uid, moment, item, organic, ratio, _ in parts["listens"].iter_rows():
        wanted.append((uid, item, moment, organic, "listen_plus" if ratio >= 50 else "skip", int(ratio >= 50), ratio))
    for name, event in (("likes", "like"), ("dislikes", "dislike")):
        wanted += [(uid, item, at, organic, event, None, None) for uid, at, item, organic in parts[name].iter_rows()]
    columns = ["uid", "item_id", "timestamp", "is_organic", "event", "listen_plus", "played_ratio_pct"]
    assert events.select(columns).rows() == wanted
    assert events.schema["timestamp"] == pl.Int64
    before = path.stat().st_mtime_ns
    assert fetch(NAME, source=folder, cache=tmp_path) == path
    assert path.stat().st_mtime_ns == before
    write(folder, likes={"item_id": pl.col("item_id") + 1})
    assert fetch_yambda(source=folder, cache=tmp_path) != path


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
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        fetch_yambda(source=write(tmp_path / "files", **changes), cache=tmp_path)
    write(tmp_path / "files")
    (tmp_path / "files" / "dislikes.parquet").write_bytes(b"PAR1 no file")
    with pytest.raises(DataError, match="a Parquet file of Yambda"):
        fetch_yambda(source=tmp_path / "files", cache=tmp_path)
    (tmp_path / "files" / "dislikes.parquet").unlink()
    for source in (tmp_path / "files", None):
        with pytest.raises(MissingFileError, match=r"yambda|Yambda"):
            fetch_yambda(source=source, cache=tmp_path)


def test_the_real_recipe_is_that_of_the_reference() -> None:
    config, model = recipe_named("yambda_stu"), recipe_named("yambda_stu").model
    assert isinstance(model, SequenceRankerConfig)
    assert (model.embedding_dim, model.num_layers, model.num_heads) == (512, 3, 4)
    events = config.table_schema.events
    assert events is not None
    assert (events.max_length, events.pools, events.window) == (4086, ("listen_plus", "like", "skip"), DAY_S)
    training = config.training
    assert (training.beta1, training.beta2, training.clip_norm) == (0.95, 0.999, 1.0)
    assert training.learning_rate == training.table_learning_rate == 1e-6 == yambda_rate(8192)
    assert training.schedule.warmup_steps == 24_000
    assert schema_for(NAME) == yambda_schema(share=1362, candidates=10)
    assert config.dataset == DatasetConfig(name=NAME)


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
    assert easy.samples == 2 * 256
    assert mean_and_variation([easy, replace(easy, samples=1024)]) == pytest.approx((768.0, 362.0387 / 768))
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
    assert "512 ± 0%" in capsys.readouterr().out
    assert main(["compare", str(whole), str(parts), "--target", "auc"]) == 2
    assert main(["compare", str(whole), str(parts), "--target", "auc=0.1", "--ranks", "0"]) == 2
    assert main(["compare", "table_hstu", "--target", "auc=0.1"]) == 2
    assert capsys.readouterr().err.count("ConfigError") == 3
