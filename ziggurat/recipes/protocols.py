"""Ways to train, each complete in itself, whose results are never set beside each other.

    bars    as BARS and FuxiCTR train public data sets (`fuxictr/pytorch/models/rank_model.py`; BARS, SIGIR 2022):
            · Adam with dense gradients: every row of every table moves at every step
            · the penalty (λ/2)·‖W‖² over whole tables, in the gradient (so not AdamW), at every step
            · gradient norm of all weights clipped at 10, learning rate 1e-3, mean cross-entropy
            · up to 100 epochs; after each the exact validation AUC; without improvement by 1e-6 the learning rate is
              multiplied by 0.1 (not below 1e-6), and after `patience` such evaluations in a row training stops
            · the best weights come back; test data is read with them
            · tables start at N(0, 1e-4), padding row 0; linear maps Xavier-normal with bias 0; numbers enter as fields
    bars-averaged
            the same in everything, but a running average of the weights (β = 0.98, about an epoch on Frappe) is
            evaluated, decides on learning rate and stopping, and is kept (`training/step/weight_average.py`)
    scale   as large systems train (Wukong, section 7.1 and appendix A; MLPerf DLRM-DCNv2):
            · row-wise Adagrad on the rows that a batch touches, Adam for the rest
            · linear warm-up over the first tenth of the steps, then linearly to zero (as MLPerf's reference decays)
            · one pass, no penalty, no early stop

The first two spend many passes and a strong penalty on little data: on Frappe the penalty *is* the model. The last
sees every row once. A number from one says nothing about another, so `require_one_protocol` refuses to mix them.

Fused where it is exact. Under Adam a row that no batch touches still moves, by its momentum and the penalty; a sparse
update with a lazy catch-up cannot repeat that to the bit, so tables are dense parameters here. They lie in one storage
a width; the lookup's gradient is summed once into one tensor of that size, the penalty added by one multi-tensor
operation, and torch's fused Adam updates everything in one kernel: 1.5 % of the time of a step on Frappe.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from ziggurat import precision
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, TableInit, TableOptimizerKind
from ziggurat.errors import ConfigError
from ziggurat.models import Init, ModelConfig
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.contract.reads import is_linear
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training import metrics
from ziggurat.training.config import Decay, EarlyStopConfig, ScheduleConfig, TrainingConfig
from ziggurat.typed import Count, checked

M = TypeVar("M", bound=ModelConfig)


AVERAGE_DECAY = 0.98


class Protocol(StrEnum):
    """A complete way to train; see the module docstring."""

    BARS = "bars"
    BARS_AVERAGED = "bars-averaged"
    SCALE = "scale"
    RECIPE = "recipe"  # as a recipe and the command line say, the same for all models


@dataclass(frozen=True, kw_only=True)
@checked
class ScaleSettings:
    """The settings that may differ between runs of the `scale` protocol.

    The defaults are for a million rows or fewer, where one pass has to come far in few steps; they were chosen by
    validation data of the synthetic teacher, for all models alike. Large data wants batches of 2048 and more, and
    rates nearer to the paper's 1e-3 and 0.1.

    Args:
        learning_rate: of the dense network (Adam).
        table_learning_rate: of the tables (row-wise Adagrad).
        warmup_share: share of all steps over which both rise linearly.
        batch_size: rows a step.
    """

    learning_rate: float = 2e-3
    table_learning_rate: float = 0.5
    warmup_share: float = 0.1
    batch_size: Count = 512


def bars_training(
    *, embedding_l2: float, learning_rate: float = 1e-3, patience: int = 2, batch_size: int = 4096
) -> TrainingConfig:
    """The training half of `bars`."""
    return TrainingConfig(
        epochs=100,
        learning_rate=learning_rate,
        embedding_l2=embedding_l2,
        clip_norm=10.0,
        precision=precision.PLAIN,
        schedule=ScheduleConfig(decay=Decay.PLATEAU, plateau_factor=0.1, minimum=1e-6),
        early_stop=EarlyStopConfig(metric=metrics.USUAL, patience=patience, min_delta=1e-6),
        loader=LoaderConfig(batch_size=batch_size),
    )


def averaged(training: TrainingConfig) -> TrainingConfig:
    """The same settings with averaged weights: from `bars` to `bars-averaged`."""
    return replace(training, weight_average=AVERAGE_DECAY)


def scale_training(*, num_rows: int, settings: ScaleSettings | None = None) -> TrainingConfig:
    """The training half of `scale` for `num_rows` training rows."""
    settings = settings or ScaleSettings()
    steps = -(-num_rows // settings.batch_size)
    return TrainingConfig(
        epochs=1,
        learning_rate=settings.learning_rate,
        table_learning_rate=settings.table_learning_rate,
        precision=precision.PLAIN,
        schedule=ScheduleConfig(warmup_steps=max(1, round(settings.warmup_share * steps)), decay=Decay.LINEAR),
        loader=LoaderConfig(batch_size=settings.batch_size),
    )


SPARSE_TABLES = EmbeddingConfig(optimizer=TableOptimizerKind.SPARSE_ADAM)  # what small tables of recipes learn by


def bars_tables() -> EmbeddingConfig:
    """The tables of `bars`: dense gradients, N(0, 1e-4)."""
    return EmbeddingConfig(optimizer=TableOptimizerKind.ADAM_DENSE, init=TableInit.NORMAL, init_std=1e-4)


def bars_model(model: M) -> M:
    """A model as `bars` starts it: tables, Xavier, numbers as fields; sizes stay as they are."""
    if is_linear(model):
        return replace(model, embedding=bars_tables())
    wanted = {"init": Init.XAVIER_NORMAL, "numeric": NumericInput.FIELDS}
    having = {name: value for name, value in wanted.items() if type(getattr(model, name, None)) is type(value)}
    return replace(model, embedding=bars_tables(), **having)


def scale_model(model: M) -> M:
    """A model as `scale` starts it: row-wise Adagrad on tables that start at N(0, 0.1); sizes stay as they are.

    Starting nearer to zero, one pass over little data is spent at the saddle where all products of embeddings vanish.
    """
    tables = EmbeddingConfig(optimizer=TableOptimizerKind.ROWWISE_ADAGRAD, init=TableInit.NORMAL, init_std=0.1)
    return replace(model, embedding=tables)


def protocol_of(config: RunConfig) -> Protocol | None:
    """Return the protocol that a run follows, or None if it follows none of them."""
    training = config.training
    tables = config.model.embedding
    dense = tables.optimizer.is_dense
    plateau = training.schedule.decay is Decay.PLATEAU and training.early_stop.patience > 0
    if dense and plateau and tables.init is TableInit.NORMAL and training.clip_norm == 10.0:
        return Protocol.BARS_AVERAGED if training.weight_average else Protocol.BARS
    one_pass = training.epochs == 1 and not training.embedding_l2 and training.schedule.warmup_steps > 0
    if tables.optimizer is TableOptimizerKind.ROWWISE_ADAGRAD and one_pass:
        return Protocol.SCALE
    return None


def require_one_protocol(configs: Iterable[tuple[str, RunConfig]]) -> Protocol:
    """The protocol that all the named runs follow.

    Raises:
        ConfigError: they follow different ones, or one follows none; names the runs.
    """
    by_name = {name: protocol_of(config) for name, config in configs}
    found = set(by_name.values())
    if len(found) == 1 and (only := found.pop()) is not None:
        return only
    raise ConfigError(
        expected="runs of one protocol: bars, bars-averaged or scale",
        found=", ".join(f"{name}: {value.value if value else 'none'}" for name, value in by_name.items()) or "none",
        where="comparison of runs",
        ways_out=(
            "compare runs of one protocol: ziggurat compare DATA --protocol bars",
            "give each comparison a folder of its own: --out FOLDER",
        ),
    )
