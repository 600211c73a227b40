"""Steps that the host does not wait for: as many waits as there should be, and the numbers of the CPU."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.sequence import test_next_item, test_ranker
from tests.training.growing.test_growing_runs import growing_dataset
from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizerKind
from ziggurat.embeddings.storage import LowPrecision, MakeStorage, MemoryStorage
from ziggurat.errors import BoundsError, ConfigError, DataError, NumericsError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.inputs import InputSpec, JaggedSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import Pooling
from ziggurat.models import (
    MODEL_CONFIGS,
    DINConfig,
    DLRMConfig,
    DNNConfig,
    MLPConfig,
    ModelConfig,
    Normalization,
    RankMixerConfig,
    build_model,
)
from ziggurat.models.contract.reads import Reads
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.ranker import ActionInput
from ziggurat.models.sequence.rankers.rankmixer import HistoryPooling
from ziggurat.ops.row_formats import RowFormat
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import HostWait, record_waits
from ziggurat.training.checkpoint import CheckpointConfig, SaveMode
from ziggurat.training.config import DenseOptimizer, NonFinite, Precision, TrainingConfig
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.feed import Feed
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.step.train_step import TrainStep, no_fused_adagrad
from ziggurat.training.trainer import Trainer

CPU = torch.device("cpu")
TABLES = EmbeddingConfig(kernel=KernelChoice.TORCH)
TINY = MLPConfig(hidden_dims=(8,))
MODEL = DLRMConfig(embedding_dim=4, bottom=TINY, top=TINY)
NORMED = dataclasses.replace(MODEL, top=MLPConfig(hidden_dims=(8,), normalization=Normalization.BATCH))
CLICK_MODELS: tuple[ModelConfig, ...] = tuple(cls() for cls in MODEL_CONFIGS if cls.reads is Reads.SAMPLES)
HISTORY_MODELS: tuple[ModelConfig, ...] = tuple(
    cls(pooling=HistoryPooling.ATTENTION) if cls is RankMixerConfig else cls()
    for cls in MODEL_CONFIGS
    if cls.reads in (Reads.A_HISTORY, Reads.PERHAPS_A_HISTORY)
)


def settings(**changes: Any) -> TrainingConfig:
    fixed = {"precision": Precision.FP32, "checkpoint": CheckpointConfig(mode=SaveMode.SYNC), "log_every": 1}
    return TrainingConfig(**fixed | {"loader": LoaderConfig(batch_size=32, prefetch=0)} | changes)


def trained(
    device: torch.device, folder: Path, *, tables: EmbeddingConfig, nan_row: int | None, **changes: Any
) -> Trainer:
    inputs = tiny_inputs()
    config = dataclasses.replace(MODEL, embedding=tables)
    model = build_model(config, inputs, seed=0, draw_tables=False).to(device)
    model.embeddings.tables.draw(0)
    data = tiny_dataset(120, nan_row=nan_row)
    trainer = Trainer(model, config=settings(**changes), train=data, valid=tiny_dataset(40, seed=1), folder=folder)
    trainer.fit()
    return trainer


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (TableOptimizerKind.ROWWISE_ADAGRAD, {"clip_norm": 0.2}),
        (TableOptimizerKind.SPARSE_ADAM, {"optimizer": DenseOptimizer.ADAGRAD}),
        pytest.param(
            TableOptimizerKind.SGD, {"optimizer": DenseOptimizer.SGD, "clip_norm": 0.2}, marks=pytest.mark.slow
        ),
        pytest.param(
            TableOptimizerKind.ADAM_DENSE,
            {"optimizer": DenseOptimizer.ADAMW, "embedding_l2": 1e-3},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_with_a_skipped_step_is_that_of_the_cpu(
    kind: TableOptimizerKind, changes: dict[str, Any], tmp_path: Path
) -> None:
    tables = EmbeddingConfig(kernel=KernelChoice.TORCH, optimizer=kind)
    with pretend_cuda() as cuda:
        if changes.get("optimizer") is DenseOptimizer.ADAGRAD and (refused := no_fused_adagrad(cuda)):
            pytest.skip(f"torch {torch.__version__}: {refused}")
    changes = changes | {"non_finite": NonFinite.SKIP, "epochs": 2, "log_every": 2}
    one = trained(CPU, tmp_path / "cpu", tables=tables, nan_row=70, **changes)
    with pretend_cuda() as cuda:
        other = trained(cuda, tmp_path / "gpu", tables=tables, nan_row=70, **changes)
        assert other.step.waits == ""
        state, log = ({name: value.cpu() for name, value in other.model.state_dict().items()}, tmp_path / "gpu")
        if one.step.table_optimizer is not None and other.step.table_optimizer is not None:
            state |= {name: value.cpu() for name, value in other.step.table_optimizer.state_dict().items()}
    expected = dict(one.model.state_dict())
    expected |= {} if one.step.table_optimizer is None else one.step.table_optimizer.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=2e-4, atol=2e-6, msg=name)
    assert other.position.skipped == one.position.skipped == 2
    logs = [
        [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (tmp_path / "cpu", log)
    ]
    for mine, theirs in zip(*logs, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"timing"}:
            assert theirs[key] == (mine[key] if isinstance(mine[key], str) else pytest.approx(mine[key], rel=1e-4))
    assert {path.name for path in (log / "non_finite").iterdir()} == {
        path.name for path in (tmp_path / "cpu" / "non_finite").iterdir()
    }


def test_a_torch_without_adagrad_on_gpus_is_refused_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11's is, whose fused Adagrad computes on CPUs alone."""
    step = torch.optim.Adagrad.step

    def refused(optimizer: torch.optim.Adagrad) -> None:
        if any(weight.device.type == "cuda" for weight in optimizer.param_groups[0]["params"]):
            raise RuntimeError("fused=True requires supported devices")
        step(optimizer)

    monkeypatch.setattr(torch.optim.Adagrad, "step", refused)
    config = settings(optimizer=DenseOptimizer.ADAGRAD)
    model = build_model(dataclasses.replace(MODEL, embedding=TABLES), tiny_inputs(), seed=0)
    TrainStep(model, config)
    with pretend_cuda() as cuda, pytest.raises(ConfigError, match=r"--training.optimizer adam") as error:
        TrainStep(model.to(cuda), config)
    assert f"torch {torch.__version__}: fused=True requires supported devices" in str(error.value)


