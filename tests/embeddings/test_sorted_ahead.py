"""Rows of announced batches are checked and sorted beside the step before: the same bits, no wait, in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.sequence import test_next_item
from tests.training.test_late_steps import HISTORY_MODELS, MODEL, TABLES, repeating, settings, with_history
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizer, TableOptimizerKind
from ziggurat.embeddings.faults import RowFaults
from ziggurat.embeddings.storage import LowPrecision, MakeStorage, MemoryStorage
from ziggurat.errors import BoundsError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import Pooling
from ziggurat.models import BSTConfig, Model, ModelConfig, build_model
from ziggurat.ops.lookup import reference
from ziggurat.ops.row_formats import RowFormat
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda
from ziggurat.testing.pretend_queues import Stream, record_waits
from ziggurat.training.report.startup import startup_report
from ziggurat.training.step.train_step import TrainStep

CPU = torch.device("cpu")


def two_widths() -> InputSpec:
    """Single features and lists of both poolings, tables of two widths."""
    inputs = small_inputs(num_jagged=2)
    mean = dataclasses.replace(inputs.jagged[0], pooling=Pooling.MEAN)
    tables = [dataclasses.replace(table, embedding_dim=4 * (1 + at % 2)) for at, table in enumerate(inputs.tables)]
    return dataclasses.replace(inputs, jagged=(mean, *inputs.jagged[1:]), tables=tuple(tables))


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each sum of gradients, whether its rows had been sorted ahead."""
    found, known = list[bool](), reference.sorted_before

    def told(parts: Any, **options: Any) -> Any:
        ahead = known(parts, **options)
        if parts and hasattr(parts[0], "grad"):
            found.append(ahead is not None)
        return ahead

    monkeypatch.setattr(reference, "sorted_before", told)
    return found


def weights_of(model: Model) -> list[Tensor]:
    """All of them, in host memory."""
    dense = [value.cpu() for name, value in model.named_parameters() if not name.startswith("embeddings.")]
    return dense + [model.embeddings.table(table.name).cpu() for table in model.inputs.tables]


def trained(
    inputs: InputSpec,
    *,
    is_on: bool,
    batch_of: Callable[[int], Batch],
    rule: TableOptimizerKind = TableOptimizerKind.ROWWISE_ADAGRAD,
    make_storage: MakeStorage = MemoryStorage,
    model: ModelConfig = MODEL,
    **changes: Any,
) -> tuple[list[Tensor], list[float]]:
    """Weights after four steps on a pretended GPU, and what makes its host wait after the second."""
    with pretend_cuda() as cuda:
        tables = dataclasses.replace(TABLES, optimizer=rule)
        wide = {} if make_storage is MemoryStorage else {"embedding_dim": 16}
        config = dataclasses.replace(model, embedding=tables, **wide)  # pyright: ignore
        built = build_model(config, inputs, seed=0, make_storage=make_storage).to(cuda)
        torch.manual_seed(0)  # of masks that models draw
        step = TrainStep(built, settings(**changes))
        assert step.late is not None
        step.late.ahead.is_on = is_on
        batches = [batch_of(seed).to(cuda) for seed in range(4)]
        with record_waits() as waits:
            made = []
            for at, batch in enumerate(batches):
                made.append(step(batch, upcoming=batches[at + 1] if at < 3 else None))
                if at == 1:
                    waits.clear()
            assert waits == []
        losses = [each.loss for each in made]
        assert step.late.ahead.num_batches == (3 if is_on else 0)
        return weights_of(built), losses


BF16 = LowPrecision(row_format=RowFormat.BF16)


