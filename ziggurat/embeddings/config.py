"""EmbeddingConfig: how tables are sized, initialised, updated, and by which kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import KernelChoice, TableOptimizerKind, UpdateRule
from ziggurat.ops.table_optimizers import USUAL
from ziggurat.typed import checked


class TableInit(StrEnum):
    """Distribution of the weights before training."""

    UNIFORM = "uniform"  # ±1/√num_rows, as DLRM (Naumov et al. 2019) does
    NORMAL = "normal"  # mean 0, standard deviation init_std; the BARS benchmark uses 1e-4


class InitialDraw(StrEnum):
    """Ways to draw the random numbers of initial weights; see `embeddings/initial_rows.py`."""

    BLOCKS = "blocks"  # torch's generator, seeded for every 4,096 rows: a row costs a block
    ROWS = "rows"  # counted: each row by itself, for tables of which a run touches a small part


class PooledDtype(StrEnum):
    """The type that pooled fields are written as, and that their gradient comes back in."""

    AUTO = "auto"  # as computed on a GPU, whose steps wait for memory more than for products; FP32 on a CPU
    FP32 = "fp32"  # always
    COMPUTED = "computed"  # as the network computes: BF16 under `precision = bf16`, FP32 otherwise


@dataclass(frozen=True, kw_only=True)
@checked
class EmbeddingConfig:
    """Settings of all embedding tables of a model.

    Args:
        dim: columns of every table whose schema gives none.
        optimizer: how tables learn; see `TableOptimizerKind`.
        kernel: which implementation; `auto` measures. A run that must repeat bit for bit keeps the one that was used
            (`EmbeddingTables.kernel_name`), since kernels agree only up to rounding.
        init: distribution of the initial weights.
        init_std: standard deviation for `init = "normal"`.
        init_draw: what the random numbers follow from; `rows` for tables on disk of which a run touches a small part.
        eps: ε of the rules that divide.
        weight_decay: λ, an L2 term on the rows that a step touches (not on the whole table). With `adam_dense` the
            whole table is penalised instead, by the trainer's `embedding_l2`.
        beta1: β₁ of sparse Adam.
        beta2: β₂ of sparse Adam.
        initial_sum: initial value of row-wise Adagrad's accumulator; a positive one softens the first steps.
        pooled: what pooled fields are written as. Sums are FP32 either way, and so are rows and their state; `computed`
            halves the bytes that a lookup writes and an update reads, and rounds both to BF16; `auto` does so on a GPU.
            On many ranks it is FP32: the formats of wires say what travels.

    Example:
        >>> zg.EmbeddingConfig(dim=16).dim
        16
    """

    dim: int = 16
    optimizer: TableOptimizerKind = USUAL
    kernel: KernelChoice = KernelChoice.AUTO
    init: TableInit = TableInit.UNIFORM
    init_std: float = 1e-4
    init_draw: InitialDraw = InitialDraw.BLOCKS
    eps: float = 1e-8
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    initial_sum: float = 0.0
    pooled: PooledDtype = PooledDtype.AUTO

    def __post_init__(self) -> None:
        _expect(self.dim >= 1, "dim >= 1", f"dim = {self.dim}")
        _expect(self.init_std >= 0, "init_std >= 0", f"init_std = {self.init_std}")
        _expect(self.eps > 0, "eps > 0", f"eps = {self.eps}")
        _expect(self.weight_decay >= 0, "weight_decay >= 0", f"weight_decay = {self.weight_decay}")
        _expect(self.initial_sum >= 0, "initial_sum >= 0", f"initial_sum = {self.initial_sum}")
        betas_fit = 0 <= self.beta1 < 1 and 0 <= self.beta2 < 1
        _expect(betas_fit, "0 <= beta1 < 1 and 0 <= beta2 < 1", f"beta1 = {self.beta1}, beta2 = {self.beta2}")
        if self.optimizer.is_dense and self.weight_decay:
            raise ConfigError(
                expected=f'weight_decay = 0 with optimizer = "{self.optimizer}"',
                found=f"weight_decay = {self.weight_decay}",
                where="EmbeddingConfig",
                ways_out=(
                    "penalise whole tables at every step: --training.embedding-l2",
                    'use optimizer = "rowwise_adagrad", "sgd" or "sparse_adam" for a penalty on touched rows',
                ),
            )

    @property
    def rule(self) -> UpdateRule:
        """The update rule with its constants."""
        return UpdateRule(
            kind=self.optimizer,
            eps=self.eps,
            weight_decay=self.weight_decay,
            beta1=self.beta1,
            beta2=self.beta2,
        )

    @property
    def only_read(self) -> EmbeddingConfig:
        """The same for tables that are read and no longer trained: in any format, by whichever kernel reads it best."""
        # The rule is never used: tables that learn densely would be parameters in FP32.
        return replace(self, kernel=KernelChoice.AUTO, optimizer=USUAL, weight_decay=0.0)


def _expect(fits: bool, expected: str, found: str) -> None:
    if not fits:
        raise ConfigError(expected=expected, found=found, where="EmbeddingConfig", ways_out="correct the number")
