"""Tower modules: what a tower makes of its features before they leave the host (Luo et al., arXiv 2403.00877).

A tower holds F fields e_f of N numbers: E (F, N), flat F·N. Its module turns them into c·F + p fields of D numbers, and
only those cross to the other hosts:

    identity     E                                                      nothing is compressed: the exchange alone
    linear       [ W₁ flatten(E) : p fields | W₂_f e_f for each f : c fields each ]
    flattened    W flatten(E) : c·F + p fields                          every field sees every other
    cross        W CrossNet(flatten(E)) : c·F + p fields                products of features inside the tower
    fm           residual(P) + L P + reshape(W LN(flatten(P (Pᵀ Y))) + b),   P_f = W_f e_f (F, D)

    compression = N / D,      ratio = numbers in / numbers out = F·N / ((c·F + p)·D)

The ratio is what the exchange between hosts saves; with c = 1 and p = 0 it is the compression. `linear` is the module
for DLRM, whose dot products are the first to mix features anyway; `cross` fits DCNv2, `fm` Wukong (arXiv 2403.02545:
factorization machine block P Pᵀ Y beside a linear compression L P, on a residual path that keeps the first F fields).
Linear maps have no bias, so an empty tower stays zero; only W of `fm` has one.

Fields of a tower may differ in size: e_f has N_f numbers, F·N above is Σ N_f, and every output field has D.

Cost of a tower, FLOPs forward a sample: linear 2·F·N·D·(c + p); flattened 2·F·N·D·(c·F + p); cross the same and
2·(F·N)² a layer; fm 2·F·D·(N + 2·r + (c·F + p)·(1 + r)).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.cross import CrossNet, LowRankCrossNet
from ziggurat.models.blocks.fieldwise import FieldMix, FieldwiseLinear
from ziggurat.models.blocks.interactions.factorization_machine import FactorizationMachine
from ziggurat.models.blocks.mlp import Init
from ziggurat.precision.products import Linear
from ziggurat.typed import checked


class TowerModuleKind(StrEnum):
    """Kinds of tower module, by what they compute; see the module docstring."""

    IDENTITY = "identity"
    LINEAR = "linear"
    FLATTENED = "flattened"
    CROSS = "cross"
    FM = "fm"


@dataclass(frozen=True, kw_only=True)
@checked
class TowerModuleConfig:
    """Settings of the modules of all towers of a model. Used only if the model has towers.

    Args:
        kind: what the module computes.
        compression: N / D: how many times smaller than an embedding the module's output fields are; 1 keeps the size.
        c: output fields for each field of the tower.
        p: output fields for the tower as a whole.
        num_cross_layers: of kind cross.
        cross_rank: of kind cross: rank of its layers; None for full rank.
        fm_rank: of kind fm: r, columns of Y.
        init: starting weights of the linear maps.

    Example:
        >>> zg.DLRMConfig(tower_module=zg.TowerModuleConfig(compression=4)).tower_module.compression
        4.0
    """

    kind: TowerModuleKind = TowerModuleKind.LINEAR
    compression: float = 1.0
    c: int = 1
    p: int = 0
    num_cross_layers: int = 1
    cross_rank: int | None = None
    fm_rank: int = 8
    init: Init = Init.TORCH

    def __post_init__(self) -> None:
        if self.compression < 1 or min(self.c, self.p) < 0 or self.c + self.p < 1:
            raise ConfigError(
                expected="compression of 1 or more; c and p of 0 or more, one of them at least 1",
                found=f"compression = {self.compression}, c = {self.c}, p = {self.p}",
                where="tower module settings",
                ways_out="correct the number",
            )
        if self.num_cross_layers < 1 or self.fm_rank < 1 or (self.cross_rank is not None and self.cross_rank < 1):
            raise ConfigError(
                expected="num_cross_layers, fm_rank and cross_rank of 1 or more (cross_rank also none)",
                found=f"{self.num_cross_layers}, {self.fm_rank} and {self.cross_rank}",
                where="tower module settings",
                ways_out=("correct the number", "take kind = flattened for no cross layers"),
            )

    def output_dim(self, dim: int) -> int:
        """D, numbers of each output field, for embeddings of N = `dim`.

        Raises:
            ConfigError: N / compression is not a whole number, or the module cannot compress at all.
        """
        if self.kind is TowerModuleKind.IDENTITY:
            if (self.compression, self.c, self.p) != (1.0, 1, 0):
                raise ConfigError(
                    expected="compression = 1, c = 1 and p = 0 with kind = identity, which changes nothing",
                    found=f"compression = {self.compression:g}, c = {self.c}, p = {self.p}",
                    where="tower module settings",
                    ways_out=("set tower-module.kind = linear (or flattened, cross, fm)", "leave compression at 1"),
                )
            return dim
        # A compression may be written with few digits: 5.333 for 64 / 12.
        found = round(dim / self.compression)
        if found < 1 or abs(dim / self.compression - found) > 1e-3:
            possible = ", ".join(str(size) for size in range(1, dim + 1) if dim % size == 0)
            raise ConfigError(
                expected=f"a compression that leaves a whole number of columns of N = {dim}: {possible}",
                found=f"compression = {self.compression:g}, which leaves {dim / self.compression:.2f}",
                where="tower module settings",
                ways_out=(f"any N / D with D from 1 to {dim}, such as those above", "change model.embedding-dim"),
            )
        return found


class TowerModule(nn.Module, ABC):
    """Maps the pooled embeddings of one tower to the numbers that leave its host. Subclasses are final.

    Args:
        field_dims: numbers of each field of the tower, in the tower's order.
        output_field_dims: numbers of each field that comes out.

    Attributes:
        input_dim: Σ field_dims, width of what `forward` takes.
        output_dim: Σ output_field_dims, width of what it returns.
    """

    def __init__(self, field_dims: Sequence[int], *, output_field_dims: Sequence[int]) -> None:
        super().__init__()
        self.field_dims = tuple(field_dims)
        self.output_field_dims = tuple(output_field_dims)
        self.input_dim = sum(field_dims)
        self.output_dim = sum(output_field_dims)

    @property
    def compression_ratio(self) -> float:
        """Numbers in over numbers out, a sample: the factor by which fewer bytes cross between hosts."""
        return self.input_dim / self.output_dim

    @abstractmethod
    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B O"]:
        """The tower's fields, side by side in its order, to its output fields, side by side."""


