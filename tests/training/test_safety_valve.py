"""A loss that spikes sends products of a dispatch back to FP32, alike on all ranks, and for a resumed run too."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.training.rank_runs import Case as RankCase
from tests.training.rank_runs import die_at_step, model_of, plan_of, stored, training_config
from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.errors import NumericsError
from ziggurat.features.batch import Batch
from ziggurat.models import LossSums, Outputs
from ziggurat.models.converted import take_precision
from ziggurat.numerics.probe import Direction
from ziggurat.parallel.parallelize import Parallel, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.precision import DenseProducts
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import Choice, DispatchPlan, Whole
from ziggurat.precision.precision import Precision
from ziggurat.testing.ranks import RankFailure, run_ranks
from ziggurat.training.config import Compile
from ziggurat.training.safety_valve import MIN_ABOVE, MIN_LOSSES, SafetyValve
from ziggurat.training.step.train_step import ACTIVATIONS, TrainStep
from ziggurat.training.trainer import Trainer

BATCH = 16
NUM_STEPS = 90
SPIKES = ((40, 44), (80, 84))  # steps, from 0, whose loss is a hundred times as large


class FewBits:
    """Stands in for a step: products in few bits by their error."""

    def __init__(self, **errors: float) -> None:
        self.errors = errors

    def products_in_few_bits(self) -> dict[str, float]:
        return self.errors

    def send_back(self, names: list[str]) -> None:
        self.errors = {name: error for name, error in self.errors.items() if name not in names}


def valve_of(step: FewBits) -> SafetyValve:
    return SafetyValve(step)  # type: ignore[arg-type]  # it is asked for no more


def seen(valve: SafetyValve, losses: list[float]) -> list[str]:
    return [done for loss in losses if (done := valve.judge(loss, is_finite=True))]


def noise(count: int, *, seed: int = 0) -> list[float]:
    return [0.5 + 0.02 * random.Random(seed + index).gauss(0, 1) for index in range(count)]


def test_half_of_the_products_go_back_at_the_first_spike_and_the_others_at_the_second() -> None:
    step = FewBits(a=0.01, b=0.1, c=0.05, **{ACTIVATIONS: 0.0})
    valve = valve_of(step)
    assert not seen(valve, noise(500))
    (first,) = seen(valve, [5.0] * MIN_ABOVE)
    assert "FP32 from here on in b, c; 2 products stay" in first
    assert list(step.errors) == ["a", ACTIVATIONS]
    assert not seen(valve, [5.0] * 10)  # a new level is no spike: it is judged by its own losses
    assert not seen(valve, noise(MIN_LOSSES + 64))
    (second,) = seen(valve, [9.0] * MIN_ABOVE)
    assert "none is left" in second
    assert not step.errors
    assert not seen(valve, [*noise(64), *[9.0] * 9])


@pytest.mark.parametrize(
    "losses",
    [
        [*noise(64), *[5.0] * (MIN_ABOVE - 1), *noise(9)],  # a batch or two that are hard
        [*noise(MIN_LOSSES - 9), *[5.0] * 9],  # too early to tell
        [*[0.5] * 64, *[0.505] * 9],  # a loss that stood still moves
        [1.0 - 0.001 * index for index in range(900)],
    ],
)
def test_what_is_no_spike_moves_nothing(losses: list[float]) -> None:
    assert not seen(valve_of(FewBits(a=0.1)), losses)


def test_a_step_that_is_not_finite_sends_all_back_at_once_and_the_next_one_is_no_fault_of_theirs() -> None:
    step = FewBits(a=0.01, b=0.1)
    valve = valve_of(step)
    assert "none is left" in valve.judge(float("nan"), is_finite=False)
    assert not step.errors
    assert not valve.judge(float("nan"), is_finite=False)


def test_a_valve_goes_on_from_its_state() -> None:
    whole_step, step = FewBits(a=0.01, b=0.1), FewBits(a=0.01, b=0.1)
    whole, before = valve_of(whole_step), valve_of(step)
    losses = [*noise(50), 5.0, 5.0, 5.0, *noise(40), 9.0, 9.0]
    wanted = seen(whole, [*losses, 9.0])
    assert len(wanted) == 2
    found = seen(before, losses)
    resumed_step = FewBits(a=0.01, b=0.1)
    resumed = valve_of(resumed_step)
    resumed.load(json.loads(json.dumps(before.state())))
    assert list(resumed_step.errors) == list(step.errors) == ["a"]
    assert [*found, *seen(resumed, [9.0])] == wanted


# ----------------------------------------------------------------------------------------------------- whole runs


def write_dispatch(path: Path, *, kernel: str = "mx4", whole: str = "fp32") -> str:
    """Write a dispatch of all products of the model, each with an error of its own."""
    modules = [name for name, each in model_of(RankCase()).named_modules() if isinstance(each, DenseProducts)]
    choices = {
        name: {each: Choice(kernel=kernel, reason="", error=0.01 * index) for each in Direction}
        for index, name in enumerate(modules)
    }
    plan = DispatchPlan(
        model="DLRM",
        machine=machine_facts(torch.device("cpu")),
        choices=choices,
        missing={},
        whole=Whole(precision=whole, reason=""),
    )
    return str(plan.write(path))


def trainer_of(folder: str, dispatch: str, *, world_size: int, spikes: Any = SPIKES, **changes: Any) -> Trainer:
    """Return a trainer whose loss spikes, on this rank."""
    config = training_config(
        world_size,
        epochs=1,
        checkpoint_every=20,
        precision=Precision.DISPATCH,
        dispatch=dispatch,
        loader=LoaderConfig(batch_size=BATCH // world_size, shuffle=Shuffle.NONE),
        **changes,
    )
    model = model_of(RankCase(), draw_tables=world_size == 1)
    take_precision(model, Precision.DISPATCH, dispatch=dispatch)
    parallel: Parallel | None = None
    if world_size > 1:
        plan = plan_of(RankCase(), world_size)
        topology = Topology.create(tower_size=plan.ranks_per_group, ranks_per_host=1)
        parallel = parallelize(model, plan, topology, seed=3)

    def spiking(outputs: Outputs, batch: Batch) -> LossSums:
        sums = model.loss(outputs, batch)
        steps = (batch.row_ids // BATCH).tolist()
        is_spike = any(begin <= step < end for step in steps for begin, end in spikes)
        return dataclasses.replace(sums, total=sums.total * (100.0 if is_spike else 1.0))

    return Trainer(
        model,
        config=config,
        train=tiny_dataset(BATCH * NUM_STEPS),
        folder=folder,
        parallel=parallel,
        loss=spiking,
    )


def train(rank: int, world_size: int, folder: str, dispatch: str, dies_at: int = 0, resume: bool = False) -> list[str]:
    """Train, perhaps until the last rank is killed; return the products that are left in few bits."""
    trainer = trainer_of(folder, dispatch, world_size=world_size)
    die_at_step(trainer, dies_at, dies=bool(dies_at) and rank == world_size - 1)
    trainer.fit(resume=resume)
    return sorted(trainer.step.products_in_few_bits())


def trained(world_size: int, folder: Path, dispatch: str, *, resume: bool = False) -> list[list[str]]:
    """Train to the end on ranks, or in this process; return by rank the products that are left in few bits."""
    if world_size == 1:
        return [train(0, 1, str(folder), dispatch, resume=resume)]
    return run_ranks(train, world_size, world_size, str(folder), dispatch, 0, resume)


def log_of(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a run without what depends on the clock."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "timing"} for line in lines]


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_planted_spike_sends_products_back_also_in_a_run_that_is_killed_and_resumed(
    tmp_path: Path, world_size: int
) -> None:
    dispatch = write_dispatch(tmp_path / "dispatch.json")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert trained(world_size, whole, dispatch) == [[]] * world_size
    sent_back = [record for record in log_of(whole) if record["kind"] == "products"]
    assert [record["step"] for record in sent_back] == [43, 83]
    assert "products stay" in sent_back[0]["sent_back"]
    assert "none is left" in sent_back[1]["sent_back"]
    with pytest.raises(RankFailure):
        run_ranks(train, world_size, world_size, str(killed), dispatch, 65)
    assert trained(world_size, killed, dispatch, resume=True) == [[]] * world_size
    assert log_of(killed) == log_of(whole)
    wanted = stored(whole)
    resumed = stored(killed)
    assert wanted.keys() == resumed.keys()
    for name, values in wanted.items():
        assert np.array_equal(values, resumed[name]), name


def test_a_product_that_overflows_goes_back_and_the_run_goes_on(tmp_path: Path) -> None:
    """The loss of a healthy batch is not finite: with products in FP32 already, the run stops."""
    dispatch = write_dispatch(tmp_path / "dispatch.json")

    def endless(trainer: Trainer) -> None:
        loss = trainer.step._loss
        count = iter(range(1_000_000))
        trainer.step._loss = lambda outputs, batch: (
            dataclasses.replace(sums := loss(outputs, batch), total=sums.total * float("inf"))
            if next(count) in steps
            else loss(outputs, batch)
        )

    steps = {5}
    trainer = trainer_of(str(tmp_path / "one"), dispatch, world_size=1, spikes=(), max_steps=8)
    endless(trainer)
    trainer.fit()
    assert trainer.position.skipped == 1
    assert not trainer.step.products_in_few_bits()
    kinds = [record["kind"] for record in log_of(tmp_path / "one")]
    assert kinds.count("products") == kinds.count("skipped") == 1
    steps = {5, 6}
    trainer = trainer_of(str(tmp_path / "two"), dispatch, world_size=1, spikes=(), max_steps=8)
    endless(trainer)
    with pytest.raises(NumericsError):
        trainer.fit()


def test_activations_in_bf16_go_back_to_fp32(tmp_path: Path) -> None:
    dispatch = write_dispatch(tmp_path / "dispatch.json", kernel="bf16", whole="bf16")
    trainer = trainer_of(str(tmp_path / "run"), dispatch, world_size=1, spikes=SPIKES[:1], max_steps=50)
    assert trainer.step.products_in_few_bits() == {ACTIVATIONS: 0.0}
    trainer.fit()
    assert trainer.step.activations is Precision.FP32


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["bf16", "int8"])
def test_compiled_steps_have_the_bits_of_eager_ones_also_after_products_went_back(tmp_path: Path, kernel: str) -> None:
    """Small products in BF16 would be summed in another order if the compiler saw them."""
    dispatch = write_dispatch(tmp_path / "dispatch.json", kernel=kernel)
    batches = list(Loader(tiny_dataset(BATCH * 6), config=LoaderConfig(batch_size=BATCH)).batches(epoch=0))
    losses = []
    for compile in (Compile.OFF, Compile.DEFAULT):
        torch._dynamo.reset()
        config = training_config(
            1,
            precision=Precision.DISPATCH,
            dispatch=dispatch,
            compile=compile,
            loader=LoaderConfig(batch_size=BATCH),
        )
        step = TrainStep(model_of(RankCase()), config)
        found = [step(batch).loss for batch in batches[:4]]
        step.send_back(list(step.products_in_few_bits()))
        losses.append([*found, *(step(batch).loss for batch in batches[4:])])
    assert losses[0] == losses[1]