@pytest.mark.parametrize(
    ("is_repeating", "changes"),
    [
        (False, {}),
        (False, {"clip_norm": 0.1, "rule": TableOptimizerKind.SPARSE_ADAM}),
        (False, {"rule": TableOptimizerKind.ADAM_DENSE}),
        (False, {"make_storage": BF16}),
        (True, {}),
        (True, {"clip_norm": 0.1, "make_storage": BF16}),
    ],
    ids=str,
)
def test_steps_on_sorted_rows_have_the_bits_of_steps_that_sort(
    is_repeating: bool, changes: dict[str, Any], taken: list[bool]
) -> None:
    inputs = small_inputs(num_jagged=2) if "make_storage" in changes else two_widths()
    made = repeating(inputs) if is_repeating else lambda seed: random_batch(inputs, 9, seed=seed)
    one = trained(inputs, is_on=False, batch_of=made, **changes)
    assert taken
    assert not any(taken)
    taken.clear()
    other = trained(inputs, is_on=True, batch_of=made, **changes)
    num_first = len(taken) // 4
    assert not any(taken[:num_first])  # nobody announced the first batch
    assert all(taken[num_first:])
    assert one[1] == other[1]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("is_repeating", [False, True], ids=["plain", "repeating"])
@pytest.mark.parametrize("config", HISTORY_MODELS, ids=lambda config: config.kind)
def test_steps_on_histories_take_rows_that_were_sorted_ahead(
    config: ModelConfig, is_repeating: bool, taken: list[bool]
) -> None:
    inputs = with_history()
    made = repeating(inputs) if is_repeating else lambda seed: random_batch(inputs, 9, seed=seed)
    one = trained(inputs, is_on=False, batch_of=made, model=config)
    assert taken
    taken.clear()
    other = trained(inputs, is_on=True, batch_of=made, model=config)
    num_first = len(taken) // 4
    assert not any(taken[:num_first])
    assert all(taken[num_first:])
    assert one[1] == other[1]
    assert all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