def test_a_run_stops_at_what_is_not_finite_and_has_saved_nothing_since(tmp_path: Path) -> None:
    messages = []
    with pretend_cuda() as cuda:
        for device in (CPU, cuda):
            folder = tmp_path / device.type
            with pytest.raises(NumericsError) as stopped:
                trained(device, folder, tables=EmbeddingConfig(kernel=KernelChoice.TORCH), nan_row=70)
            messages.append(str(stopped.value).replace(str(folder), ""))
            assert not list((folder / "checkpoints").glob("*"))
            assert len(list((folder / "non_finite").iterdir())) == 1
    assert messages[0] == messages[1]


def waits_of(
    config: ModelConfig,
    inputs: InputSpec,
    *,
    batch_of: Callable[[int], Batch] | None = None,
    tables: EmbeddingConfig = TABLES,
    make_storage: MakeStorage = MemoryStorage,
    steps: int = 3,
    **changes: Any,
) -> list[HostWait]:
    """What makes the host wait in steps after the second; the result of each is read a step later."""
    with pretend_cuda() as cuda:
        config = dataclasses.replace(config, embedding=tables)  # pyright: ignore
        model = build_model(config, inputs, seed=0, make_storage=make_storage).to(cuda)
        model.train()
        step = TrainStep(model, settings(**changes))
        assert step.waits == ""
        made_of = batch_of or (lambda seed: random_batch(inputs, 9, seed=seed))
        batches = [made_of(seed) for seed in range(2 + steps)]
        waits, losses = recorded(step, _Listed(batches), device=cuda)
        assert len(losses) == 2 + steps
    return waits


def recorded(
    step: TrainStep, source: Any, *, device: torch.device, growing: GrowingTables | None = None
) -> tuple[list[HostWait], list[float]]:
    """An epoch: what makes the host wait after the second step, and the losses, each read a step later."""
    feed = Feed(source, config=settings(), rank=0, world_size=1, gather=lambda said: [said])
    made: list[Any] = []
    with record_waits() as waits:
        for fed in feed.epoch(device=device, empty=Batch.empty(step.model.inputs), growing=growing):
            made.append(step(fed.batch, upcoming=fed.upcoming))
            if len(made) == 2:
                waits.clear()
            if len(made) > 1:
                assert made[-2].read().finite
    return list(waits), [each.read().loss for each in made]


