"""Deduplicated batches on many ranks: the numbers of one device, and slices alone on the wire."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace

import pytest
import torch

from tests.parallel.test_parity import TOWERS, build, inputs, placed
from tests.parallel.test_parity_of_models import CONFIGS
from ziggurat.config import from_json, to_json
from ziggurat.features.batch import Batch
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.batches.samples import take_samples
from ziggurat.features.jagged import FeatureGroup
from ziggurat.models import (
    BuiltInConfig,
    DCNv2Config,
    DINConfig,
    DLRMConfig,
    TwoTowerConfig,
    WukongConfig,
    build_model,
)
from ziggurat.models.build import TowerModelConfig
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.tables.repeated import MIXED, PLAIN, parts_of_towers
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device, assert_same_sequences
from ziggurat.testing.ranks import run_ranks

GROUPS = (FeatureGroup(single=(0,), jagged=(0, 2)), FeatureGroup(jagged=(1,)))
KINDS = (DLRMConfig, DCNv2Config, WukongConfig, DINConfig, TwoTowerConfig)
MODELS = [next(config for config in CONFIGS if isinstance(config, kind)) for kind in KINDS]
REPEATS = ("sessions", "all equal", "all different", "empty")


def sessions(size: int = 16) -> Batch:
    """Four samples of each of some random ones."""
    return take_samples(random_batch(inputs(), size, seed=2), torch.arange(size) // 4)


def check(rank: int, plans: list[object], num_parts: int) -> None:
    del rank
    for plan_json in plans:
        plan = from_json(Plan, plan_json, where="test")
        batch = deduplicate(sessions(), GROUPS)
        assert [group.num_slices for group in batch.repeated] == [4, 4]

        def model(towers=plan.towers):
            return build(towers=towers, optimizer="rowwise_adagrad")

        assert_same_as_single_device(
            model, plan, batch=batch, tolerance=Tolerance(fields=1e-6, others=2e-6), num_parts=num_parts
        )
        if plan.towers is None:
            assert_same_sequences(model, plan, batch=batch, names=("tags", "words"))


@pytest.mark.parametrize(
    ("world_size", "num_parts"),
    [pytest.param(1, 1, marks=pytest.mark.slow), (2, 1), pytest.param(4, 1, marks=pytest.mark.slow), (2, 2)],
)
def test_every_placement(world_size: int, num_parts: int) -> None:
    run_ranks(check, world_size, [to_json(placed(world_size, kind)) for kind in Placement], num_parts, timeout_s=240.0)


def drawn(generator: random.Random, case: Case) -> tuple[Batch, tuple[FeatureGroup, ...]]:
    """A batch that repeats in some way, and random groups of its features."""
    features = [("single", at) for at in range(3)] + [("jagged", at) for at in range(3)]
    generator.shuffle(features)
    chosen, num_groups = features[: generator.randint(1, 6)], generator.randint(1, 3)
    groups = tuple(
        FeatureGroup(**{kind: tuple(sorted(at for each, at in mine if each == kind)) for kind in ("single", "jagged")})
        for mine in (chosen[number::num_groups] for number in range(num_groups))
        if mine
    )
    size, seed = generator.choice((9, 16, 24)), generator.randrange(1_000_000)
    if case.repeats == "empty":
        return random_batch(inputs(), generator.choice((0, 3)), seed=seed, max_length=0), groups
    base = random_batch(inputs(), size, seed=seed)
    sessions = {"all equal": [0] * size, "all different": list(range(size))}
    which = sessions.get(case.repeats) or sorted(generator.randrange(size // 4) for _ in range(size))
    again = take_samples(base, torch.tensor(which))
    return replace(again, dense=base.dense, labels=base.labels, weights=base.weights), groups


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its tables and towers somewhere, and a batch that repeats in some way."""

    model: BuiltInConfig
    plan: Plan
    has_modules: bool
    repeats: str
    num_parts: int
    seed: int


def check_case(rank: int, cases: list[object]) -> None:
    del rank
    for each in cases:
        case = from_json(Case, each, where="test")
        plain, groups = drawn(random.Random(case.seed), case)

        def model(case=case):
            return build_model(case.model, inputs(), seed=3, towers=case.plan.towers if case.has_modules else None)

        try:
            assert_same_as_single_device(
                model,
                case.plan,
                batch=deduplicate(plain, groups),
                tolerance=Tolerance(fields=1e-6, others=1e-5),
                num_parts=case.num_parts,
            )
        except Exception as error:
            raise AssertionError(f"{case}, {groups}: {error}") from error


def cases_of(world_size: int, *, seed: int, each: int) -> list[object]:
    """Models on random plans with slices of random groups."""
    generator = random.Random(seed)
    found = []
    for number, (model, repeats) in enumerate(itertools.product(MODELS, REPEATS)):
        sizes = [size for size in (1, 2, 4) if world_size % size == 0]
        has_modules = isinstance(model, TowerModelConfig)
        plan = placed(world_size, generator.choice(list(Placement)), TOWERS, generator.choice(sizes))
        plan = plan if has_modules or generator.random() < 0.5 else placed(world_size, Placement.TABLE_WISE)
        settings = {"repeats": repeats, "num_parts": generator.choice((1, 1, 2)), "seed": generator.randrange(999)}
        if number % each == 0:
            found.append(to_json(Case(model=model, plan=plan, has_modules=has_modules, **settings)))
    return found


@pytest.mark.parametrize(
    ("world_size", "each"),
    [(2, 5), pytest.param(2, 1, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_models_and_towers_with_random_repeats(world_size: int, each: int) -> None:
    """Forward, gradients, and weights after two steps are those of one device on the plain batch."""
    run_ranks(check_case, world_size, cases_of(world_size, seed=world_size, each=each), timeout_s=600.0)


def test_a_tower_computes_on_slices_if_all_its_features_are_in_one_group() -> None:
    spec = inputs()
    groups = (FeatureGroup(single=(0, 1), jagged=(0,)), FeatureGroup(jagged=(1,)))
    assert parts_of_towers(TOWERS, spec, groups) == (1, 1, MIXED, PLAIN)


def traffic(rank: int, plan_json: object, purposes: list[str]) -> list[list[int]]:
    """Bytes that this rank sends for a step of a plain batch, and of one with four samples a slice."""
    del rank
    plan, found = from_json(Plan, plan_json, where="test"), []
    for batch in (sessions(64), deduplicate(sessions(64), (FeatureGroup(single=(0, 1, 2), jagged=(0, 1, 2)),))):
        model = build(towers=plan.towers, optimizer="sgd")
        parallel = parallelize(model, plan, Topology.create(tower_size=plan.ranks_per_group))
        model.fields(batch).sum().backward()
        rows = [(str(row["purpose"]), int(row["bytes"])) for row in parallel.traffic.report()]
        found.append([sum(size for name, size in rows if name.startswith(kind)) for kind in purposes])
    return found


@pytest.mark.parametrize("tower_size", [0, 1])
def test_wire_bytes_fall_by_the_factor(tower_size: int) -> None:
    """Ids and vectors of flat models, and between tower groups what towers make of slices."""
    towers = TOWERS if tower_size else None
    purposes = ["ids", "inter-group all-to-all" if tower_size else "embeddings"]
    plan = placed(2, Placement.TABLE_WISE, towers, tower_size)
    (plain, short), _ = run_ranks(traffic, 2, to_json(plan), purposes)
    assert plain == [4 * each for each in short]
    assert min(short) > 0
