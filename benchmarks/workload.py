"""Workload: the model and the random batches that every contestant trains on, bit for bit the same.

The shape is Criteo's: 13 numbers, 26 categorical features with 100,000 rows each, one label. Ids follow a truncated
Zipf law, P(rank k) ∝ 1/k^1.05, ranks scattered over the rows by a random permutation a feature (hot rows are not
neighbours). Contestants draw the arrays themselves, in their own process, from the same seed.

Each sample occurs in several batches with *independent* labels. Nothing can be learnt from that, on purpose: a model
that memorises a small benchmark set drives its gradients towards zero, into denormal numbers, and is timed on those.

    DLRM    numbers ─ MLP 512-256-D ─┐
            ids ─ lookup (F, D) ─────┴─ 27 × 27 dot products ─ MLP 512-256-1
    DCNv2   the same ends, three low-rank cross layers x ← x₀ ∘ (W V x + b) + x between them (TorchRec's `DLRM_DCN`)

`multi-hot` takes the list lengths of MLPerf's DLRM-DCNv2 benchmark (mean 8.2 ids a feature; fixed a feature).
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np

RESERVED_ROWS = 3  # rows that our tables keep for unknown and missing ids; no contestant is asked for them
# Ids a sample of each of Criteo's 26 features in MLPerf training's DLRM-DCNv2 (its `multi_hot_sizes`); 214 in all.
MLPERF_LIST_LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


WUKONG_LAYERS, WUKONG_FIELDS, WUKONG_RANK, WUKONG_MLP = 3, 40, 8, (512, 256)  # FuxiCTR's defaults, but for D


class ModelKind(StrEnum):
    """The network between lookup and logit."""

    DLRM = "dlrm"
    DCN_V2 = "dcn_v2"
    FUXICTR_DCN_V2 = "fuxictr_dcn_v2"  # FuxiCTR's: every number its own field, 3 full cross layers beside an MLP 400³
    WUKONG = "wukong"  # FuxiCTR's sizes: every number its own field, 3 layers of 40 + 40 fields, rank 8, MLPs 512-256
    DHEN = "dhen"  # the same function as DHEN computes it: modules fm and linear


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained. Plain data; crosses process borders as JSON.

    Args:
        model: network.
        dim: embedding dimension D.
        multi_hot: lists of MLPerf's lengths instead of one id a feature.
        list_scale: how many times as long the lists of more than one id are.
        num_batches: different batches before they repeat (with other labels, `NUM_LABEL_SETS` times).
        teacher: rows and labels of the synthetic teacher, learnable, instead of random ones (for loss curves).
        learning_rate: of the dense network.
        table_learning_rate: of the tables.
        seed: of the random batches, and of the starting weights.
    """

    model: ModelKind = ModelKind.DLRM
    dim: int = 16
    multi_hot: bool = False
    list_scale: int = 1
    batch_size: int = 2048
    num_rows: int = 100_000
    num_dense: int = 13
    zipf_exponent: float = 1.05
    num_batches: int = 64
    teacher: bool = False
    learning_rate: float = 1e-4
    table_learning_rate: float = 1e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Short name for tables and plots."""
        model = {
            ModelKind.DLRM: "DLRM",
            ModelKind.DCN_V2: "DCNv2",
            ModelKind.FUXICTR_DCN_V2: "DCNv2 (FuxiCTR's form)",
            ModelKind.WUKONG: "Wukong (FuxiCTR's sizes)",
            ModelKind.DHEN: "DHEN (FuxiCTR's sizes of Wukong)",
        }
        return f"{model[self.model]} D={self.dim}{' multi-hot' if self.multi_hot else ''}"

    @property
    def case(self) -> str:
        """Start of the names of its cases, which go on with peer and setting: dlrm_d16_torchrec_default."""
        model = "dcn_v2" if self.model is ModelKind.FUXICTR_DCN_V2 else self.model.value
        return f"{model}_d{self.dim}{'_multi_hot' if self.multi_hot else ''}"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ids a sample of each feature."""
        if not self.multi_hot:
            return (1,) * 26
        return tuple(length * self.list_scale if length > 1 else 1 for length in MLPERF_LIST_LENGTHS)

    @property
    def bottom_mlp(self) -> tuple[int, ...]:
        """Hidden and output widths of the MLP over the numbers."""
        return (512, 256, self.dim)

    @property
    def top_mlp(self) -> tuple[int, ...]:
        """Hidden widths of the MLP before the logit."""
        return (512, 256)

    @property
    def cross_layers(self) -> int:
        """Number of cross layers of DCNv2."""
        return 3

    @property
    def cross_rank(self) -> int:
        """Low rank of the cross layers; TorchRec's example uses 512 at width 1,728, where low rank saves nothing."""
        return 64 if self.dim <= 16 else 256

    def to_json(self) -> dict[str, object]:
        """For a worker: the model, and what is not the default, which an older commit's worker may not know."""
        plain = asdict(Workload())
        return {name: value for name, value in asdict(self).items() if name == "model" or value != plain[name]}

    @staticmethod
    def from_json(data: dict[str, object]) -> Workload:
        """Inverse of `to_json`."""
        values = {**data, "model": ModelKind(str(data["model"]))}
        return Workload(**values)  # type: ignore[arg-type]


NUM_LABEL_SETS = 4
TEACHER_IDS = 10_000  # distinct ids of each of the teacher's features


