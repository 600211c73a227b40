"""The tower partitioner: which features share a tower. From interactions and loads to `ziggurat.plan.Towers`.

    interactions I ─► distances ─► plane (picture) ──┐
                          │                          ├─► size-constrained k-means ─► repair ─► swaps ─► best candidate
                          └─► all eigenvectors ──────┘        restarts                 limits    true cost

*Coherent* towers (distance 1 − I) hold features that matter to each other: the tower module sees them together before
it compresses, so it can compress well. *Diverse* towers (distance I) hold features that have little to do with each
other. *Naive* deals features out in turn, *sequential* cuts their order into blocks: what a partition must beat. A
partition by hand is a file of the same form (`ziggurat.plan.Towers`).

The paper clusters in the plane alone (`Refine.NONE` does that). A plane cannot hold many groups that are equally far
apart, so by default candidates also come from k-means in the space of the leading eigenvectors, as many as towers; the
cheaper half is then polished by moves and swaps on the objective itself (`local_search`), and the cheapest that fits is
taken.

Features that share a table are never split. Towers keep within (1 ± tolerance) of the mean count, or below
(1 + tolerance) of the mean bytes or lookups; a table heavier than that gets a tower of its own (`tower_items`). The
memory limit is hard. Same inputs and seed, same towers, on the same versions of torch and numpy.

Reference: Luo et al., "Disaggregated Multi-Tower" (arXiv 2403.00877), section on the tower partitioner; the paper's
abbreviation for it is TP. Cost on one core: below 1 s for 26 features, half a minute for 1,000 features × 64 towers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ziggurat.errors import ConfigError, PlanError
from ziggurat.plan import Towers
from ziggurat.planning.towers.balanced_clusters import balanced_clusters
from ziggurat.planning.towers.items import (
    BalanceBy,
    FeatureLoad,
    Indexes,
    Items,
    Limits,
    check_fits,
    limits_of,
    longest_first,
    merge_by_table,
    no_room,
    too_heavy,
)
from ziggurat.planning.towers.local_search import Partition
from ziggurat.planning.towers.plane import Plane, PlaneConfig, classical_scaling, learn_plane
from ziggurat.planning.towers.report import PartitionReport, report_on
from ziggurat.typed import checked

_MAX_NAMES = 6


class TowerStrategy(StrEnum):
    """The features that a tower should hold."""

    COHERENT = "coherent"  # features that interact strongly
    DIVERSE = "diverse"  # features that interact little
    NAIVE = "naive"  # features dealt out in turn, in the order of the model
    SEQUENTIAL = "sequential"  # blocks of neighbours in the order of the model


class Refine(StrEnum):
    """The extent of refinement beyond clusters in the plane."""

    NONE = "none"  # the paper's pipeline
    SWAPS = "swaps"  # also other starts, and moves and swaps on the true objective


@dataclass(frozen=True, kw_only=True)
@checked
class TowerPartitionConfig:
    """Settings of the tower partitioner, `partition_towers`.

    Args:
        num_towers: T, how many.
        strategy: what a tower holds: features that interact strongly (coherent), little (diverse), dealt out in turn
            (naive) or neighbours in the order of the model (sequential).
        balance: what towers should hold the same amount of; `naive` and `sequential` balance the count of tables.
        tolerance: share by which a tower may differ from the mean.
        memory_limit_bytes: most that the tables of a tower may take, with optimizer state; 0: no limit.
        seed: of starts.
        restarts: runs of k-means in each space.
        refine: none takes the clusters in the plane; swaps adds other starts, and moves on the true objective.
        plane: of the learned plane.
    """

    num_towers: int = 2
    strategy: TowerStrategy = TowerStrategy.COHERENT
    balance: BalanceBy = BalanceBy.COUNT
    tolerance: float = 0.1
    memory_limit_bytes: int = 0
    seed: int = 0
    restarts: int = 4
    refine: Refine = Refine.SWAPS
    plane: PlaneConfig = field(default_factory=PlaneConfig)

    def __post_init__(self) -> None:
        fits = self.num_towers >= 1 and self.restarts >= 1 and min(self.memory_limit_bytes, self.seed) >= 0
        if not fits or not 0 <= self.tolerance <= 10:
            raise ConfigError(
                expected="num_towers and restarts >= 1, memory_limit_bytes and seed >= 0, tolerance from 0 to 10",
                found=f"num_towers = {self.num_towers}, restarts = {self.restarts}, tolerance = {self.tolerance}, "
                f"memory_limit_bytes = {self.memory_limit_bytes}, seed = {self.seed}",
                where="TowerPartitionConfig",
                ways_out="correct the number",
            )


@dataclass(frozen=True, kw_only=True)
class TowerPartition:
    """Towers, and what led to them.

    Args:
        towers: the result; `towers.save("towers.json")`.
        plane: a point for each feature.
        interactions: I.
        features: what was partitioned, in the order of rows of `interactions` and `plane.coordinates`.
        config: as given.
        notes: where the tolerance could not be kept, and why.
    """

    towers: Towers
    plane: Plane
    interactions: Float64[Tensor, "F F"]
    features: tuple[FeatureLoad, ...]
    config: TowerPartitionConfig
    notes: tuple[str, ...] = ()

    @property
    def coordinates(self) -> Float64[Tensor, "F d"]:
        """The points of the plane."""
        return self.plane.coordinates

    def report(self) -> PartitionReport:
        """Interaction within and across, loads and balance, beside the naive partition."""
        items = merge_by_table(self.features)
        naive = _towers_of(_dealt(items, num_towers=len(self.towers)), items, self.features)
        return report_on(
            self.towers, naive=naive, interactions=self.interactions, features=self.features, notes=self.notes
        )


def partition_towers(
    interactions: Float[Tensor, "F F"], *, features: Sequence[FeatureLoad], config: TowerPartitionConfig
) -> TowerPartition:
    """Group features into towers.

    Args:
        interactions: I_ij in [0, 1], symmetric; see `interactions.InteractionSums`. The diagonal is not read.
        features: name, table and loads of each row of it.
        config: how many towers, what for, within which limits.

    Raises:
        PlanError: more towers than tables, a table or all tables too large for the memory limit, or interactions that
            are no such matrix.
    """
    matrix = _checked(interactions, features)
    # Features of one table are one item: the table lies on one tower's ranks, so they cannot be parted.
    items = merge_by_table(features)
    check_fits(items, num_towers=config.num_towers, memory_limit_bytes=config.memory_limit_bytes)
    # Near is what shall be together: features that interact strongly, or for `diverse` those that do not.
    distances = (matrix if config.strategy is TowerStrategy.DIVERSE else 1 - matrix).fill_diagonal_(0)
    plane = learn_plane(distances, config=config.plane, seed=config.seed)
    # The two that look at no distance have their plane all the same: it is drawn in the report.
    notes: tuple[str, ...] = ()
    if config.strategy in (TowerStrategy.NAIVE, TowerStrategy.SEQUENTIAL):
        assignment = _in_order(items, config=config)
    else:
        assignment, notes = _balanced(distances, plane=plane, items=items, config=config)
    # Numbers of clusters are arbitrary, and so are those of towers until here.
    towers = _towers_of(assignment, items, features, strategy=config.strategy.value, seed=config.seed)
    return TowerPartition(
        towers=towers,
        plane=plane,
        interactions=_checked(interactions, features),
        features=tuple(features),
        config=config,
        notes=notes,
    )


def _balanced(
    distances: Tensor, *, plane: Plane, items: Items, config: TowerPartitionConfig
) -> tuple[Indexes, tuple[str, ...]]:
    """Items too heavy to share a tower alone, the others partitioned; and notes about the balance."""
    notes = []
    alone = too_heavy(items.load(config.balance), num_towers=config.num_towers, tolerance=config.tolerance)
    others = np.setdiff1d(np.arange(len(items)), alone)
    if len(alone):
        names = ", ".join(repr(items.tables[index]) for index in alone[:_MAX_NAMES])
        more = f" and {len(alone) - _MAX_NAMES} more" if len(alone) > _MAX_NAMES else ""
        notes.append(
            f"balance by {config.balance.value}: heavier than a tower's share, so alone: {names}{more}; "
            "the others are balanced among themselves"
        )
        # Each heavy table takes a tower for itself; the rest are shared out among the others.
        config = replace(config, num_towers=config.num_towers - len(alone))
        items = items.subset(others)
    limits = limits_of(
        items,
        num_towers=config.num_towers,
        balance=config.balance,
        tolerance=config.tolerance,
        memory_limit_bytes=config.memory_limit_bytes,
    )
    if limits.is_relaxed:
        notes.append(
            f"balance by {config.balance.value}: a tolerance of {config.tolerance:g} cannot be kept with tables this "
            "heavy; as even as balancing alone gets"
        )
    assignment = np.full(len(others) + len(alone), -1)
    # Behind the towers of the others, whose number `config` has by now.
    assignment[alone] = config.num_towers + np.arange(len(alone))
    assignment[others] = _search(distances, plane=plane, items=items, limits=limits, config=config)
    return assignment, tuple(notes)


def _search(distances: Tensor, *, plane: Plane, items: Items, limits: Limits, config: TowerPartitionConfig) -> Indexes:
    """The cheapest partition that fits, after polishing the cheapest half of the candidates."""
    membership = items.membership(len(distances))
    # Sums over pairs of features, so that moving an item costs one look at this matrix.
    between = membership.T @ distances.numpy() @ membership
    np.fill_diagonal(between, between.diagonal() / 2)  # each pair inside an item stood there twice
    partitions = []
    for candidate in _candidates(distances, plane=plane, items=items, limits=limits, config=config):
        partition = Partition(
            candidate, distances=between, counts=items.counts, limits=limits, num_towers=config.num_towers
        )
        partition.repair()
        # A repair may fail; the last candidates were balanced without a look at distances, and need none.
        if partition.fits:
            partitions.append(partition)
    if not partitions:
        raise no_room(items, num_towers=config.num_towers, memory_limit_bytes=config.memory_limit_bytes)
    partitions.sort(key=lambda partition: partition.cost)
    if config.refine is Refine.SWAPS:
        # Two spaces gave two candidates a restart: this is the cheaper half.
        for partition in partitions[: config.restarts]:
            partition.polish()
    return min(partitions, key=lambda partition: partition.cost).assignment


def _candidates(
    distances: Tensor, *, plane: Plane, items: Items, limits: Limits, config: TowerPartitionConfig
) -> Iterator[Indexes]:
    """Clusters of the plane, of the leading eigenvectors, and last the balanced one that always fits the balance."""
    spaces = [plane.coordinates.numpy()]
    if config.refine is Refine.SWAPS:
        # The plane has two dimensions unless told otherwise, and T clusters may want up to T.
        spaces.append(classical_scaling(distances, dim=min(len(distances), config.num_towers)).numpy())
    # An item lies in the middle of its features.
    mean = items.membership(len(distances)).T / items.counts[:, None]
    for restart in range(config.restarts):
        for number, space in enumerate(spaces):
            yield balanced_clusters(
                mean @ space,
                counts=items.counts,
                limits=limits,
                num_clusters=config.num_towers,
                # One generator a run of k-means: another number of restarts changes none of the first.
                generator=np.random.default_rng((config.seed, restart, number)),
            )
    yield longest_first(limits.loads[:, 0], num_towers=config.num_towers)
    # Balance of counts may break the limit of bytes: this one looks at bytes alone.
    if config.memory_limit_bytes:
        yield longest_first(items.num_bytes, num_towers=config.num_towers)


def _in_order(items: Items, *, config: TowerPartitionConfig) -> Indexes:
    if config.strategy is TowerStrategy.NAIVE:
        assignment = _dealt(items, num_towers=config.num_towers)
    else:
        blocks = np.array_split(np.arange(len(items)), config.num_towers)
        assignment = np.repeat(np.arange(config.num_towers), [len(block) for block in blocks])
    # Dealt by place alone, so that weights can only be looked at afterwards.
    held = np.bincount(assignment, weights=items.num_bytes, minlength=config.num_towers)
    if config.memory_limit_bytes and held.max() > config.memory_limit_bytes:
        raise PlanError(
            expected=f"towers of {config.memory_limit_bytes:,} bytes or less",
            found=f"{int(held.max()):,} bytes in tower {int(held.argmax())}",
            where=f"strategy {config.strategy.value!r}, which takes features in order whatever they weigh",
            ways_out=("take the strategy coherent or diverse: they keep the limit", "raise the limit"),
        )
    return assignment


def _dealt(items: Items, *, num_towers: int) -> Indexes:
    return np.arange(len(items)) % num_towers


def _towers_of(
    assignment: Indexes, items: Items, features: Sequence[FeatureLoad], *, strategy: str = "naive", seed: int = 0
) -> Towers:
    """Features in the model's order inside a tower, towers in the order of their first features."""
    groups: dict[int, list[int]] = {}
    for item, tower in enumerate(assignment.tolist()):
        groups.setdefault(tower, []).extend(items.members[item])
    # One partition has one file, whatever order the search found its clusters in.
    ordered = sorted(sorted(group) for group in groups.values())
    names = tuple(tuple(features[index].name for index in group) for group in ordered)
    return Towers(towers=names, strategy=strategy, seed=seed)


def _checked(interactions: Tensor, features: Sequence[FeatureLoad]) -> Tensor:
    """A copy in FP64 with ones on the diagonal."""
    matrix = interactions.detach().to(device="cpu", dtype=torch.float64).clone()
    problem = ""
    if matrix.shape != (len(features), len(features)):
        problem = f"shape {tuple(matrix.shape)} for {len(features)} features"
    elif not len(features):
        problem = "no features"
    else:
        matrix.fill_diagonal_(1.0)
        # A little outside is rounding of whoever summed them; it is cut off below.
        if not bool(((matrix >= -1e-6) & (matrix <= 1 + 1e-6)).all()):
            problem = f"numbers from {float(matrix.min()):g} to {float(matrix.max()):g}"
        elif not torch.allclose(matrix, matrix.T, atol=1e-5):
            problem = "a matrix that is not symmetric"
    if problem:
        raise PlanError(
            expected="interactions (F, F) of the F features given, symmetric, from 0 to 1",
            found=problem,
            where="partition_towers, interactions",
            ways_out="collect them with ziggurat.planning.towers.affinity.InteractionSums",
        )
    return ((matrix + matrix.T) / 2).clamp(0, 1)
