"""Steps that are one CUDA graph: the bits of eager ones, on tensors that pretend; what is said where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.models.sequence import test_next_item, test_ranker
from tests.training.test_late_steps import (
    CLICK_MODELS,
    HISTORY_MODELS,
    MODEL,
    NORMED,
    RANKERS,
    TABLES,
    TINY,
    repeating,
    settings,
    with_history,
)
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.embeddings import TableOptimizerKind
from ziggurat.embeddings.storage import LowPrecision, MakeStorage, MemoryStorage
from ziggurat.embeddings.storage.part import TablePart
from ziggurat.errors import BoundsError, ConfigError, DataError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import LossSums, ModelConfig, Outputs, build_model
from ziggurat.ops.lookup import KernelChoice, reference
from ziggurat.ops.row_formats import RowFormat
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.testing.pretend_queues import Stream, recordings
from ziggurat.training.config import DenseOptimizer, NonFinite, StepGraphs, TrainingConfig
from ziggurat.training.report.startup import _compile_line, _waiting_line
from ziggurat.training.state import state_tensors
from ziggurat.training.step import graph
from ziggurat.training.step.own_loss import LossFunction
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer

STEPS = 8
NAN_STEP = 5
INPUTS = small_inputs(num_jagged=0, num_vectors=1, num_labels=2)


def with_lists() -> InputSpec:
    """The same with lists that are summed, and lists whose mean is taken."""
    inputs = small_inputs(num_jagged=2, num_vectors=1, num_labels=2)
    mean = dataclasses.replace(inputs.jagged[0], pooling=Pooling.MEAN)
    return dataclasses.replace(inputs, jagged=(mean, *inputs.jagged[1:]))


def made_step(
    config: ModelConfig,
    device: torch.device,
    *,
    choice: StepGraphs,
    inputs: InputSpec = INPUTS,
    tables: Any = TABLES,
    make_storage: MakeStorage = MemoryStorage,
    loss: LossFunction | None = None,
    **changes: Any,
) -> TrainStep:
    torch.manual_seed(3)
    config = dataclasses.replace(config, embedding=tables)
    model = build_model(config, inputs, seed=0, make_storage=make_storage).to(device)
    model.train()
    return TrainStep(model, settings(step_graph=choice, **changes), loss=loss)


def numbers_of(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, TablePart):
        return torch.cat([value.rows.read(first, count).cpu() for first, count in value.rows.chunks()])
    return value.cpu()


def results_of(
    config: ModelConfig,
    *,
    choice: StepGraphs,
    inputs: InputSpec = INPUTS,
    device: Callable[[], AbstractContextManager[torch.device]] = pretend_cuda,
    reason: str = "",
    is_waiting: bool = False,
    **given: Any,
) -> tuple[list[Any], dict[str, Any], int]:
    """Verdicts and state of a few steps whose rates differ, one of which meets a NaN; and how many a graph made."""
    with device() as cuda:
        step = made_step(config, cuda, choice=choice, inputs=inputs, **given)
        if is_waiting:
            step._loss = waiting_loss
        made = []
        for number in range(STEPS):
            batch = random_batch(inputs, 9, seed=number)
            if number == NAN_STEP:
                batch.dense[2, 1] = torch.nan
            made.append(step(batch.to(cuda), factor=1.0 / (1 + number)))
            if number == STEPS - 2:  # the last of an epoch
                made.append(step(random_batch(inputs, 4, seed=100).to(cuda)))
        read = [each.read() for each in made]
        assert [each.finite for each in read] == [number != NAN_STEP for number in range(STEPS + 1)]
        state = {name: numbers_of(value) for name, value in state_tensors(step).items()}
        drawn = torch.rand(3, device=cuda).cpu()
        verdicts = [(each.loss if each.finite else "none", each.first_bad) for each in read]
        replayed = 0 if step.graph is None else step.graph.num_replayed
        assert step.graph is None or (reason in step.graph.reason and bool(reason) is bool(step.graph.reason))
    return verdicts, state | {"the next draws": drawn}, replayed


def assert_same_bits(config: ModelConfig, *, replays: int = STEPS - 3, **given: Any) -> None:
    expected, eager, none = results_of(config, choice=StepGraphs.OFF, **given)
    verdicts, state, replayed = results_of(config, choice=StepGraphs.ON, **given)
    assert none == 0
    assert replayed == replays  # two eager steps and one on the buffers come first
    assert verdicts == expected
    assert state.keys() == eager.keys()
    for name, value in eager.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("config", CLICK_MODELS, ids=lambda config: config.kind)
def test_a_graph_has_the_bits_of_eager_steps(config: ModelConfig) -> None:
    assert_same_bits(config, clip_norm=0.1)


@pytest.mark.parametrize("row_format", [RowFormat.BF16, RowFormat.SPLIT_BF16])
def test_rows_that_are_rounded_at_random_have_the_same_bits(row_format: RowFormat) -> None:
    config = dataclasses.replace(MODEL, embedding_dim=16)
    assert_same_bits(config, make_storage=LowPrecision(row_format=row_format))


def test_dropout_draws_the_same_numbers() -> None:
    assert_same_bits(dataclasses.replace(MODEL, top=dataclasses.replace(TINY, dropout=0.3)))


@pytest.mark.parametrize("optimizer", [DenseOptimizer.ADAMW, DenseOptimizer.SGD])
def test_averages_batch_norms_and_whole_tables_have_the_same_bits(optimizer: DenseOptimizer) -> None:
    tables = dataclasses.replace(TABLES, optimizer=TableOptimizerKind.ADAM_DENSE)
    assert_same_bits(NORMED, tables=tables, weight_average=0.9, embedding_l2=1e-3, optimizer=optimizer)


@pytest.mark.parametrize(
    ("kind", "make_storage"),
    [
        (TableOptimizerKind.ROWWISE_ADAGRAD, MemoryStorage),
        (TableOptimizerKind.SPARSE_ADAM, LowPrecision(row_format=RowFormat.BF16)),
        (TableOptimizerKind.ADAM_DENSE, MemoryStorage),
    ],
    ids=["adagrad", "adam, bf16", "dense"],
)
def test_lists_of_any_size_have_the_same_bits(kind: TableOptimizerKind, make_storage: MakeStorage) -> None:
    tables = dataclasses.replace(TABLES, optimizer=kind)
    config = dataclasses.replace(MODEL, embedding_dim=16)
    assert_same_bits(config, inputs=with_lists(), tables=tables, make_storage=make_storage)


def test_batches_with_more_rows_than_there_is_room_for_are_stepped_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_ROOM", 1.0)
    monkeypatch.setattr(graph, "_ROOM_STEP", 1)
    inputs = with_lists()
    sizes = [random_batch(inputs, 9, seed=seed).jagged.values.numel() for seed in range(STEPS)]
    fitting = sum(size <= max(sizes[:3]) for size in sizes[3:])
    assert 0 < fitting < STEPS - 3
    assert_same_bits(MODEL, inputs=inputs, replays=fitting)


def test_lists_with_wrong_ends_are_found_in_a_graph_with_room() -> None:
    inputs = with_lists()
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.ON, inputs=inputs)
        batch = random_batch(inputs, 9, seed=0)
        for _ in range(4):
            assert step(batch.to(cuda)).read().finite
        offsets = batch.jagged.offsets.clone()
        offsets[-1] += 1
        wrong = dataclasses.replace(batch, jagged=JaggedRows(batch.jagged.values, offsets))
        before = {name: value.cpu() for name, value in step.model.state_dict().items()}
        late = step(wrong.to(cuda))
        for name, value in before.items():
            assert torch.equal(step.model.state_dict()[name].cpu(), value), name
        with pytest.raises(DataError):
            late.read()
        assert step.graph is not None
        assert step.graph.num_replayed == 2


def test_sparse_adam_counts_its_steps_where_the_graph_reads_them() -> None:
    assert_same_bits(MODEL, tables=dataclasses.replace(TABLES, optimizer=TableOptimizerKind.SPARSE_ADAM))


def dataset(num_rows: int, *, seed: int = 0) -> MemoryDataset:
    """Rows without lists, with labels that can be learned."""
    rng = np.random.default_rng(seed)
    tables = (TableSpec(name="user", num_rows=43), TableSpec(name="item", num_rows=23))
    single = (SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item"))
    inputs = InputSpec(dense=("price",), single=single, tables=tables, labels=(LabelSpec(name="click"),))
    user = rng.integers(3, 43, num_rows)
    columns = {
        "price": pa.array(rng.normal(size=num_rows).astype(np.float32)),
        "user": pa.array(user.astype(np.int32)),
        "item": pa.array(rng.integers(3, 23, num_rows).astype(np.int32)),
        "label:click": pa.array((user % 2).astype(np.float32)),
        "row:": pa.array(np.arange(num_rows, dtype=np.int64)),
    }
    return MemoryDataset(pa.table(columns), inputs, rows_per_group=64)


def trained(
    folder: Path, device: torch.device, *, has_valid: bool = True, **changes: Any
) -> tuple[dict[str, Any], str, Trainer]:
    """Weights, log and trainer of a run whose last batch of an epoch is short."""
    data = dataset(32 * 6 + 5)
    top = dataclasses.replace(TINY, dropout=0.2)
    model = build_model(dataclasses.replace(MODEL, embedding=TABLES, top=top), data.inputs, seed=0).to(device)
    config = settings(**{"epochs": 2, "clip_norm": 0.3, "non_finite": NonFinite.SKIP, "checkpoint_every": 5} | changes)
    trainer = Trainer(model, config=config, train=data, valid=dataset(64, seed=1) if has_valid else None, folder=folder)
    trainer.fit(resume=folder.exists())
    state = {name: value.cpu() for name, value in state_tensors(trainer.step).items()}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return state, "\n".join(line.partition(', "timing"')[0] for line in lines), trainer


def assert_same_run(one: tuple[dict[str, Any], str, Trainer], other: tuple[dict[str, Any], str, Trainer]) -> None:
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        assert torch.equal(other[0][name], value), name


def test_a_run_with_evaluations_and_a_short_last_batch_has_the_bits_of_eager_steps(tmp_path: Path) -> None:
    with pretend_cuda() as cuda:
        found = {choice: trained(tmp_path / choice.value, cuda, step_graph=choice) for choice in StepGraphs}
    for choice in (StepGraphs.ON, StepGraphs.AUTO):
        made = found[choice][2].step.graph
        assert made is not None
        assert made.num_replayed >= 4
        assert_same_run(found[StepGraphs.OFF], found[choice])


def test_a_run_that_goes_on_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    given = {"step_graph": StepGraphs.ON, "has_valid": False}
    with pretend_cuda() as cuda:
        whole = trained(tmp_path / "whole", cuda, **given)
        trained(tmp_path / "parts", cuda, max_steps=5, **given)
        parts = trained(tmp_path / "parts", cuda, **given)
    for _, _, trainer in (whole, parts):
        assert trainer.step.graph is not None
        assert trainer.step.graph.num_replayed > 0
    assert_same_run(whole, parts)


@pytest.mark.parametrize("changes", [{}, {"clip_norm": 0.1}], ids=str)
def test_rows_are_sorted_beside_the_step_that_a_graph_makes(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    known = reference.sorted_before
    wait = Stream.wait_stream

    def told(parts: Any, **options: Any) -> Any:
        found = known(parts, **options)
        if parts and hasattr(parts[0], "grad"):
            order.append("sorted before" if found is not None else "sorted now")
        return found

    def waited(stream: Stream, other: Stream) -> None:
        order.append("wait")
        wait(stream, other)

    monkeypatch.setattr(reference, "sorted_before", told)
    monkeypatch.setattr(Stream, "wait_stream", waited)
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.ON, **changes)
        for seed in range(3):
            order.clear()
            step(random_batch(INPUTS, 9, seed=seed).to(cuda)).read()
    # To the queue of the graph, to the side queue, back for the update, which has its rows, and to the run's queue.
    assert order == ["wait", "wait", "wait", "sorted before", "wait"]


def test_a_row_outside_its_table_is_named_and_changes_nothing() -> None:
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.ON)
        batch = random_batch(INPUTS, 9, seed=0)
        for _ in range(4):
            assert step(batch.to(cuda)).read().finite
        before = {name: value.cpu() for name, value in step.model.state_dict().items()}
        single = batch.single.clone()
        single[1, 3] = 99
        late = step(dataclasses.replace(batch, single=single).to(cuda))
        for name, value in before.items():
            assert torch.equal(step.model.state_dict()[name].cpu(), value), name
        with pytest.raises(BoundsError, match="feature 'single1', sample 3"):
            late.read()
        assert step(batch.to(cuda)).read().finite
        assert step.graph is not None
        assert step.graph.num_replayed == 3


def waiting_loss(outputs: Outputs, batch: Batch) -> LossSums:
    losses = (outputs.logits - batch.labels).square()
    scale = 1.0 if losses.sum().item() > -1.0 else 2.0
    return LossSums(total=scale * losses.sum(dim=0), weight=torch.ones_like(losses).sum(dim=0))


def test_a_step_that_cannot_be_recorded_is_refused_where_a_graph_is_asked_for() -> None:
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.ON, loss=waiting_loss)
        batch = random_batch(INPUTS, 9, seed=0).to(cuda)
        for _ in range(3):
            step(batch).read()
        with pytest.raises(ConfigError, match=r"not permitted when stream is capturing \(_local_scalar_dense\)"):
            step(batch)


def test_a_step_that_cannot_be_recorded_is_made_eagerly_else() -> None:
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.AUTO)
        eager = made_step(MODEL, cuda, choice=StepGraphs.OFF)
        step._loss = eager._loss = waiting_loss
        batches = [random_batch(INPUTS, 9, seed=seed).to(cuda) for seed in range(12)]
        losses = [[each(batch).read().loss for batch in batches] for each in (step, eager)]
        assert losses[0] == losses[1]
        assert step.graph is not None
        assert "could not be recorded as a CUDA graph (RuntimeError" in step.graph.reason
        assert step.take_news() == [f"steps are made eagerly: {step.graph.reason}"]
        assert step.take_news() == []
        assert step.late is not None
        assert step.late.ahead.is_on


@pytest.mark.parametrize(("graph_ms", "is_kept"), [(4.0, True), (6.2, False)])
def test_auto_keeps_what_was_faster(graph_ms: float, is_kept: bool) -> None:
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.AUTO)
        batch = random_batch(INPUTS, 9, seed=0).to(cuda)
        # 7 pairs of events follow eager steps, then one on the buffers and the one that was recorded.
        times = [6.0] * 7 + [30.0, 50.0] + [graph_ms] * 9
        with mock.patch("ziggurat.testing.pretend_queues.Event.elapsed_time", side_effect=times):
            for _ in range(20):
                step(batch).read()
        assert step.graph is not None
        assert bool(step.graph.reason) is not is_kept
        said = "full batches are one CUDA graph: 4.00 ms, eagerly 6.00 a step"
        slower = "steps are made eagerly: one CUDA graph was slower (6.20 ms, eagerly 6.00)"
        assert step.take_news() == [said if is_kept else slower]


@contextlib.contextmanager
def real_gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [MODEL, *(each for each in CLICK_MODELS if each.kind in ("dcn_v2", "wukong"))])
def test_a_graph_on_a_gpu_has_the_bits_of_eager_steps(config: ModelConfig) -> None:
    tables = dataclasses.replace(TABLES, kernel=KernelChoice.AUTO)
    assert_same_bits(config, device=real_gpu, tables=tables, clip_norm=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.TRITON])
def test_lists_and_dropout_in_a_graph_on_a_gpu_have_the_bits_of_eager_steps(kernel: KernelChoice) -> None:
    config = dataclasses.replace(MODEL, top=dataclasses.replace(TINY, dropout=0.3))
    assert_same_bits(config, device=real_gpu, inputs=with_lists(), tables=dataclasses.replace(TABLES, kernel=kernel))


@pytest.mark.parametrize("device", [pretend_cuda, pytest.param(real_gpu, marks=pytest.mark.gpu)])
def test_a_recording_that_fails_leaves_what_was_there(
    device: Callable[[], AbstractContextManager[torch.device]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizers and the generator, of which dropout goes on to draw."""
    monkeypatch.setattr(graph, "_TIMED_STEPS", 1)  # so that steps follow the recording
    given: dict[str, Any] = {"device": device, "is_waiting": True, "clip_norm": 0.1}
    config = dataclasses.replace(MODEL, top=dataclasses.replace(TINY, dropout=0.3))
    expected, eager, _ = results_of(config, choice=StepGraphs.OFF, **given)
    verdicts, state, replayed = results_of(config, choice=StepGraphs.AUTO, reason="could not be recorded", **given)
    assert replayed == 0
    assert verdicts == expected
    for name, value in eager.items():
        assert torch.equal(state[name], value), name


