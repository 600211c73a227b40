"""Towers on one device: groups of features, each behind a module that makes them smaller (arXiv 2403.00877).

    pooled (B, T) ─► columns of tower 0 ─► module 0 ─► (B, O_0) ─┐
                  ─► columns of tower 1 ─► module 1 ─► (B, O_1) ─┴─► cat: (B, Σ O_t) ─► interaction

The order of towers, and of features inside one, is part of the model: it is the order of what the interaction sees. On
many hosts a tower lives on one of them, and its output is all that leaves it; `parallel/` computes the very same.

On many ranks a model keeps its layer, of which each rank holds the modules of its own towers alone (`TowerLayer.keep`).
The weights of tower t depend on (seed, t) and on the tower's own features, never on how the others look:
`build_tower_module` is the one place that makes them.

With identity modules a tower model is the flat model with its fields in another order.

Cost: that of the modules (see `modules.py`), and one copy of the input where a tower's columns are not adjacent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError, PlanError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.mlp import initialise
from ziggurat.models.towers.modules import (
    CrossTower,
    FactorizationMachineTower,
    FlattenedTower,
    IdentityTower,
    LinearTower,
    TowerModule,
    TowerModuleConfig,
    TowerModuleKind,
)
from ziggurat.ops.own_draws import OwnDraws
from ziggurat.plan import Towers


@dataclass(frozen=True, kw_only=True)
class TowerReport:
    """One tower in figures.

    Args:
        tower: its number.
        features: names, in order.
        input_dim: numbers a sample that its tables give.
        output_dim: numbers a sample that leave it.
        compression_ratio: input_dim / output_dim.
        num_parameters: weights of its module.
    """

    tower: int
    features: tuple[str, ...]
    input_dim: int
    output_dim: int
    compression_ratio: float
    num_parameters: int

    def text(self) -> str:
        """One line for people."""
        return (
            f"{', '.join(self.features)}: {self.input_dim} numbers in, {self.output_dim} out, "
            f"compression {self.compression_ratio:.2f}, {self.num_parameters:,} weights"
        )


def build_tower_module(
    config: TowerModuleConfig, *, field_dims: Sequence[int], dim: int, tower: int, seed: int
) -> TowerModule:
    """The module of one tower with fresh weights, the same on every rank that builds it.

    Args:
        config: which module, and its settings.
        field_dims: numbers of each field of this tower, in order.
        dim: N, columns of the model's tables; D follows from it (see `TowerModuleConfig.output_dim`).
        tower: its number among all towers.
        seed: of the model.

    Raises:
        ConfigError: the compression does not fit N.
    """
    output_dim = config.output_dim(dim)
    # A seed for each tower, so that its weights do not depend on the towers built before it.
    digest = hashlib.sha256(f"{seed}/tower {tower}".encode()).digest()
    with OwnDraws(int.from_bytes(digest[:8], "little") >> 1):
        match config.kind:
            case TowerModuleKind.IDENTITY:
                module = IdentityTower(field_dims)
            case TowerModuleKind.LINEAR:
                module = LinearTower(field_dims, dim=output_dim, config=config)
            case TowerModuleKind.FLATTENED:
                module = FlattenedTower(field_dims, dim=output_dim, config=config)
            case TowerModuleKind.CROSS:
                module = CrossTower(field_dims, dim=output_dim, config=config)
            case TowerModuleKind.FM:
                module = FactorizationMachineTower(field_dims, dim=output_dim, config=config)
        # Inside the block: these draws belong to the tower's seed, too.
        initialise([module], config.init)
    return module


class TowerLayer(nn.Module):
    """All towers of a model, on one device.

    Args:
        config: of the modules.
        inputs: the features.
        field_dims: numbers of each pooled field, in the order of `inputs.fields`.
        towers: which features form a tower.
        dim: N, columns of the model's tables.
        seed: of the weights.

    Attributes:
        towers: as given.
        modules_of_towers: one `TowerModule` a tower, in order, by the number of the tower; on many ranks those of this
            rank alone.
        field_dims: numbers of every output field, tower after tower.
        dim: D, numbers of an output field (N with identity modules, whose fields may differ).

    Raises:
        PlanError: the towers do not fit the features.
        ConfigError: the compression does not fit N.
    """

    def __init__(
        self,
        config: TowerModuleConfig,
        *,
        inputs: InputSpec,
        field_dims: Sequence[int],
        towers: Towers,
        dim: int,
        seed: int = 0,
    ) -> None:
        super().__init__()
        towers.check({field.name: field.table for field in inputs.lookups})
        self.config = config
        self.towers = towers
        self.input_field_dims = tuple(field_dims)
        self.input_dim = sum(field_dims)
        self.dim = config.output_dim(dim)
        self._columns = _columns(inputs, field_dims=field_dims, towers=towers)
        self._slices = [_merged(columns) for columns in self._columns]
        modules = {}
        for tower, columns in enumerate(self._columns):
            dims = [len(each) for each in columns]
            modules[str(tower)] = build_tower_module(config, field_dims=dims, dim=dim, tower=tower, seed=seed)
        self.modules_of_towers = nn.ModuleDict(modules)
        self.field_dims = tuple(size for tower in range(len(towers)) for size in self.module(tower).output_field_dims)
        self.output_dim = sum(self.field_dims)

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B X"]:
        """Outputs of all towers side by side, X = Σ O_t.

        Args:
            pooled_BT: pooled embeddings of all fields, in the order of `inputs.fields`.
        """
        outputs = [self.module(tower)(_take(pooled_BT, slices)) for tower, slices in enumerate(self._slices)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def module(self, tower: int) -> TowerModule:
        """Return the module of one tower.

        Raises:
            ConfigError: this rank let it go.
        """
        if str(tower) not in self.modules_of_towers:
            raise ConfigError(
                expected=f"a tower of this rank: {', '.join(self.modules_of_towers)}",
                found=f"tower {tower}, whose module lives on the ranks of another tower group",
                where="the towers of a model after parallelize",
                ways_out=("ask before parallelize", "model.fields(batch), on all ranks: what all towers give"),
            )
        module = self.modules_of_towers[str(tower)]
        assert isinstance(module, TowerModule)
        return module

    def keep(self, towers: Collection[int]) -> None:
        """Hold the modules of these towers from now on, and let go of the others, which live on other ranks."""
        for tower in range(len(self.towers)):
            if tower not in towers:
                del self.modules_of_towers[str(tower)]

    def columns(self, tower: int) -> tuple[range, ...]:
        """Columns of the pooled (B, T) that a tower takes: one range a feature, in the order of its features."""
        return self._columns[tower]

    @property
    def compression_ratio(self) -> float:
        """Numbers in over numbers out of all towers together."""
        return self.input_dim / self.output_dim

    def report(self) -> tuple[TowerReport, ...]:
        """Each tower in figures."""
        return tuple(
            TowerReport(
                tower=tower,
                features=features,
                input_dim=self.module(tower).input_dim,
                output_dim=self.module(tower).output_dim,
                compression_ratio=self.module(tower).compression_ratio,
                num_parameters=sum(weight.numel() for weight in self.module(tower).parameters()),
            )
            for tower, features in enumerate(self.towers.towers)
        )


def pooled_towers(towers: Towers, inputs: InputSpec) -> list[tuple[str, ...]]:
    """The features of each tower that pass through it: those with a pooled embedding.

    A list that is not pooled belongs to a tower by its table alone; its vectors go straight to the dense network.

    Raises:
        PlanError: a tower has no other features than those.
    """
    pooled = fields_of_towers(towers, inputs)
    for index, tower in enumerate(pooled):
        if not tower:
            raise PlanError(
                expected="a feature with a pooled embedding, or more, in each tower",
                found=f"only lists that are not pooled: {', '.join(towers.towers[index])}",
                where=f"towers, tower {index}",
                ways_out=("move these features to another tower", "use fewer towers"),
            )
    return pooled


def fields_of_towers(towers: Towers, inputs: InputSpec) -> list[tuple[str, ...]]:
    """The features of each tower that have a pooled embedding among these inputs; a tower may have none."""
    names = {spec.name for spec in inputs.fields}
    return [tuple(name for name in tower if name in names) for tower in towers.towers]


def _columns(inputs: InputSpec, *, field_dims: Sequence[int], towers: Towers) -> list[tuple[range, ...]]:
    ranges: dict[str, range] = {}
    start = 0
    for field, columns in zip(inputs.fields, field_dims, strict=True):
        ranges[field.name] = range(start, start + columns)
        start += columns
    return [tuple(ranges[name] for name in tower) for tower in pooled_towers(towers, inputs)]


def _merged(columns: Sequence[range]) -> list[slice]:
    """Adjacent ranges as one slice, so that a tower of neighbours needs no copy."""
    slices: list[slice] = []
    for each in columns:
        # Neighbours become one slice, and a tower of one slice is a view.
        if slices and slices[-1].stop == each.start:
            slices[-1] = slice(slices[-1].start, each.stop)
        else:
            slices.append(slice(each.start, each.stop))
    return slices


def _take(pooled_BT: Tensor, slices: Sequence[slice]) -> Tensor:
    if len(slices) == 1:
        return pooled_BT[:, slices[0]]
    return torch.cat([pooled_BT[:, each] for each in slices], dim=1)
