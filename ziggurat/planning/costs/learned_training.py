"""Train a `LearnedCostModel` from measurements: a few thousand groups of tables, a minute on one core.

The loss is on logarithms, |log predicted − log measured| with rounded edges, because a plan is decided by ratios: a
group of 0.3 ms counts as much as one of 30 ms. A step costs little: the encodings of all tables of a batch are one
product, and their sums over groups another,

    groups × tables counts (G, U)  @  encodings (U, H)     U distinct (table, columns) of the measured pools

Cases that no training step saw decide what is reported: a tenth of the groups, and all groups of the last pools of
tables (`DrawConfig.groups_per_pool`), whose tables are new to the model. For comparison the same report gives the best
additive model: the same encodings of single tables, trained as a plain sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.ops.own_draws import OwnDraws
from ziggurat.placements import by_columns
from ziggurat.planning.costs.learned import (
    NUM_HIDDEN,
    NUM_SIZES,
    SMALL,
    SUM_SCALE,
    Accuracy,
    LearnedCostModel,
    ModelCard,
    exchange_features,
)
from ziggurat.planning.costs.measurements import Measurements
from ziggurat.planning.costs.probe_tables import draw_pool
from ziggurat.planning.costs.shard_features import (
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_WORK,
    call_sizes,
    shard_features,
    width_class,
)
from ziggurat.planning.problem import ShardProfile
from ziggurat.typed import Count, checked

MIN_GROUPS = 50


@dataclass(frozen=True, kw_only=True)
@checked
class LearningConfig:
    """Settings of the training of the networks.

    Args:
        steps: of Adam for the lookup model.
        batch_size: groups of a step.
        learning_rate: at its highest; it falls to 0 along a cosine.
        width: of the hidden layers of tables.
        group_width: of the hidden layer of groups.
        exchange_steps: of the exchange models.
        weight_decay: of all.
        held_out: share of the groups that is kept for the report, of known and of unknown tables each.
        seed: of weights and batches.
    """

    steps: int = 1500
    batch_size: Count = 256
    learning_rate: float = 3e-3
    width: int = 128
    group_width: int = 64
    exchange_steps: int = 1500
    weight_decay: float = 1e-4
    held_out: float = 0.1
    seed: int = 0


@dataclass(frozen=True)
class _Tables:
    """Distinct (table, columns) of the measured groups, unscaled.

    Args:
        work: amounts of work.
        classes: 1 in the column of the call that a table belongs to.
        sizes: of calls, summed over their tables.
    """

    work: Float[Tensor, "U W"]
    classes: Float[Tensor, "U C"]
    sizes: tuple[Float[Tensor, "U"], ...]

    @staticmethod
    def of(features: Float[Tensor, "U F"], dims: list[int]) -> _Tables:
        """Build tables from features and columns."""
        classes = torch.zeros(len(dims), NUM_CLASSES)
        classes[torch.arange(len(dims)), torch.from_numpy(width_class(np.array(dims)))] = 1.0
        sizes = torch.from_numpy(call_sizes(features.numpy()))
        return _Tables(features[:, :NUM_WORK], classes, (sizes[:, 0], sizes[:, 1]))

    def some(self, used: Tensor) -> _Tables:
        """Those where `used` is true."""
        return _Tables(self.work[used], self.classes[used], (self.sizes[0][used], self.sizes[1][used]))


class _LookupModel(nn.Module):
    """Sums of encodings to milliseconds; see `learned.py`."""

    def __init__(self, config: LearningConfig, *, is_additive: bool) -> None:
        super().__init__()
        self.table1 = nn.Linear(NUM_FEATURES, config.width)
        self.table2 = nn.Linear(config.width, NUM_HIDDEN + 1)
        self.group1 = nn.Linear(NUM_SIZES + NUM_HIDDEN + 2, config.group_width)
        self.group2 = nn.Linear(config.group_width, 1)
        self.log_work_ms = nn.Parameter(torch.zeros(NUM_WORK))
        # The training begins at the plain sum of the tables: exp(tanh(0)) = 1.
        nn.init.zeros_(self.group2.weight)
        nn.init.zeros_(self.group2.bias)
        self._is_additive = is_additive

    def forward(self, features_UF: Tensor, tables: _Tables, counts_GU: Tensor) -> Tensor:
        """Logarithms of milliseconds, by group; `features_UF` are scaled."""
        outputs = self.table2(F.relu(self.table1(features_UF)))
        alone_U = (tables.work @ self.log_work_ms.exp()) * outputs[:, NUM_HIDDEN].tanh().exp()
        alone_GC = counts_GU @ (tables.classes * alone_U.unsqueeze(1))
        total_G = alone_GC.sum(dim=1)
        if self._is_additive:
            return total_G.log()
        sizes_GCS = torch.stack([alone_GC, *(counts_GU @ (tables.classes * s.unsqueeze(1)) for s in tables.sizes)], 2)
        hidden_GH = counts_GU @ F.relu(outputs[:, :NUM_HIDDEN]) / SUM_SCALE
        whole_GI = torch.cat([hidden_GH, total_G.log()[:, None], counts_GU.sum(dim=1).log()[:, None]], dim=1)
        inputs = [sizes_GCS.clamp(min=SMALL).log(), whole_GI.unsqueeze(1).expand(-1, NUM_CLASSES, -1)]
        correction_GC = self.group2(F.relu(self.group1(torch.cat(inputs, dim=2))))[..., 0].tanh()
        return (alone_GC * correction_GC.exp()).sum(dim=1).log()


class _ExchangeModel(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Logarithms of milliseconds."""
        return self.second(F.relu(self.first(features)))[..., 0]