class _Listed:
    """A source of a few batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        return iter(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


@pytest.mark.parametrize("config", CLICK_MODELS, ids=lambda config: config.kind)
def test_no_step_of_a_click_model_waits_for_the_device(config: ModelConfig) -> None:
    inputs = small_inputs(num_jagged=2, num_vectors=1, num_labels=2)
    mean = dataclasses.replace(inputs.jagged[0], pooling=Pooling.MEAN)
    inputs = dataclasses.replace(inputs, jagged=(mean, *inputs.jagged[1:]))
    assert waits_of(config, inputs) == []


def test_no_step_with_clipping_and_tables_of_two_widths_waits() -> None:
    inputs = small_inputs(num_jagged=2)
    tables = (dataclasses.replace(inputs.tables[0], embedding_dim=8), *inputs.tables[1:4])
    wide = dataclasses.replace(inputs.tables[-1], embedding_dim=8)
    inputs = dataclasses.replace(inputs, tables=(*tables, wide))
    assert waits_of(DNNConfig(deep=TINY), inputs, clip_norm=0.1) == []


def with_history() -> InputSpec:
    """Small inputs with a list that is read row by row."""
    inputs = small_inputs()
    clicks = JaggedSpec(name="clicks", table="single0", pooling=Pooling.NONE, ordered=True)
    return dataclasses.replace(inputs, jagged=(*inputs.jagged, clicks))


def repeating(inputs: InputSpec) -> Callable[[int], Batch]:
    """Batches whose samples share lists, each distinct combination of them kept once."""
    group = FeatureGroup(jagged=tuple(range(len(inputs.jagged))))

    def made(seed: int) -> Batch:
        batch = random_batch(inputs, 4, seed=seed).take(torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3]))
        return dataclasses.replace(deduplicate(batch, [group]), row_ids=torch.arange(9))

    return made


@pytest.mark.parametrize("is_repeating", [False, True], ids=["plain", "repeating"])
@pytest.mark.parametrize("config", HISTORY_MODELS, ids=lambda config: config.kind)
def test_no_step_of_a_model_of_one_history_waits(config: ModelConfig, is_repeating: bool) -> None:
    inputs = with_history()
    assert waits_of(config, inputs, batch_of=repeating(inputs) if is_repeating else None, steps=2) == []


def test_no_step_on_repeating_lists_that_are_pooled_waits() -> None:
    inputs = small_inputs(num_jagged=2)
    assert waits_of(MODEL, inputs, batch_of=repeating(inputs), steps=2) == []


def test_no_step_on_repeating_lists_with_dense_gradients_waits() -> None:
    inputs = small_inputs(num_jagged=2)
    tables = dataclasses.replace(TABLES, optimizer=TableOptimizerKind.ADAM_DENSE)
    assert waits_of(MODEL, inputs, batch_of=repeating(inputs), tables=tables, steps=2) == []
    assert waits_of(DINConfig(), with_history(), batch_of=repeating(with_history()), tables=tables, steps=2) == []


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.SPLIT_BF16, RowFormat.INT8])
def test_no_step_on_tables_in_few_bits_waits(row_format: RowFormat) -> None:
    inputs, config = small_inputs(num_jagged=2), dataclasses.replace(MODEL, embedding_dim=16)
    assert waits_of(config, inputs, make_storage=LowPrecision(row_format=row_format), steps=2, clip_norm=0.1) == []


def test_no_step_that_averages_weights_waits() -> None:
    tables = dataclasses.replace(TABLES, optimizer=TableOptimizerKind.ADAM_DENSE)
    assert waits_of(NORMED, small_inputs(), tables=tables, steps=2, weight_average=0.9) == []


def test_no_step_of_tables_that_grow_waits() -> None:
    """New ids take rows between two steps, and their first vectors travel behind the update of the step before."""
    data = growing_dataset(200)
    config = dataclasses.replace(MODEL, embedding=TABLES)
    model = build_model(config, data.inputs, seed=0)
    for_cpu = recorded(TrainStep(model, settings()), data, device=CPU, growing=GrowingTables(model))[1]
    with pretend_cuda() as cuda:
        model = build_model(config, data.inputs, seed=0).to(cuda)
        step, growing = TrainStep(model, settings()), GrowingTables(model)
        waits, losses = recorded(step, data, device=cuda, growing=growing)
        assert sum(growing.report().values()) > 0
    assert waits == []
    assert losses == pytest.approx(for_cpu, rel=1e-5)


def test_no_step_of_a_next_item_model_waits() -> None:
    def made(seed: int) -> Batch:
        return test_next_item.batch_of([3, 0, 5, 4], seed=seed)

    assert waits_of(test_next_item.SMALL, test_next_item.INPUTS, batch_of=made, steps=2) == []


RANKERS: dict[str, ModelConfig] = {
    "stu": dataclasses.replace(test_ranker.SMALL, task_weights=(1.0, 0.5)),
    "hstu": dataclasses.replace(test_ranker.SMALL, layers=LayerPreset.HSTU, actions=ActionInput.MAPPED),
}


@pytest.mark.parametrize("is_repeating", [False, True], ids=["plain", "repeating"])
@pytest.mark.parametrize("name", RANKERS)
def test_no_step_of_a_ranker_of_candidates_waits(name: str, is_repeating: bool) -> None:
    """Which samples are of one question is found in the copy of the batch in host memory."""

    def made(seed: int) -> Batch:
        batch = test_ranker.batch_of([(3, 2), (0, 1), (5, 3), (4, 2)], seed=seed)
        return deduplicate(batch, [FeatureGroup(jagged=(0, 1, 2))]) if is_repeating else batch

    assert waits_of(RANKERS[name], test_ranker.INPUTS, batch_of=made, steps=2) == []


def test_statistics_of_batch_normalisation_survive_a_step_that_does_not_apply() -> None:
    good, bad = (
        next(iter(ordered_batches(tiny_dataset(16, nan_row=row), batch_size=16).batches(epoch=0))) for row in (None, 3)
    )
    with pretend_cuda() as cuda:
        config = dataclasses.replace(NORMED, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
        model = build_model(config, tiny_inputs(), seed=0).to(cuda)
        step = TrainStep(model, settings())
        assert step(good.to(cuda)).finite
        before = {name: value.cpu() for name, value in model.named_buffers() if value.is_floating_point()}
        assert before
        assert not step(bad.to(cuda)).finite
        for name, value in before.items():
            assert torch.equal(model.get_buffer(name).cpu(), value), name


def wrong(batch: Batch, what: str) -> Batch:
    if what == "single":
        single = batch.single.clone()
        single[1, 3] = 99
        return dataclasses.replace(batch, single=single)
    values, offsets = batch.jagged.values.clone(), batch.jagged.offsets.clone()
    if what == "list":
        values[2] = -1
    else:
        offsets[-1] += 1
    return dataclasses.replace(batch, jagged=JaggedRows(values, offsets))


@pytest.mark.parametrize("what", ["single", "list", "offsets"])
def test_a_row_outside_its_table_is_named_a_step_later_and_changes_nothing(what: str) -> None:
    batch = next(iter(ordered_batches(tiny_dataset(32), batch_size=32).batches(epoch=0)))
    with pretend_cuda() as cuda:
        model = build_model(
            dataclasses.replace(MODEL, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH)), tiny_inputs(), seed=0
        ).to(cuda)
        step = TrainStep(model, settings())
        step(batch.to(cuda)).read()
        before = {name: value.cpu() for name, value in model.state_dict().items() if "num_batches" not in name}
        late = step(wrong(batch, what).to(cuda))
        for name, value in before.items():
            assert torch.equal(model.state_dict()[name].cpu(), value), name
        with pytest.raises(DataError if what == "offsets" else BoundsError) as raised:
            late.read()
        if what != "offsets":
            assert {"single": "feature 'item', sample 3", "list": "feature 'tags'"}[what] in str(raised.value)
        assert step(batch.to(cuda)).read().finite
        with pytest.raises((BoundsError, DataError)):  # outside of training it is raised at once
            model(wrong(batch, what).to(cuda))