def test_on_a_cpu_the_same_code_has_the_bits_of_updates_that_sort(taken: list[bool]) -> None:
    inputs, found = two_widths(), []
    batches = [random_batch(inputs, 9, seed=seed) for seed in range(3)]
    for is_ahead in (False, True):
        tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4, kernel=TABLES.kernel))
        optimizer, faults = TableOptimizer(tables), RowFaults(tables)
        tables.tables.faults = faults if is_ahead else None
        for at, batch in enumerate(batches):
            faults.ahead.begin()
            out = tables(batch)
            if is_ahead and at < 2:
                faults.ahead.announce(batches[at + 1])
            (out * torch.arange(out.numel()).view_as(out).remainder(7)).sum().backward()
            optimizer.step(0.1)
        found.append([tables.table(table.name).clone() for table in inputs.tables])
    assert taken == [False] * 6 + [False] * 2 + [True] * 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_batch_that_was_changed_after_it_was_announced_is_sorted_in_the_update(taken: list[bool]) -> None:
    inputs = small_inputs(num_jagged=1)
    with pretend_cuda() as cuda:
        found = []
        for is_announced in (True, False):
            model = build_model(dataclasses.replace(MODEL, embedding=TABLES), inputs, seed=0).to(cuda)
            step = TrainStep(model, settings())
            batches = [random_batch(inputs, 9, seed=seed).to(cuda) for seed in range(2)]
            step(batches[0], upcoming=batches[1] if is_announced else None)
            step(dataclasses.replace(batches[1], single=batches[0].single)).read()
            found.append(weights_of(model))
    assert not any(taken)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_row_outside_its_table_that_was_announced_is_named_by_its_own_step() -> None:
    inputs = small_inputs(num_jagged=1)
    batches = [random_batch(inputs, 9, seed=seed) for seed in range(3)]
    single = batches[1].single.clone()
    single[1, 4] = 10**6
    batches[1] = dataclasses.replace(batches[1], single=single)
    with pretend_cuda() as cuda:
        model = build_model(dataclasses.replace(MODEL, embedding=TABLES), inputs, seed=0).to(cuda)
        step = TrainStep(model, settings())
        there = [batch.to(cuda) for batch in batches]
        good = step(there[0], upcoming=there[1])
        assert good.finite
        before = weights_of(model)
        bad = step(there[1], upcoming=there[2])
        assert all(torch.equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
        with pytest.raises(BoundsError, match="'single1', sample 4"):
            bad.read()
        assert step(there[2]).finite


def test_the_start_up_report_says_whose_rows_are_sorted_ahead() -> None:
    def line(config: ModelConfig, inputs: InputSpec, device: torch.device) -> str:
        model = build_model(dataclasses.replace(config, embedding=TABLES), inputs, seed=0).to(device)  # pyright: ignore
        return startup_report(TrainStep(model, settings()), data={}).sections["Training"].get("rows of updates", "none")

    ahead = "sorted while the step before computes"
    items = {item.table for item in test_next_item.INPUTS.sequences}
    with pretend_cuda() as cuda:
        assert line(MODEL, small_inputs(), cuda) == line(BSTConfig(), with_history(), cuda) == ahead
        found = line(test_next_item.SMALL, test_next_item.INPUTS, cuda)
        assert found.startswith(f"{ahead}; in the update those of ")
        assert found.endswith(": rows are drawn in a step")
        assert all(table in found for table in items)
    assert line(MODEL, small_inputs(), CPU) == "none"


def test_rows_of_a_storage_of_which_rows_are_drawn_are_left_to_its_update() -> None:
    inputs = with_history()
    tables = (dataclasses.replace(inputs.tables[0], embedding_dim=8), *inputs.tables[1:])
    inputs = dataclasses.replace(inputs, tables=tables)
    names = {table.name for table in inputs.tables}
    with pretend_cuda() as cuda:
        read = EmbeddingTables(inputs, EmbeddingConfig(dim=4, kernel=TABLES.kernel)).to(cuda)
        batch = random_batch(inputs, 9, seed=0).to(cuda)
        for knows_rows, left in ((False, {"single0"}), (True, set())):
            ahead = RowFaults(read, knows_rows=knows_rows).ahead
            ahead.announce(batch)
            ahead.begin()
            known = ahead.taken(*read.reads_of(batch)[0])
            assert known is not None
            in_time = {slot.table for each in known[0].sorted_reads for at in each.reads for slot in at.layout.slots}
            assert in_time == names - left
            assert set(ahead.in_updates()) == left


def identity(tensor: Tensor) -> int:
    """Of what a pretended tensor holds."""
    assert isinstance(tensor, PretendCuda)
    return id(tensor.host)


class _Ordered(Stream):
    """A queue that writes down what it was asked for."""

    log: list[tuple[str, str, object]] = []  # noqa: RUF012  # of all queues

    def __init__(self, *given: Any, name: str = "side", **options: Any) -> None:
        super().__init__(*given, **options)
        self.name = name

    def wait_event(self, event: Any) -> None:
        self.log.append((self.name, "waits", event))

    def record_event(self, event: Any = None) -> Any:
        event = super().record_event(event)
        self.log.append((self.name, "records", event))
        return event


def test_each_queue_waits_for_the_other_and_memory_is_kept_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, kept = small_inputs(num_jagged=1), list[tuple[int, str]]()
    monkeypatch.setattr(PretendCuda, "record_stream", lambda self, queue: kept.append((id(self.host), queue.name)))
    with pretend_cuda() as cuda:
        main = _Ordered(name="main")
        monkeypatch.setattr(torch.cuda, "Stream", _Ordered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: main)
        tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4, kernel=TABLES.kernel)).to(cuda)
        ahead = RowFaults(tables).ahead
        batch = random_batch(inputs, 9, seed=0).to(cuda)
        _Ordered.log.clear()
        ahead.begin()
        ahead.announce(batch)
        ahead.begin()
        known = ahead.taken(*ahead._tables.reads_of(batch)[0])
        assert known is not None
        told = [(queue, what) for queue, what, _ in _Ordered.log]
        assert told == [
            ("main", "records"),
            ("side", "waits"),
            ("side", "records"),
            ("main", "records"),
            ("main", "waits"),
        ]
        events = [event for *_, event in _Ordered.log]
        assert events[0] is events[1]
        assert events[2] is events[4]
        assert {(identity(each), "side") for each in (batch.single, batch.jagged.values)} <= set(kept)
        lookups, fault = known
        made = [lookups.single, lookups.values, lookups.offsets, fault, *lookups.sorted_reads[0].tensors]
        assert {(identity(each), "main") for each in made} <= set(kept)
        ahead.begin()
        assert ahead.taken(*ahead._tables.reads_of(batch)[0]) is None, "a batch is held until the step after its own"
