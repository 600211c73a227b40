"""Measure what pairs of features add to a trained model, on the model alone.

    z(x)   its logit
    g(x) = Σ_f mean_b z(x_f, b without f)          b: a few rows, the same for every x; feature f of x, the rest of b

    gain = metric of z − metric of g, on validation rows, with the interval of a paired comparison

A model that is a sum of what its features say alone has z = g + a constant for any rows b, exactly. So g is a sum of
single features that the model itself knows, and the gain is what it makes of features together: pairs, triples, layers.
(g holds the first-order effects of a functional analysis of variance: Hooker, "Discovering additive structure in black
box functions", KDD 2004.)

Why it is asked: a network that multiplies ids learns first what each says alone, and stands on that plateau for
hundreds of steps before products of small vectors have grown. A run that is stopped there has the AUC of logistic
regression, and nothing in its log says so (docs/experiments/2026-11-26-first-model-of-few-rows.md).

Cost: up to 131,072 samples through the model. It is left out where it would prove nothing: few validation rows, very
many features, lists that are read one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray

from ziggurat.data.encoded.dataset import EncodedDataset, MemoryDataset
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch
from ziggurat.features.batches.permutation import feature_names, permuted
from ziggurat.features.inputs import LabelSpec
from ziggurat.models import DLRMConfig, Model
from ziggurat.models.contract.reads import is_linear
from ziggurat.models.dlrm import TopStart
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.quality.below_chance import some_rows
from ziggurat.runs.quality.paired import paired_differences
from ziggurat.training.evaluation.evaluate import PairsGain, scores_of
from ziggurat.training.metrics.accumulator import MetricAccumulator, has_metrics
from ziggurat.training.metrics.metric import with_floor

_SAMPLES = 131_072  # through the model, in all
_MAX_ROWS = 4096
_FEWEST_ROWS = 1000
_MAX_BACKGROUNDS = 8
_FEWEST_BACKGROUNDS = 2
_BATCH = 4096
_STEPS = 2500  # by which models of few rows have left the plateau
_FALLS = 0.999
_FEW_LOSSES = 4
_FAR_BELOW = 0.8  # of the loss at the best step; on the plateau a loss falls by a few per cent


def gain_of_pairs(model: Model, valid: EncodedDataset | MemoryDataset) -> PairsGain | None:
    """Measure what a model gains by features together on validation rows; None where it cannot be told.

    Args:
        model: trained, on one device.
        valid: a data set.
    """
    inputs = model.inputs
    features = feature_names(inputs)
    labels = [index for index, label in enumerate(inputs.labels) if has_metrics(label)]
    has_joined = bool(inputs.sequences or inputs.moments or inputs.numbered or model.joined_lists)
    if len(features) < 2 or not labels or has_joined or model.finds_items:
        return None
    num_backgrounds = _SAMPLES // (len(features) * 2 * _FEWEST_ROWS)
    num_backgrounds = min(max(num_backgrounds, _FEWEST_BACKGROUNDS), _MAX_BACKGROUNDS)
    num_rows = min(_MAX_ROWS, _SAMPLES // (len(features) * num_backgrounds), valid.num_rows)
    if num_rows < _FEWEST_ROWS:
        return None
    table = some_rows(valid)
    # Spread evenly and not drawn, so that a run says the same each time.
    chosen = np.unique(np.linspace(0, len(table) - 1, num_rows).astype(np.int64))
    batch = table_to_batch(table.take(chosen).combine_chunks(), inputs)
    backgrounds = np.linspace(0, len(chosen) - 1, num_backgrounds).astype(np.int64)
    column = labels[0]
    label = inputs.labels[column]
    whole = _logits(model, batch, column=column, label=label)
    single = np.zeros_like(whole)
    for feature in features:
        others = [name for name in features if name != feature]
        for background in backgrounds:
            order = torch.full((batch.batch_size,), int(background))
            mixed = permuted(batch, inputs=inputs, features=others, order=order)
            single += _logits(model, mixed, column=column, label=label) / num_backgrounds
    # The sum of single effects has any mean: with that of the model, calibration is not what differs.
    single += whole.mean() - single.mean()
    judged = with_floor(label.task)
    metric = judged.name
    one_label = replace(inputs, labels=(label,))
    accumulators: list[MetricAccumulator] = []
    for logits in (whole, single):
        scores = label.task.unlink(logits)
        accumulator = MetricAccumulator(one_label)
        accumulator.update(
            torch.from_numpy(scores).unsqueeze(1), batch.labels[:, [column]], batch.weights, batch.groups
        )
        accumulators.append(accumulator)
    # Samples of one group hang together, so that a group is one unit of the interval.
    units = (batch.row_ids if batch.groups is None else batch.groups).numpy()
    found = paired_differences(accumulators[0], accumulators[1], units=units)[metric]
    if not np.isfinite(found.value) or not np.isfinite(found.half_width):
        return None
    name = f"{metric}/{label.name}" if len(inputs.labels) > 1 else metric
    floor = -math.inf if judged.floor is None else judged.floor
    return PairsGain(
        metric=name,
        value=found.value,
        half_width=found.half_width,
        num_rows=len(chosen),
        below_floor=accumulators[0].compute()[metric] < floor,
    )


def _logits(model: Model, batch: Batch, *, column: int, label: LabelSpec) -> Float64[np.ndarray, " B"]:
    size = batch.batch_size
    parts = (batch.rows(first, min(first + _BATCH, size)) for first in range(0, size, _BATCH))
    scores = np.concatenate([scores[:, column] for _, scores in scores_of(model, parts)]).astype(np.float64)
    return label.task.link(scores)


def plateau_text(gain: PairsGain, *, config: RunConfig, losses: Sequence[float], num_rows: int) -> str:
    """Say that a run has learned no more than single features, and what helps; "" where pairs add something.

    Nothing is said of a model that is worse than no model either: it has a warning of its own (`below_chance.py`).

    Args:
        gain: of the run.
        config: of the run.
        losses: of its training, in their order.
        num_rows: training rows.
    """
    if not gain.is_nothing or gain.below_floor or is_linear(config.model):
        return ""
    if gain.fitted_too_long:
        return (
            f"pairs of features add nothing to rows that are new ({gain.text()}), although the loss of training fell "
            "far below that of the best step: what was learned since holds for the training rows alone, and the "
            "weights of the best step are kept. Longer training does not help; let a few models be tried: "
            "ziggurat train auto"
        )
    first, last = _ends(losses)
    still = f"; the loss of training still falls ({first:.4f} to {last:.4f})" if last < first * _FALLS else ""
    ways = " ".join(_settings(config, num_rows=num_rows))
    return (
        f"still on the plateau of single features: pairs of them add nothing yet ({gain.text()}){still}. "
        f"Train longer and with larger steps: {ways}; or let a few models be tried: ziggurat train auto"
    )


def fitted_too_long(losses: Sequence[tuple[int, float]], *, best_step: int) -> bool:
    """Return whether training went on for long after the best step, and its loss left the plateau meanwhile.

    Args:
        losses: step and loss of training, in their order.
        best_step: of the weights that are kept.
    """
    until = [loss for step, loss in losses if step <= best_step][-_FEW_LOSSES:]
    since = [loss for step, loss in losses if step > best_step]
    if not until or len(since) < _FEW_LOSSES:
        return False
    last = since[-max(_FEW_LOSSES, len(since) // 4) :]
    return float(np.mean(last)) < _FAR_BELOW * float(np.mean(until))


def _ends(losses: Sequence[float]) -> tuple[float, float]:
    """The mean loss of the third and of the last quarter of a training; zeros for a few numbers."""
    known: NDArray[np.float64] = np.array(losses, dtype=np.float64)
    if len(known) < 4:
        return 0.0, 0.0
    parts = np.array_split(known, 4)
    return float(parts[2].mean()), float(parts[3].mean())


def _settings(config: RunConfig, *, num_rows: int) -> list[str]:
    """Settings by which models of few rows leave the plateau."""
    steps_per_epoch = max(1, num_rows // config.training.loader.batch_size)
    epochs = max(2 * config.training.epochs, -(-_STEPS // steps_per_epoch))
    settings: list[str] = []
    if isinstance(config.model, DLRMConfig) and config.model.top_start is TopStart.DRAWN:
        settings.append("--model.top-start sum_of_pairs")
    embedding: EmbeddingConfig = config.model.embedding
    if not embedding.optimizer.weight_state_bytes:  # one rate for all weights of a row
        settings.append("--model.embedding.optimizer sparse_adam --training.table-learning-rate 0.01")
    settings.append(f"--training.epochs {epochs} --training.early-stop.patience 0")
    return settings
