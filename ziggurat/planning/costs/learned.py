"""LearnedCostModel: costs of a plan learned from measurements on the machine itself, after NeuroShard.

Looking up ten tables in one kernel does not cost ten lookups, a table of which the same few rows are read over and over
costs a fraction of one that is read all over, and no formula of bytes knows either. Zha et al., "Pre-train and Search:
Efficient Embedding Table Sharding with Pre-trained Neural Cost Models" (MLSys 2023, arXiv 2305.01868), learn both from
groups of tables that were measured:

    shard        w = amounts of work, f = features           rows read, distinct rows, numbers, … (`shard_features.py`)
                 a = Σ cᵢ wᵢ · exp(tanh MLP(f))              what it costs by itself, cᵢ ≥ 0
                 h = MLP(f)                                  what kind of table it is
    call c       Σa, Σ rows, Σ distinct numbers              tables of one width are one call of the kernel
    device       (Σh, n, calls)                              a set: no order, and a move is two additions
    lookup ms    =    Σ_c Σa · exp(tanh MLP(call, Σh, all Σa, n))          what being together changes
    backward ms  =    MLP(columns of the device, mean and most of all devices, devices)
    forward ms   =    MLP(the same, and how much later it starts than the first)
    total        =    lookup + backward + forward

Unlike theirs, the lookup starts from amounts of work and learns two corrections that are bounded (by e, up and down):
a tenth of the measurements then suffice, a table unlike all measured ones is not priced absurdly, and a device without
tables costs 0. The exchange models look at one device among the others, so one model serves any number of devices.
Weights are a safetensors file, what they were trained on and how well they predict a JSON file beside it. Evaluation is
numpy alone: a plan can be searched where there is no torch.

The figures are those of one machine and of one number of samples a step (`card.num_samples`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32

from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError
from ziggurat.files import Format, read_bytes, sha256_of, write_bytes
from ziggurat.planning.costs.measurements import without_number
from ziggurat.planning.costs.shard_features import (
    NUM_CLASSES,
    NUM_WORK,
    call_sizes,
    multiplicity,
    shard_features,
    width_class,
)
from ziggurat.planning.problem import ShardProfile

NUM_HIDDEN = 32
NUM_SIZES = 3  # of a call: Σa, rows, distinct numbers
SMALL = 1e-4  # of a call: nothing
SUM_SCALE = 8.0
# They bring the inputs of the exchange models to about 1.
_COLUMNS_SCALE = 512.0
_STARTS_SCALE = 5.0
_DEVICES_SCALE = 8.0


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The accuracy of a model on what it was not trained on.

    Args:
        num_cases: held out.
        mape: mean of |predicted − measured| / measured.
        rank_correlation: Spearman's.
        additive_mape: the same cases, predicted by the best sum of single tables (a fitted to the same data, no h).
    """

    num_cases: int
    mape: float
    rank_correlation: float
    additive_mape: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """A description of what a learned cost model was trained on, and of how good it is.

    Args:
        machine: in words.
        versions: "name version".
        date: of the measurements.
        clock: of exchanges.
        num_samples: samples of all ranks in a step.
        num_groups: measured groups of tables.
        num_exchanges: measured exchanges; 0: exchanges count as free.
        uses_starts: whether the forward exchange knows of different starts.
        cut_factor: of shards of tables that are cut by columns; see `Measurements`.
        reuse: of tables that do not know theirs: the mean of all that were measured.
        groups: accuracy on held-out groups of known tables.
        tables: accuracy on groups of tables that no training group held.
        forward: of the forward exchange.
        backward: of the backward exchange.
    """

    machine: str = ""
    versions: tuple[str, ...] = ()
    date: str = ""
    clock: str = "wall"
    num_samples: int = 0
    num_groups: int = 0
    num_exchanges: int = 0
    uses_starts: bool = False
    cut_factor: float = 1.0
    reuse: tuple[float, ...] = ()
    groups: Accuracy | None = None
    tables: Accuracy | None = None
    forward: Accuracy | None = None
    backward: Accuracy | None = None