class IdentityTower(TowerModule):
    """Every field as it is.

    Args:
        field_dims: numbers of each field.
    """

    def __init__(self, field_dims: Sequence[int]) -> None:
        super().__init__(field_dims, output_field_dims=field_dims)

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The input itself."""
        return pooled_BT


class LinearTower(TowerModule):
    """Ensemble of two linear maps: p fields from all together, then c fields from each alone.

    Args:
        field_dims: numbers of each field.
        dim: D.
        config: c and p.
    """

    def __init__(self, field_dims: Sequence[int], *, dim: int, config: TowerModuleConfig) -> None:
        super().__init__(field_dims, output_field_dims=(dim,) * (config.p + config.c * len(field_dims)))
        # Without bias, as all maps here but one: an empty tower stays zero.
        self.together = Linear(self.input_dim, config.p * dim, bias=False) if config.p else None
        self.alone = FieldwiseLinear(field_dims, output_dim=config.c * dim) if config.c else None

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B O"]:
        """[W₁ flatten(E) | W₂_1 e_1 | … | W₂_F e_F]."""
        pieces = [] if self.together is None else [self.together(pooled_BT)]
        if self.alone is not None:
            pieces.append(self.alone(pooled_BT).flatten(1))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


class FlattenedTower(TowerModule):
    """One linear map from all fields to all output fields.

    Args:
        field_dims: numbers of each field.
        dim: D.
        config: c and p.
    """

    def __init__(self, field_dims: Sequence[int], *, dim: int, config: TowerModuleConfig) -> None:
        super().__init__(field_dims, output_field_dims=(dim,) * (config.p + config.c * len(field_dims)))
        self.projection = Linear(self.input_dim, self.output_dim, bias=False)

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B O"]:
        """Compute W flatten(E)."""
        return self.projection(pooled_BT)


class CrossTower(TowerModule):
    """A small cross network, then one linear map.

    Args:
        field_dims: numbers of each field.
        dim: D.
        config: c, p, cross layers and their rank.
    """

    def __init__(self, field_dims: Sequence[int], *, dim: int, config: TowerModuleConfig) -> None:
        super().__init__(field_dims, output_field_dims=(dim,) * (config.p + config.c * len(field_dims)))
        layers = config.num_cross_layers
        rank = config.cross_rank
        self.cross = (
            CrossNet(self.input_dim, num_layers=layers)
            if rank is None
            else LowRankCrossNet(self.input_dim, num_layers=layers, rank=rank)
        )
        self.projection = Linear(self.input_dim, self.output_dim, bias=False)

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B O"]:
        """Compute W CrossNet(flatten(E))."""
        return self.projection(self.cross(pooled_BT))


class FactorizationMachineTower(TowerModule):
    """A factorization machine block and a linear compression on a residual path.

    Args:
        field_dims: numbers of each field.
        dim: D.
        config: c, p and fm_rank.
    """

    def __init__(self, field_dims: Sequence[int], *, dim: int, config: TowerModuleConfig) -> None:
        num_fields = len(field_dims)
        num_outputs = config.p + config.c * len(field_dims)
        super().__init__(field_dims, output_field_dims=(dim,) * num_outputs)
        self.project = FieldwiseLinear(field_dims, output_dim=dim)
        self.products = FactorizationMachine(num_fields, dim=dim, rank=config.fm_rank)
        self.norm = nn.LayerNorm(num_fields * config.fm_rank)
        self.expand = Linear(num_fields * config.fm_rank, self.output_dim)
        self.compress = FieldMix(num_fields, num_outputs=num_outputs, dim=dim)
        self.num_kept = num_fields if config.c else 0

    def forward(self, pooled_BT: Float[Tensor, "B T"]) -> Float[Tensor, "B O"]:
        """residual(P) + L P + W LN(P (Pᵀ Y)) + b; without c there is no residual path."""
        fields_BFD = self.project(pooled_BT)
        crossed_BO = self.expand(self.norm(self.products(fields_BFD).flatten(1)))
        outputs_BO = crossed_BO + self.compress(fields_BFD).flatten(1)
        if not self.num_kept:
            return outputs_BO
        # The first F output fields keep the projected ones; zeros are added to the others.
        kept_BX = fields_BFD.flatten(1)
        return outputs_BO + nn.functional.pad(kept_BX, (0, self.output_dim - kept_BX.shape[1]))
