"""StepWork: what one training step does, whatever machine it runs on; counted from a model built without tables.

    bottom    numbers and vectors on their way to the interaction     needs no embeddings: can run while they travel
    towers    a module a tower, between the two hops
    top       everything above the last hop
    tables    rows, columns, rows read a sample

FLOPs are exact (`models/costs/model_cost.py`). Memory traffic of layers is estimated from their widths: a linear map of
n inputs and m outputs reads and writes n + m numbers a sample forward, and twice as many backward; starts of operations
(kernels) from the number of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.features.inputs import InputSpec, JaggedSpec
from ziggurat.models import Model, build_model
from ziggurat.models.blocks.dense_inputs import DenseInputs
from ziggurat.models.blocks.dot import PairwiseDot
from ziggurat.models.blocks.fieldwise import BatchedLinear
from ziggurat.models.build import ModelConfig
from ziggurat.models.costs.model_cost import Flops, count_flops, flops_of, flops_per_sample
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.plan import Towers
from ziggurat.planning.problem import TableProfile

_LAUNCHES_PER_LAYER = 2  # the product, and what follows it
_SMALL_ROWS = 4  # rows of the tables of the model that is built to be counted


@dataclass(frozen=True, kw_only=True)
class NetworkWork:
    """The work of a part of the dense network, for a sample.

    Args:
        forward_flop, backward_flop: of matrix products.
        numbers: read and written by its layers, forward.
        num_parameters: its weights.
        launches: operations forward.
    """

    forward_flop: float = 0.0
    backward_flop: float = 0.0
    numbers: float = 0.0
    num_parameters: int = 0
    launches: int = 0


@dataclass(frozen=True, kw_only=True)
class TowerWork:
    """The work of one tower: its module, and how many numbers a sample go in and come out."""

    network: NetworkWork
    input_dim: int
    output_dim: int


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """A step of one rank; see the module's docstring.

    Args:
        model: kind, for people.
        batch_size: B, samples a rank.
        tables: everything that has to be placed.
        fields: (name, table, columns) of every feature with an embedding.
        bottom, top: of the dense network.
        towers: none for a flat model.
    """

    model: str
    batch_size: int
    tables: tuple[TableProfile, ...]
    fields: tuple[tuple[str, str, int], ...]
    bottom: NetworkWork
    top: NetworkWork
    towers: tuple[TowerWork, ...] = ()

    @property
    def output_dim(self) -> int:
        """Numbers a sample that the last hop brings to a rank."""
        if self.towers:
            return sum(tower.output_dim for tower in self.towers)
        return sum(dim for _, _, dim in self.fields)

    @property
    def num_dense_parameters(self) -> int:
        """Weights that are reduced over all ranks."""
        return self.bottom.num_parameters + self.top.num_parameters

    @property
    def flop_per_sample(self) -> float:
        """Forward and backward, towers included."""
        parts = [self.bottom, self.top, *(tower.network for tower in self.towers)]
        return sum(part.forward_flop + part.backward_flop for part in parts)


def step_work(
    config: ModelConfig,
    inputs: InputSpec,
    *,
    batch_size: int,
    towers: Towers | None = None,
    list_lengths: Mapping[str, float] | None = None,
    kept: TablesConfig | None = None,
) -> StepWork:
    """Count what one training step of a model does.

    Args:
        config: of the model.
        inputs: features and tables, of any size: no table is made.
        batch_size: B, samples a rank.
        towers: groups of features; None for a flat model.
        list_lengths: mean rows a sample of features that are lists; 1 where not given.
        kept: what rows of tables are kept as; FP32 unless given.

    Raises:
        PlanError, ConfigError, SchemaError: towers, settings and inputs do not fit each other.
    """
    small = replace(inputs, tables=tuple(replace(table, num_rows=_SMALL_ROWS) for table in inputs.tables))
    model = build_model(config, small, seed=0, towers=towers, draw_tables=False)
    dims = {name: place.dim for name, place in model.embeddings.tables.places.items()}
    optimizer = model.embeddings.config.optimizer
    inner = {id(module) for module in model.embeddings.modules()}
    if model.towers is not None:
        inner |= {id(module) for module in model.towers.modules()}
    parts = [part for part in model.modules() if isinstance(part, DenseInputs)]
    bottom = [module for part in parts for module in part.modules()]
    below = {id(module) for module in bottom}
    top = [module for module in model.modules() if id(module) not in inner | below]
    bottom_flops = sum((_bottom_flops(part, inputs) for part in parts), Flops(forward=0, backward=0))
    tower_flops = (
        Flops(forward=0, backward=0) if model.towers is None else flops_of(model.towers, model.towers.input_dim)
    )
    return StepWork(
        model=config.kind,
        batch_size=batch_size,
        tables=table_profiles(inputs, dims=dims, optimizer=optimizer, list_lengths=list_lengths or {}, kept=kept),
        fields=tuple((spec.name, spec.table, dims[spec.table]) for spec in inputs.lookups),
        bottom=_network(bottom, bottom_flops),
        top=_network(top, flops_per_sample(model) - tower_flops - bottom_flops),
        towers=_towers(model),
    )


def table_profiles(
    inputs: InputSpec,
    *,
    dims: Mapping[str, int],
    optimizer: TableOptimizerKind,
    list_lengths: Mapping[str, float],
    kept: TablesConfig | None = None,
) -> tuple[TableProfile, ...]:
    """Return the facts of each table that a planner needs to know.

    Args:
        inputs: features and tables.
        dims: columns, by table.
        optimizer: decides the bytes of state.
        list_lengths: mean rows a sample, by feature.
        kept: what rows are kept as; FP32 unless given.
    """
    kept = kept or TablesConfig()
    profiles = []
    for table in inputs.tables:
        users = [spec for spec in inputs.lookups if spec.table == table.name]
        rows = sum(list_lengths.get(spec.name, 1.0) if isinstance(spec, JaggedSpec) else 1.0 for spec in users)
        dim = dims.get(table.name, table.embedding_dim or 1)
        per_row, per_element = state_bytes(optimizer)
        profiles.append(
            TableProfile(
                name=table.name,
                num_rows=table.num_rows,
                dim=dim,
                pooling_factor=rows,
                num_features=len(users),
                row_format=kept.format_of(table.name, dim=dim),
                keeps_rows_whole=optimizer.keeps_rows_whole,
                optimizer_bytes_per_row=per_row,
                optimizer_bytes_per_element=per_element,
            )
        )
    return tuple(profiles)


def state_bytes(optimizer: TableOptimizerKind) -> tuple[int, int]:
    """Bytes of FP32 optimizer state for each row, and for each weight."""
    return optimizer.row_state_bytes, optimizer.weight_state_bytes


def _towers(model: Model) -> tuple[TowerWork, ...]:
    layer = model.towers
    if layer is None:
        return ()
    modules = [layer.module(tower) for tower in range(len(layer.towers))]
    return tuple(
        TowerWork(
            network=_network(list(module.modules()), flops_of(module, module.input_dim)),
            input_dim=module.input_dim,
            output_dim=module.output_dim,
        )
        for module in modules
    )


def _bottom_flops(part: DenseInputs, inputs: InputSpec) -> Flops:
    """FLOPs of a sample's numbers and vectors on their way to the interaction."""

    def run(size: int, device: torch.device) -> Tensor:
        numbers = part.numbers(torch.zeros(size, len(inputs.dense), device=device))
        vectors = {spec.name: torch.zeros(size, spec.dim, device=device) for spec in inputs.vectors}
        return torch.cat([numbers, *part.vectors(vectors)], dim=1)

    return count_flops(part, run)


def _network(modules: Sequence[nn.Module], flops: Flops) -> NetworkWork:
    widths = [found for module in modules if (found := _numbers(module))]
    return NetworkWork(
        forward_flop=float(flops.forward),
        backward_flop=float(flops.backward),
        numbers=float(sum(widths)),
        num_parameters=_num_parameters(modules),
        launches=_LAUNCHES_PER_LAYER * len(widths),
    )


def _numbers(module: nn.Module) -> int:
    """Numbers a sample that a layer reads and writes; 0 for what is no layer."""
    if isinstance(module, nn.Linear):
        return module.in_features + module.out_features
    if isinstance(module, PairwiseDot):
        return module.num_fields * module.dim + module.num_pairs
    if isinstance(module, BatchedLinear):
        num_fields, wide, narrow = module.weight.shape
        return num_fields * (wide + narrow)
    return 0


def _num_parameters(modules: Iterable[nn.Module]) -> int:
    seen: dict[int, int] = {}
    for module in modules:
        # By identity: a weight that two layers share counts once.
        for parameter in module.parameters(recurse=False):
            seen[id(parameter)] = parameter.numel()
    return sum(seen.values())