@dataclass(frozen=True)
class _Groups:
    """Measured groups in the form that a training step takes."""

    features: Float[Tensor, "U F"]
    tables: _Tables
    counts: Float[Tensor, "G U"]
    log_ms: Float[Tensor, "G"]
    reuse: tuple[float, ...]


def train_cost_model(measurements: Measurements, *, config: LearningConfig | None = None) -> LearnedCostModel:
    """Train all models, on the CPU, and report on held-out cases.

    Args:
        measurements: of one machine.
        config: sizes and steps.

    Raises:
        ConfigError: fewer than 50 groups were measured.
    """
    config = config or LearningConfig()
    if len(measurements.lookups) < MIN_GROUPS:
        raise ConfigError(
            expected=f"at least {MIN_GROUPS} measured groups of tables",
            found=f"{len(measurements.lookups)}",
            where="measurements, lookups",
            ways_out="ziggurat cluster probe --minutes 10: it goes on where it stopped",
        )
    data = _groups(measurements)
    train, groups, tables = _split(measurements, config)
    model, scaled = _fit_lookup(data, train, config, is_additive=False)
    plain, _ = _fit_lookup(data, train, config, is_additive=True)

    def accuracy(held_out: Tensor) -> Accuracy:
        with torch.no_grad():
            counts = data.counts[held_out]
            wanted = data.log_ms[held_out].exp().numpy()
            found, sums = (each(scaled, data.tables, counts).exp().numpy() for each in (model, plain))
        return replace(_accuracy(found, wanted), additive_mape=_accuracy(sums, wanted).mape)

    mean = data.features.mean(dim=0)
    std = data.features.std(dim=0) + 1e-6
    weights = {"mean": mean.numpy(), "std": std.numpy()} | _arrays(model)
    card = ModelCard(
        machine=measurements.machine,
        versions=measurements.versions,
        date=measurements.date,
        clock=measurements.clock,
        num_samples=measurements.draw.num_samples,
        num_groups=len(measurements.lookups),
        num_exchanges=len(measurements.exchanges),
        uses_starts=any(any(each.starts_ms) for each in measurements.exchanges),
        cut_factor=measurements.cut_factor or 1.0,
        reuse=data.reuse,
        groups=accuracy(groups),
        tables=accuracy(tables) if len(tables) else None,
    )
    for way in ("forward", "backward") if measurements.exchanges else ():
        exchange, quality = _fit_exchange(measurements, way, config)
        weights |= {
            f"{way}{k}.{name}": value
            for k, layer in ((1, exchange.first), (2, exchange.second))
            for name, value in _arrays(layer).items()
        }
        card = replace(card, forward=quality) if way == "forward" else replace(card, backward=quality)
    return LearnedCostModel(weights, card)


def _groups(measurements: Measurements) -> _Groups:
    draw = measurements.draw
    columns: dict[tuple[int, int], int] = {}
    shards: list[ShardProfile] = []
    pools = {}
    entries: list[tuple[int, int]] = []
    for group, measured in enumerate(measurements.lookups):
        number = group // draw.groups_per_pool
        if number not in pools:
            pools[number] = draw_pool(draw, number)
        for table, dim in zip(measured.tables, measured.dims, strict=True):
            key = (number * draw.num_tables + table, dim)
            if key not in columns:
                columns[key] = len(columns)
                profile = pools[number][table].with_dim(dim)
                shards.append(ShardProfile(table=profile, placement=by_columns(1), num_rows=profile.num_rows, dim=dim))
            entries.append((group, columns[key]))
    counts = torch.zeros(len(measurements.lookups), len(shards))
    index = torch.tensor(entries).t()
    # `accumulate`: groups are drawn with replacement, so a table may stand in one twice.
    counts.index_put_((index[0], index[1]), torch.ones(index.shape[1]), accumulate=True)
    reuse = np.mean([shard.table.reuse for shard in shards], axis=0)
    features = shard_features(shards, num_samples=draw.num_samples, default_reuse=reuse)
    measured_ms = torch.tensor([each.total_ms for each in measurements.lookups])
    tables = _Tables.of(torch.from_numpy(features), [shard.dim for shard in shards])
    return _Groups(torch.from_numpy(features), tables, counts, measured_ms.log(), tuple(reuse.round(5).tolist()))


