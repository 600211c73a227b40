"""Unknown ids in training: rows are trained as validation meets them, with ids that nobody has seen.

Problem: a vocabulary holds every id of the training rows, so the row of unknown ids is in none of them and keeps its
random start. In a split by time nine of ten users of the test rows may be new: the model is then judged by a vector
that it never trained, beside layers that never saw one, and does worse than a sum of weights, whose unknown id counts
nothing.

Idea: in training an id becomes the unknown one at random, as often as validation rows have unknown ids of that feature
(at most three in ten rows). The rest of the network learns to do without it, and the row becomes the average id. This
is dropout of a field, at the rate of the rows that will come (DropoutNet: Volkovs, Yu and Poutanen, NeurIPS 2017).

The random numbers follow from seed, step, feature and `Batch.row_ids`: the same on any number of ranks, and after a
resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import UNKNOWN_ROW
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.training.config import AS_VALIDATION

if TYPE_CHECKING:
    from ziggurat.data.preprocess.prepared import PreparedData

LARGEST_SHARE = 0.3
_MIN_SHARE = 0.02  # below, too few rows are judged by it to be worth the noise


@dataclass(frozen=True, kw_only=True)
class UnknownIds:
    """Makes ids of training batches unknown at random.

    Args:
        shares: by name of a feature with one id a sample, the share of samples.
        inputs: of the batches.
    """

    shares: Mapping[str, float]
    inputs: InputSpec

    def applied(self, batch: Batch, *, draw: StepDraw) -> Batch:
        """The batch of a step with some of its ids unknown."""
        if not self.shares or not batch.batch_size:
            return batch
        batch = batch.expanded()
        single_SB = batch.single.clone()
        for index, spec in enumerate(self.inputs.single):
            if spec.name not in self.shares:
                continue
            hashes_B = draw.hashes(batch.row_ids.numpy(), purposes_P=np.array([index]))[0]
            chosen_B = hashes_B < np.uint64(int(self.shares[spec.name] * 2.0**64))
            single_SB[index, torch.from_numpy(chosen_B)] = UNKNOWN_ROW
        return replace(batch, single=single_SB)


def unknown_shares(data: PreparedData) -> dict[str, float]:
    """Shares to train with, by feature: those of validation rows, where they are worth it."""
    split = data.summary.splits.get("valid")
    if split is None:
        return {}
    shares: dict[str, float] = {}
    for spec in data.inputs.single:
        counters = split.features[spec.name]
        share = counters.unknown / counters.ids if counters.ids else 0.0
        if share >= _MIN_SHARE:
            shares[spec.name] = round(min(share, LARGEST_SHARE), 4)
    return shares


def with_unknown_shares(asked: Sequence[str], data: PreparedData) -> tuple[str, ...]:
    """The setting `unknown_ids` with the shares of the data in the place of `as_validation`."""
    if tuple(asked) != (AS_VALIDATION,):
        return tuple(asked)
    return tuple(f"{name}={share:g}" for name, share in unknown_shares(data).items())


def parse_shares(asked: Sequence[str], *, inputs: InputSpec) -> dict[str, float]:
    """Read the setting `unknown_ids`.

    Raises:
        ConfigError: an entry is no FEATURE=SHARE of a feature with one id a sample.
    """
    names = [spec.name for spec in inputs.single]
    shares: dict[str, float] = {}
    for entry in asked:
        name, _, text = entry.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if name not in names or not 0.0 <= share < 1.0:
            raise ConfigError(
                expected=f"FEATURE=SHARE with a feature of {', '.join(names) or 'none'} and a share from 0 to below 1",
                found=repr(entry),
                where="training settings, unknown_ids",
                ways_out=(
                    *([f"--training.unknown-ids {names[0]}=0.1"] if names else []),
                    f"--training.unknown-ids {AS_VALIDATION}, for the shares of the validation rows",
                    "leave it out: no id is made unknown",
                ),
            )
        shares[name] = share
    return shares