def test_batches_of_ever_new_shapes_are_not_waited_for() -> None:
    inputs = small_inputs(num_jagged=1, num_single=1)
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.AUTO, inputs=inputs)
        for size in range(4, 40):
            step(random_batch(inputs, size, seed=size).to(cuda)).read()
        assert step.graph is not None
        assert "other sizes each time" in step.graph.reason


def test_batches_whose_lists_are_kept_once_are_stepped_eagerly() -> None:
    inputs = small_inputs(num_jagged=2)
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.AUTO, inputs=inputs)
        assert step(repeating(inputs)(0).to(cuda)).read().finite
        assert step.graph is not None
        assert "kept once" in step.graph.reason


def test_runs_without_graphs_say_why() -> None:
    cpu = torch.device("cpu")
    assert made_step(MODEL, cpu, choice=StepGraphs.AUTO).no_graph == "the CPU computes"
    with pytest.raises(ConfigError, match="the CPU computes"):
        made_step(MODEL, cpu, choice=StepGraphs.ON)
    with pretend_cuda() as cuda:
        assert made_step(MODEL, cuda, choice=StepGraphs.OFF).no_graph == "step_graph is off"
        listed = made_step(HISTORY_MODELS[2], cuda, choice=StepGraphs.AUTO, inputs=with_history())
        assert "event by event (clicks)" in listed.no_graph
        assert _waiting_line(listed)["one graph a step"] == f"no: {listed.no_graph}"
        own = made_step(MODEL, cuda, choice=StepGraphs.AUTO, loss=waiting_loss)
        assert own.no_graph.startswith("a loss of one's own may count steps")
        model = build_model(dataclasses.replace(MODEL, embedding=TABLES), INPUTS, seed=0).to(cuda)
        name, part = list(model.named_children())[-1]
        handle = part.register_forward_hook(lambda *given: None)
        assert TrainStep(model, settings()).no_graph.startswith(f"a hook of {name} may count steps")
        handle.remove()
        assert TrainStep(model, settings()).no_graph == ""
        part.add_module("mine", Counting())
        assert TrainStep(model, settings()).no_graph.startswith(f"Counting ({name}.mine) may count steps")
        assert TrainStep(model, settings(step_graph=StepGraphs.ON)).no_graph == ""
        step = made_step(MODEL, cuda, choice=StepGraphs.AUTO)
        assert _waiting_line(step)["one graph a step"].startswith("full batches, if that is faster")