@dataclass(frozen=True)
class LearnedCostModel:
    """The cost model whose prices are networks that were trained on measurements of a machine.

    Args:
        weights: matrices of the networks, by name.
        card: what they are.
    """

    weights: Mapping[str, Float32[np.ndarray, "..."]] = field(repr=False)
    card: ModelCard

    def encode(self, shards: Sequence[ShardProfile]) -> Float32[np.ndarray, "S H"]:
        """h, the number of lookups, columns to send, and the sizes of the call that the shard belongs to."""
        known: dict[ShardProfile, int] = {}
        # Equal parts of one table occur many times: the networks see each of them once.
        index = [known.setdefault(shard, len(known)) for shard in shards]
        distinct = list(known)
        if not distinct:
            return np.zeros((0, NUM_HIDDEN + 2 + NUM_CLASSES * NUM_SIZES), dtype=np.float32)
        features = shard_features(distinct, num_samples=self.card.num_samples, default_reuse=self.card.reuse)
        inputs = (features - self.weights["mean"]) / self.weights["std"]
        outputs = _dense(_relu(_dense(inputs, self.weights, "table1")), self.weights, "table2")
        base_ms = features[:, :NUM_WORK] @ np.exp(self.weights["log_work_ms"])
        hidden = _relu(outputs[:, :NUM_HIDDEN])
        alone_ms = base_ms[:, None] * np.exp(np.tanh(outputs[:, NUM_HIDDEN:]))
        times = multiplicity(distinct)[:, None]
        dims = np.array([[shard.dim] for shard in distinct], dtype=np.float32)
        is_cut = np.array([[shard.placement.cuts_columns] for shard in distinct])
        alone_ms = alone_ms * np.where(is_cut, self.card.cut_factor, 1.0)
        calls = np.zeros((len(distinct), NUM_CLASSES, NUM_SIZES), dtype=np.float32)
        sizes = np.concatenate([alone_ms, call_sizes(features)], axis=1) * times
        calls[np.arange(len(distinct)), width_class(dims[:, 0])] = sizes
        encoded = np.concatenate([hidden * times, times, dims * times, calls.reshape(len(distinct), -1)], axis=1)
        return encoded.astype(np.float32)[index]

    def local(self, states: Float32[np.ndarray, "M H"]) -> Float32[np.ndarray, "M K"]:
        """Milliseconds of lookup and update, and columns to send."""
        hidden = states[:, :NUM_HIDDEN]
        count = states[:, NUM_HIDDEN]
        columns = states[:, NUM_HIDDEN + 1]
        calls = states[:, NUM_HIDDEN + 2 :].reshape(len(states), NUM_CLASSES, NUM_SIZES)
        # A sum of floats that moves add to and take from: 0.5 tells a device without tables from one with a table.
        alone_ms = np.where(count[:, None] > 0.5, calls[:, :, 0], 0.0)
        inputs = np.concatenate(
            [
                np.log(np.maximum(calls, SMALL)),
                np.broadcast_to((hidden / SUM_SCALE)[:, None], (*calls.shape[:2], NUM_HIDDEN)),
                np.broadcast_to(np.log(np.maximum(alone_ms.sum(axis=1), SMALL))[:, None, None], (*calls.shape[:2], 1)),
                np.broadcast_to(np.log(np.maximum(count, 1.0))[:, None, None], (*calls.shape[:2], 1)),
            ],
            axis=2,
        ).astype(np.float32)
        correction = np.tanh(_dense(_relu(_dense(inputs, self.weights, "group1")), self.weights, "group2")[..., 0])
        lookup_ms = (np.where(alone_ms > SMALL, alone_ms, 0.0) * np.exp(correction)).sum(axis=1)
        return np.stack([lookup_ms, columns], axis=1).astype(np.float32)

    def exchange(self, local: Float32[np.ndarray, "N P K"]) -> Float32[np.ndarray, "N P"]:
        """Lookup, backward exchange, forward exchange."""
        lookup_ms = local[:, :, 0]
        columns = local[:, :, 1]
        if not self.card.num_exchanges or local.shape[1] == 1:
            return lookup_ms
        backward_ms = self._exchange_ms("backward", columns, None)
        busy_ms = lookup_ms + backward_ms
        starts = busy_ms - busy_ms.min(axis=1, keepdims=True) if self.card.uses_starts else None
        return (busy_ms + self._exchange_ms("forward", columns, starts)).astype(np.float32)

    def _exchange_ms(
        self, way: str, columns: Float[np.ndarray, "N P"], starts_ms: Float[np.ndarray, "N P"] | None
    ) -> Float[np.ndarray, "N P"]:
        inputs = exchange_features(columns, starts_ms)
        hidden = _relu(_dense(inputs, self.weights, f"{way}1"))
        return np.exp(_dense(hidden, self.weights, f"{way}2")[..., 0])

    def describe(self) -> str:
        """One line: measured where and when, and how good it is."""
        card = self.card
        error = f", {100 * card.groups.mape:.1f} % off on held-out groups of tables" if card.groups else ""
        return f"costs learned on {card.machine} ({card.date}, {card.num_samples:,} samples a step{error})"

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors and `path`.json.

        Args:
            path: with or without one of the two endings.
        """
        from safetensors.numpy import save

        stem = _stem(path)
        content = save({name: np.ascontiguousarray(value) for name, value in self.weights.items()})
        write_bytes(f"{stem}.safetensors", content)
        CARD.write(f"{stem}.json", to_json(self.card) | {"weights_sha256": sha256_of(content)})

    @staticmethod
    def load(path: str | Path) -> LearnedCostModel:
        """Read what `save` wrote.

        Raises:
            MissingFileError: one of the two files is not there.
            ConfigError: they are of another format, or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        stem = _stem(path)
        data = CARD.read(f"{stem}.json")
        content = read_bytes(f"{stem}.safetensors", what=CARD.what, error=ConfigError, ways_out=CARD.ways_out)
        # None: an older file, which says nothing of the weights.
        if data.pop("weights_sha256", None) not in (None, sha256_of(content)):
            raise _damaged(stem, "weights that do not belong to the JSON file")
        try:
            weights = load(content)
        except (ValueError, KeyError, SafetensorError) as error:
            raise _damaged(stem, str(error)) from error
        return LearnedCostModel(weights, from_json(ModelCard, data, where=f"{stem}.json"))


