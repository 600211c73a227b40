"""Models of histories: FLOPs of the samples that are there, growth by width, and sizes that are lengths."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ziggurat as zg
from tests.runs.scores.test_candidate_scores import SCHEMA, events
from tests.studies.own_cache import cache_with_kernels
from ziggurat.cli.main import main
from ziggurat.data.encoded.epoch_stream import Shuffle
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.errors import ConfigError, DataError
from ziggurat.models import SequenceRankerConfig, build_model, flops_per_sample
from ziggurat.models.costs.length_cost import LOOKUP_FLOPS, length_cost
from ziggurat.models.costs.model_cost import flops_of_batch
from ziggurat.recipes.history_rankers import history_rankers
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare_own import OwnData, own_data
from ziggurat.studies.counted_flops import CountedSamples
from ziggurat.studies.scaling import grow
from ziggurat.studies.scaling_runs import ScaleConfig, refuse_other_samples, scale, smallest

LENGTHS = (2, 4, 6, 8, 12)
LANES = LoaderConfig(shuffle=Shuffle.SESSION_LANES)


def log_of(folder: Path, *, users: int) -> RunConfig:
    """A recipe on a made log; the newest window is the test."""
    folder.mkdir(exist_ok=True)
    (folder / "events.toml").write_text(SCHEMA)
    events(users=users, seed=0).write_parquet(folder / "events.parquet")
    run = zg.recipe_named("table_sequence_ranker", schema=zg.read_schema(folder / "events.toml"))
    files = dataclasses.replace(
        run.data, train=(str(folder / "events.parquet"),), split=SplitConfig(by=SplitBy.WINDOWS)
    )
    return dataclasses.replace(run, data=files)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return log_of(tmp_path_factory.mktemp("log"), users=60)


@pytest.fixture(scope="module")
def data(run: RunConfig) -> PreparedData:
    return prepare_run(run)


MODELS = ("sequence_ranker", "din", "dien", "bst", "transact", "onetrans", "rankmixer")


@pytest.mark.parametrize("name", MODELS)
def test_flops_of_a_batch_are_those_that_it_is_computed_with(run: RunConfig, data: PreparedData, name: str) -> None:
    config = {"sequence_ranker": run.model, **history_rankers(run.table_schema)}[name]
    model = build_model(config, data.inputs, seed=0).eval()
    batch = CountedSamples(data.train, loader=LANES).batch
    embedded = model.embed(batch)
    with FlopCounterMode(display=False) as counter:
        model.forward_dense(embedded)
    found = flops_of_batch(model, batch, backward=False).forward
    # Columns that only align memory, and padding to the longest list of the batch, are no work asked for.
    assert found == pytest.approx(counter.get_total_flops() / batch.batch_size, rel=0.02)
    lists = {spec.name for spec in model.inputs.sequences}
    assert lists, "it reads its history event by event"
    assert flops_per_sample(model).forward < found or name == "sequence_ranker", "of one event less than of all"


def test_candidates_of_a_question_share_its_history(run: RunConfig, data: PreparedData) -> None:
    model = build_model(run.model, data.inputs, seed=0).eval()
    batch = CountedSamples(data.train, loader=LANES).batch
    apart = batch.take(torch.arange(0, batch.batch_size, 5))  # a candidate of each question
    assert flops_of_batch(model, batch).forward < 0.6 * flops_of_batch(model, apart).forward
    again = flops_of_batch(model, batch.take(torch.arange(batch.batch_size).repeat_interleave(2)))
    assert again.forward < 0.8 * flops_of_batch(model, batch).forward


def test_the_history_of_a_ranker_weighs_in_its_balance(run: RunConfig, data: PreparedData) -> None:
    cost, source = length_cost(build_model(run.model, data.inputs, seed=0))
    history = next(each for each in cost.lists if each.name == "history")
    assert source == "FLOPs of the model, counted"
    dim = run.model.embedding_dim
    assert history.per_event > 3 * LOOKUP_FLOPS * dim, "layers over events cost more than looking them up"
    assert history.per_square > 0


def test_a_ranker_grows_to_the_compute(data: PreparedData) -> None:
    samples = CountedSamples(data.train, loader=LANES)

    def flops(config: SequenceRankerConfig) -> int:
        return samples.flops(build_model(config, data.inputs, seed=0, draw_tables=False), backward=False).forward

    start = smallest("sequence_ranker")
    assert isinstance(start, SequenceRankerConfig)
    assert start.wider(1.0) == start
    grown = grow(start, data.inputs, factor=9.0, flops=flops)  # pyright: ignore[reportArgumentType]
    assert isinstance(grown, SequenceRankerConfig)
    assert flops(grown) / flops(start) == pytest.approx(9.0, rel=0.15)
    assert grown.num_layers > start.num_layers


def own(run: RunConfig) -> OwnData:
    return own_data(run, {"training.loader.batch-size": "128"}, name="log")


def test_sizes_are_lengths_of_the_same_samples(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    config = ScaleConfig(models=("sequence_ranker",), data=own(run), lengths=LENGTHS, rates=(1e-3, 4e-3))
    study = scale(config, out=tmp_path / "runs")
    (model,) = study.models
    assert [point.factor for point in model.points] == list(LENGTHS)
    assert [point.model for point in model.points] == [model.points[0].model] * 5, "the same model at each length"
    flops = [point.flops for point in model.points]
    assert flops == sorted(set(flops)), "told of more, it computes more"
    folders = [tmp_path / "runs" / "log-scale-900" / "sequence_ranker" / f"{each}-events_seed0" for each in LENGTHS]
    labels = [np.load(folder / "test_labels.npy") for folder in folders]
    assert all(np.array_equal(each, labels[0]) for each in labels)
    kept = [json.loads((folder / "config.json").read_text()) for folder in folders]
    assert [each["table_schema"]["events"]["max_length"] for each in kept] == list(LENGTHS)
    assert model.laws is not None
    assert study.to_json()["sizes"] == "events of the longest history"
    written = [(folder / "run.json").stat().st_mtime_ns for folder in folders]
    again = scale(config, out=tmp_path / "runs")
    assert [(folder / "run.json").stat().st_mtime_ns for folder in folders] == written, "nothing is trained again"
    assert [point.above_best for point in again.models[0].points] == [point.above_best for point in model.points]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [((4, 2, 8), "4,2,8"), ((2, 4), "2,4"), ((0, 2, 4), "0,2,4"), ((2, 2, 4), "2,2,4")],
)
def test_lengths_that_are_none_are_refused(run: RunConfig, lengths: tuple[int, ...], found: str) -> None:
    with pytest.raises(ConfigError, match="three lengths or more, ascending") as error:
        ScaleConfig(models=("sequence_ranker",), data=own(run), lengths=lengths)
    assert found in str(error.value)


def test_lengths_of_data_without_histories_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "dnn", "--lengths", "6,12,25"]) == 2
    shown = capsys.readouterr().err
    assert "an event log with labels" in shown
    assert "leave --lengths out" in shown
    assert main(["scale", "dnn", "--lengths", "6,12,many"]) == 2
    assert "'many'" in capsys.readouterr().err
    assert main(["scale", "dnn", "--lengths", "6,12,25", "--compute", "1x..4x"]) == 2
    assert "leave --compute out" in capsys.readouterr().err


def test_other_samples_at_another_length_are_refused(data: PreparedData, tmp_path: Path) -> None:
    refuse_other_samples({2.0: data, 4.0: data})
    fewer = prepare_run(log_of(tmp_path / "fewer", users=50))
    with pytest.raises(DataError, match="the same samples at every length") as error:
        refuse_other_samples({2.0: data, 4.0: fewer})
    assert "at 4" in str(error.value)