@dataclass(frozen=True, kw_only=True)
class RawBatch:
    """One batch before a contestant turns it into its own form.

    Args:
        dense: (B, N) float32, standard normal.
        ids: for each feature (B, length) int64 rows in [RESERVED_ROWS, num_rows).
        label_sets: NUM_LABEL_SETS vectors (B,) float32 of 0 and 1.
    """

    dense: np.ndarray
    ids: tuple[np.ndarray, ...]
    label_sets: tuple[np.ndarray, ...]


def make_batches(workload: Workload) -> list[RawBatch]:
    """All batches of a workload; the same in every process."""
    return _teacher_batches(workload) if workload.teacher else _random_batches(workload)


def _random_batches(workload: Workload) -> list[RawBatch]:
    generator = np.random.default_rng(workload.seed)
    num_ids = workload.num_rows - RESERVED_ROWS
    weights = 1.0 / np.arange(1, num_ids + 1, dtype=np.float64) ** workload.zipf_exponent
    cumulative = np.cumsum(weights) / weights.sum()
    scatter = [generator.permutation(num_ids) + RESERVED_ROWS for _ in workload.lengths]
    batches = []
    for _ in range(workload.num_batches):
        ids = []
        for length, rows in zip(workload.lengths, scatter, strict=True):
            ranks = np.searchsorted(cumulative, generator.random((workload.batch_size, length)))
            ids.append(rows[np.minimum(ranks, num_ids - 1)].astype(np.int64))
        dense = generator.standard_normal((workload.batch_size, workload.num_dense)).astype(np.float32)
        labels = (generator.random((NUM_LABEL_SETS, workload.batch_size)) < 0.25).astype(np.float32)
        batches.append(RawBatch(dense=dense, ids=tuple(ids), label_sets=tuple(labels)))
    return batches


def _teacher_batches(workload: Workload) -> list[RawBatch]:
    """Rows of the synthetic teacher, each once; the same for every seed. Numbers are log-standardised."""
    from ziggurat.data.synthetic.teacher import SyntheticTeacher, criteo_shaped

    assert not workload.multi_hot
    num_ids = TEACHER_IDS
    size, batches = workload.batch_size, []
    teacher = SyntheticTeacher(criteo_shaped(cardinality=num_ids))
    for frame in teacher.frames(workload.num_batches * size, chunk_rows=size):
        numbers = frame.select(f"I{index + 1}" for index in range(workload.num_dense)).fill_null(0.0).to_numpy()
        logs = np.log1p(numbers.astype(np.float32))
        ids = tuple(frame[f"C{index + 1}"].to_numpy().astype(np.int64)[:, None] + RESERVED_ROWS for index in range(26))
        labels = frame["label"].to_numpy().astype(np.float32)
        batches.append(RawBatch(dense=(logs - 2.0) / 2.0, ids=ids, label_sets=(labels,)))
    return batches


def linear_layers(workload: Workload) -> list[tuple[int, int, bool]]:
    """The matrix products of the dense network: (inputs, outputs, whether the input needs a gradient).

    Not of Wukong and DHEN, whose products are not all of vectors with matrices: their contestants count themselves.
    """
    assert workload.model not in (ModelKind.WUKONG, ModelKind.DHEN), workload.model
    num_fields, dim = len(workload.lengths) + 1, workload.dim
    if workload.model is ModelKind.FUXICTR_DCN_V2:
        width = (len(workload.lengths) + workload.num_dense) * dim
        mlp = [(width, 400, True), (400, 400, True), (400, 400, True)]
        return [*[(width, width, True)] * 3, *mlp, (width + 400, 1, True)]
    bottom = list(zip((workload.num_dense, *workload.bottom_mlp[:-1]), workload.bottom_mlp, strict=True))
    layers = [(fan_in, fan_out, index > 0) for index, (fan_in, fan_out) in enumerate(bottom)]
    if workload.model is ModelKind.DLRM:
        width = dim + num_fields * (num_fields - 1) // 2
    else:
        width = num_fields * dim
        layers += [(width, workload.cross_rank, True), (workload.cross_rank, width, True)] * workload.cross_layers
    top = (width, *workload.top_mlp, 1)
    return layers + [(fan_in, fan_out, True) for fan_in, fan_out in itertools.pairwise(top)]


def flops_per_sample(workload: Workload, *, training: bool = True) -> float:
    """Floating-point operations of the dense network's matrix products for one sample.

    A linear layer of n inputs and m outputs takes 2·n·m forward, 2·n·m for the gradient of its weights and, unless
    its input is data, 2·n·m for the gradient of its input; DLRM's dot products 2·F²·D forward and as much backward
    (by symmetry; the peers, and autograd, take twice as much). Lookups, activations and optimizers are not counted.
    """
    total = 0.0
    for fan_in, fan_out, needs_input_gradient in linear_layers(workload):
        products = 1 + (1 + needs_input_gradient if training else 0)
        total += 2.0 * fan_in * fan_out * products
    if workload.model is ModelKind.DLRM:
        num_fields = len(workload.lengths) + 1
        total += 2.0 * num_fields * num_fields * workload.dim * (2 if training else 1)
    return total


def num_dense_parameters(workload: Workload) -> int:
    """Weights and biases of the dense network; every contestant must have exactly as many."""
    total = sum(fan_in * fan_out + fan_out for fan_in, fan_out, _ in linear_layers(workload))
    if workload.model is ModelKind.DCN_V2:
        total -= workload.cross_rank * workload.cross_layers  # V has no bias
    if workload.model is ModelKind.FUXICTR_DCN_V2:
        total += workload.num_dense * workload.dim  # a vector for each number, without bias
    return total