def exchange_features(
    columns: Float[np.ndarray, "N P"], starts_ms: Float[np.ndarray, "N P"] | None
) -> Float32[np.ndarray, "N P 6"]:
    """Return inputs of the exchange models for a device: columns, mean, most, devices, its start, the latest."""
    starts = np.zeros_like(columns) if starts_ms is None else starts_ms / _STARTS_SCALE
    scaled = columns / _COLUMNS_SCALE
    return np.stack(
        [
            scaled,
            np.broadcast_to(scaled.mean(axis=1, keepdims=True), scaled.shape),
            np.broadcast_to(scaled.max(axis=1, keepdims=True), scaled.shape),
            np.full_like(scaled, columns.shape[1] / _DEVICES_SCALE),
            starts,
            np.broadcast_to(starts.max(axis=1, keepdims=True), scaled.shape),
        ],
        axis=2,
    ).astype(np.float32)


def _dense(values: np.ndarray, weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    return values @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _relu(values: np.ndarray) -> np.ndarray:
    return np.maximum(values, 0.0)


def _stem(path: str | Path) -> Path:
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".json", ".safetensors") else path


def _damaged(path: Path, found: str) -> ConfigError:
    return ConfigError(expected=CARD.what, found=found, where=str(path), ways_out=CARD.ways_out)


CARD = Format(
    name="ziggurat.learned_costs",
    what="a learned cost model: NAME.json and NAME.safetensors",
    migrations={0: without_number},  # which said nothing of the weights
    error=ConfigError,
    ways_out=(
        "train it again: ziggurat cluster probe --out FILE goes on from its measurements, and writes both beside FILE",
        "check the path",
    ),
)