def _split(measurements: Measurements, config: LearningConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Groups to train on, held-out groups of known tables, groups of unknown tables (of the last pools)."""
    number = len(measurements.lookups)
    a_pool = measurements.draw.groups_per_pool
    first_unknown = number
    if number > 2 * a_pool:
        last = (number - 1) // a_pool * a_pool
        # A last pool that was hardly begun is too small a test: then the one before it is held out with it.
        first_unknown = last if number - last >= config.held_out * number / 2 else last - a_pool
    order = torch.randperm(first_unknown, generator=torch.Generator().manual_seed(config.seed))
    num_held_out = max(1, int(config.held_out * number))
    return order[num_held_out:], order[:num_held_out], torch.arange(first_unknown, number)


def _fit_lookup(
    data: _Groups, train: Tensor, config: LearningConfig, *, is_additive: bool
) -> tuple[_LookupModel, Tensor]:
    scaled = (data.features - data.features.mean(dim=0)) / (data.features.std(dim=0) + 1e-6)
    counts = data.counts[train]
    wanted = data.log_ms[train]
    with OwnDraws(config.seed):
        model = _LookupModel(config, is_additive=is_additive)

    def loss(rows: Tensor) -> Tensor:
        mine = counts[rows]
        # Of all tables only those of this batch pass through the network.
        used = mine.sum(dim=0) > 0
        found = model(scaled[used], data.tables.some(used), mine[:, used])
        # In logarithms: 0.05 is 5 % off.
        return F.huber_loss(found, wanted[rows], delta=0.05)

    _minimise(model, loss, number=len(train), steps=config.steps, config=config)
    return model, scaled


def _fit_exchange(measurements: Measurements, way: str, config: LearningConfig) -> tuple[_ExchangeModel, Accuracy]:
    measured = measurements.exchanges
    columns = np.array([each.columns for each in measured], dtype=np.float32)
    starts = np.array([each.starts_ms for each in measured], dtype=np.float32) if way == "forward" else None
    times = [each.forward_ms if way == "forward" else each.backward_ms for each in measured]
    features = torch.from_numpy(exchange_features(columns, starts))
    wanted = torch.tensor(times).clamp(min=1e-4).log()
    order = torch.randperm(len(measured), generator=torch.Generator().manual_seed(config.seed))
    held_out = order[: max(1, len(order) // 10)]
    train = order[max(1, len(order) // 10) :]
    with OwnDraws(config.seed):
        model = _ExchangeModel(way)

    def loss(rows: Tensor) -> Tensor:
        return F.huber_loss(model(features[train][rows]), wanted[train][rows], delta=0.05)

    _minimise(model, loss, number=len(train), steps=config.exchange_steps, config=config)
    with torch.no_grad():
        found = model(features[held_out]).exp().numpy().ravel()
    return model, _accuracy(found, wanted[held_out].exp().numpy().ravel())


def _minimise(
    model: nn.Module, loss: Callable[[Tensor], Tensor], *, number: int, steps: int, config: LearningConfig
) -> None:
    """Adam on random batches, the learning rate along a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(steps):
        rows = torch.randint(number, (min(config.batch_size, number),), generator=generator)
        optimizer.zero_grad()
        loss(rows).backward()
        optimizer.step()
        schedule.step()


def _accuracy(found: np.ndarray, wanted: np.ndarray) -> Accuracy:
    """Mean relative error, and Spearman's rank correlation (Pearson's of the ranks)."""
    ranks = [np.argsort(np.argsort(each)) for each in (found, wanted)]
    correlation = float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if len(found) > 2 else 1.0
    mape = float(np.mean(np.abs(found - wanted) / wanted))
    return Accuracy(num_cases=len(found), mape=round(mape, 5), rank_correlation=round(correlation, 5))


def _arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().astype(np.float32) for name, value in module.named_parameters()}
