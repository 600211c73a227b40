"""DelayedLoss: what a row costs in training whose label may still be corrected, one object for each loss.

`delayed_feedback.py` has the symbols, equations (1) to (6) and the papers. There the model's part is kept: where states
of labels come from, the network beside that learns d and r, and what of it is reported.

    class HalfWeight(DelayedLoss): name = "half_weight"; …        a loss of your own
    DelayedLoss.add(HalfWeight())                                 then --delayed.loss half-weight
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.features.label_state import LabelState
from ziggurat.specification import Specification

DELAYED, REAL = range(2)  # columns of the logits of the network beside


@dataclass(frozen=True, kw_only=True)
class DelayChances:
    """The chances that a network beside gives each row; no gradient flows through them.

    Args:
        delayed: d, that the row is a positive which comes late.
        real: r, that an assumed negative is one; 1 of rows that are no assumed ones.
    """

    delayed: Float[Tensor, "B"]
    real: Float[Tensor, "B"]

    @staticmethod
    def of(logits_BD: Float[Tensor, "B 2"], states_B: Float[Tensor, "B"]) -> DelayChances:
        """Return the chances of logits.

        Args:
            logits_BD: of d and r.
            states_B: what is known of the labels, numbers of `LabelState`.
        """
        real_B = logits_BD[:, REAL].detach().sigmoid()
        return DelayChances(
            delayed=logits_BD[:, DELAYED].detach().sigmoid(),
            # A negative that is certain when it is observed is real.
            real=torch.where(states_B == LabelState.ASSUMED.number, real_B, 1.0),
        )


@dataclass(frozen=True, kw_only=True)
class DelayedRows:
    """Rows of a batch, as a loss of delayed labels looks at them.

    Args:
        logits: z, of the served probability.
        labels: v, 0 or 1.
        states: what is known of the labels, numbers of `LabelState`.
        chances: d and r, for a loss that learns delays; None for others.
    """

    logits: Float[Tensor, "B"]
    labels: Float[Tensor, "B"]
    states: Float[Tensor, "B"]
    chances: DelayChances | None = None

    def weighed(self, positive_B: Float[Tensor, "B"], negative_B: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
        """Return the one loss of rows with the label 1, and the other of rows with the label 0."""
        return self.labels * positive_B + (1.0 - self.labels) * negative_B


class DelayedLoss(Specification, kind="delayed loss"):
    """A loss of rows that are trained as negatives, and again when a positive comes.

    On command lines and in settings a dash may stand for the underscore of a name.

    Attributes:
        learns_delays: whether it weighs by chances that a network beside learns.
        may_observe: whether rows may be observed for a while (`--observe-s`) before they are trained. A loss that may
            not takes every positive for a negative first, also one that came with its row.
    """

    learns_delays: bool = False
    may_observe: bool = False

    @classmethod
    def named(cls, name: str) -> DelayedLoss:
        """Return the loss of a name."""
        return super().named(str(name).replace("-", "_"))

    @abstractmethod
    def of_rows(self, rows: DelayedRows) -> Float[Tensor, "B"]:
        """Return the loss of each row; of confirmed rows it means nothing."""

    def try_out(self) -> None:
        """Refuse a loss that does not give each of three rows one finite number, with a gradient.

        Raises:
            ConfigError: it does not.
        """
        states = (LabelState.KNOWN, LabelState.ASSUMED, LabelState.CORRECTED)
        states_B = torch.tensor([float(state.number) for state in states])
        rows = DelayedRows(
            logits=torch.tensor([0.5, -1.0, 2.0], requires_grad=True),
            labels=torch.tensor([1.0, 0.0, 1.0]),
            states=states_B,
            chances=DelayChances.of(torch.zeros(3, 2), states_B) if self.learns_delays else None,
        )
        found_B = self.of_rows(rows)
        is_right = found_B.shape == (3,) and bool(found_B.isfinite().all()) and found_B.requires_grad
        if not is_right:
            raise ConfigError(
                expected="a finite loss for each of 3 rows, with a gradient",
                found=f"shape {tuple(found_B.shape)}: {found_B.tolist()}",
                where=f"{type(self).__name__}.of_rows",
                ways_out="return a tensor of as many numbers as there are rows, computed from rows.logits",
            )


class NoDelayedLoss(DelayedLoss):
    """Equation (2): labels are taken as they are."""

    name = "none"
    may_observe = True

    def of_rows(self, rows: DelayedRows) -> Float[Tensor, "B"]:
        """Return cross-entropies."""
        return rows.weighed(F.softplus(-rows.logits), F.softplus(rows.logits))


class FakeNegativeWeighted(DelayedLoss):
    """Equation (3), FNW: rows are weighed by what the model itself predicts."""

    name = "fnw"

    def of_rows(self, rows: DelayedRows) -> Float[Tensor, "B"]:
        """Return weighed cross-entropies."""
        served_B = rows.logits.detach().sigmoid()
        positive_B = (1.0 + served_B) * F.softplus(-rows.logits)
        negative_B = (1.0 - served_B) * (1.0 + served_B) * F.softplus(rows.logits)
        return rows.weighed(positive_B, negative_B)


class FakeNegativeCalibrated(DelayedLoss):
    """Equation (4), FNC: the likelihood of labels of which each positive comes twice."""

    name = "fnc"

    def of_rows(self, rows: DelayedRows) -> Float[Tensor, "B"]:
        """Return −ln b(v): for v = 1 it is −ln f + ln(1 + f), for v = 0 the second term alone."""
        return rows.labels * F.softplus(-rows.logits) + torch.log1p(rows.logits.sigmoid())


class ElapsedTimeSampled(DelayedLoss):
    """Equation (5), ES-DFM: rows are weighed by d and r."""

    name = "es_dfm"
    learns_delays = True
    may_observe = True

    def of_rows(self, rows: DelayedRows) -> Float[Tensor, "B"]:
        """Return weighed cross-entropies."""
        chances = rows.chances
        assert chances is not None, "the network beside gives them"
        positive_B = (1.0 + chances.delayed) * F.softplus(-rows.logits)
        negative_B = (1.0 + chances.delayed) * chances.real * F.softplus(rows.logits)
        return rows.weighed(positive_B, negative_B)


class Defuse(DelayedLoss):
    """Equation (6), DEFUSE: each kind of row has weights of its own."""

    name = "defuse"
    learns_delays = True
    may_observe = True

    def of_rows(self, rows: DelayedRows) -> Float[Tensor, "B"]:
        """Return weighed cross-entropies; an assumed negative counts as a positive, too, by the chance to be one."""
        chances = rows.chances
        assert chances is not None, "the network beside gives them"
        of_positive_B = F.softplus(-rows.logits)
        is_corrected_B = rows.states == LabelState.CORRECTED.number
        positive_B = torch.where(is_corrected_B, 1.0, 1.0 + chances.delayed) * of_positive_B
        as_real_B = chances.real * (1.0 + chances.delayed) * F.softplus(rows.logits)
        as_fake_B = (1.0 - chances.real) * chances.delayed * of_positive_B
        return rows.weighed(positive_B, as_real_B + as_fake_B)


NONE = DelayedLoss.add(NoDelayedLoss())
FNW = DelayedLoss.add(FakeNegativeWeighted())
FNC = DelayedLoss.add(FakeNegativeCalibrated())
ES_DFM = DelayedLoss.add(ElapsedTimeSampled())
DEFUSE = DelayedLoss.add(Defuse())