def test_a_gpu_without_memory_for_both_steps_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretend_cuda() as cuda:
        step = made_step(MODEL, cuda, choice=StepGraphs.AUTO)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 3 << 30)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (5 << 30, 80 << 30))
        for seed in range(9):
            assert step(random_batch(INPUTS, 9, seed=seed).to(cuda)).read().finite
        assert step.graph is not None
        assert "would keep the 3.0 GiB that a step takes" in step.graph.reason
        assert "5.0 GiB are free" in step.graph.reason
        assert step.graph.num_replayed == 0


class Counting(torch.nn.Module):
    """Counts in Python."""


class _Names:
    """Notes what is computed, in the place of a recording: whatever waits raises."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def computed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs)


def _listed_batches() -> dict[str, tuple[ModelConfig, InputSpec, Callable[[int], Batch]]]:
    found: dict[str, tuple[ModelConfig, InputSpec, Callable[[int], Batch]]] = {}
    for config in HISTORY_MODELS:
        inputs = with_history()
        found[config.kind] = config, inputs, lambda seed, inputs=inputs: random_batch(inputs, 9, seed=seed)
    for name, ranker in RANKERS.items():
        lengths = [(3, 2), (0, 1), (5, 3), (4, 2)]
        found[name] = ranker, test_ranker.INPUTS, lambda seed, lengths=lengths: test_ranker.batch_of(lengths, seed=seed)
    found["next_item"] = (
        test_next_item.SMALL,
        test_next_item.INPUTS,
        lambda seed: test_next_item.batch_of([3, 0, 5, 4], seed=seed),
    )
    for config in CLICK_MODELS:
        found[config.kind] = config, INPUTS, lambda seed: random_batch(INPUTS, 9, seed=seed)
    return found


CATALOGUE = _listed_batches()


@pytest.mark.parametrize("name", CATALOGUE)
def test_steps_of_every_model_make_the_same_operations_and_none_waits(name: str) -> None:
    config, inputs, batch_of = CATALOGUE[name]
    with pretend_cuda() as cuda:
        step = made_step(config, cuda, choice=StepGraphs.OFF, inputs=inputs, clip_norm=0.1)
        batch = batch_of(0).to(cuda)
        for _ in range(2):
            step(batch)
        noted = []
        for _ in range(3):
            recordings.append(_Names())
            step._on_device(step.late, batch)
            noted.append(recordings.pop().names)
        assert len(noted[0]) > 50
        assert noted[0] == noted[1] == noted[2]


def test_the_report_names_the_graph_beside_compilation() -> None:
    step = mock.Mock()
    step.config = TrainingConfig(compile="cuda_graphs")  # type: ignore[arg-type]
    step.model.towers = None
    step.no_graph = ""
    assert _compile_line(step) == "cuda_graphs (whole steps as CUDA graphs: see below)"
