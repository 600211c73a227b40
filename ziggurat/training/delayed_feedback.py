"""Delayed feedback: losses of a stream in which a conversion may come long after its row was trained.

    row at t, label at u       trained at o = t + observe_s as v = 1 if the positive came by then, else v = 0 (assumed);
                               a positive that comes later is trained once more, v = 1 (corrected)

    p = P(y=1|x)      d = P(y=1, u>o | x), delayed positives      r = P(y=0 | assumed, x), real among assumed negatives

Each click gives 1 + d rows, whose labels follow b(v=1|x) = p/(1+d) and b(v=0|x) = (1−p+d)/(1+d)         (1)
With ℓ1 = −ln f and ℓ0 = −ln(1−f) of the served f = σ(z), a row of v has the loss

    none     v·ℓ1 + (1−v)·ℓ0                                      learns b, and not p                          (2)
    fnw      v·(1+f)·ℓ1 + (1−v)·(1−f)(1+f)·ℓ0                     observe_s = 0, so d = p; f for p             (3)
    fnc      v·ℓ1 + ln(1+f)                                       = −ln b(v) with p = f                        (4)
    es_dfm   v·(1+d)·ℓ1 + (1−v)·(1+d)·r·ℓ0                                                                     (5)
    defuse   known positive (1+d)·ℓ1    corrected 1·ℓ1    assumed (1−q)(1+d)·ℓ0 + q·d·ℓ1 with q = 1−r          (6)

Weights are constants: no gradient flows through the f, d and r in them. In (5) and (6) the mean gradient over the rows
of a click is that of its true label, times 1 + d, if d and r are true; in (3) if f is, so it points to p from
everywhere and leads there at another speed. (4) is the likelihood of (1). A negative that is certain at o, as a
conversion without a click is, has r = 1: it is no assumed one, and its loss in (5) and (6) is (1+d)·ℓ0.

Fake-negative calibration (fnc) is usually a network for b, whose scores b/(1−b) are not below 1 by themselves. Here the
served probability is p, of which (4) makes b: the same likelihood, and nothing is to be calibrated where it is served.

d and r are learned beside, by a small network that reads pooled fields and numbers. Its targets are rows whose labels
are certain, each once: known ones (d: 0), corrected ones (d: 1, r: 0) and confirmed ones (d: 0, r: 1), that is
negatives which come again when the time for a positive is over. In the papers that network is trained before, on old
data, and then kept. Its last map starts at d = 0.02 and r = 0.98, near to (2). Where delays drift, it is as late as
labels are.

    fnw, fnc    Ktena et al., Addressing delayed feedback for continuous training, RecSys 2019, arXiv 1907.06558
    es_dfm      Yang et al., Capturing delayed feedback by elapsed-time sampling, AAAI 2021, arXiv 2012.03245
    defuse      Chen et al., Asymptotically unbiased estimation via label correction, WWW 2022, arXiv 2202.06472
                (DEFUSE; its multi-task form for positives within and beyond the observation is not here)

Each loss is an object (`delayed_losses.py`), so another one is a file of your own. The numbers of equations are ours.
Other labels of a row learn as ever. Denominators stay those of all rows, also of confirmed ones, whose loss is 0: of a
batch of these alone, the network beside would else learn a sum. The served network has the same operations as without.
Cost: 2·(X·H + 2·H) FLOPs a sample, X numbers of fields and H = 32.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.label_state import LABEL_STATE, LabelState
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.contract.losses import labelled_weights
from ziggurat.models.contract.model import device_of
from ziggurat.ops.own_draws import OwnDraws
from ziggurat.training.delayed_losses import DELAYED, REAL, DelayChances, DelayedLoss, DelayedRows
from ziggurat.training.distillation import ScaledGradient
from ziggurat.typed import FloatOrZero, checked

_HIDDEN = 32
_START = 3.9  # σ(−3.9) = 0.02
_LOGITS = "delayed.logits"
_ROWS, _ASSUMED, _CORRECTED, _SUM_D, _SUM_R = range(5)  # places in the counts


@dataclass(frozen=True, kw_only=True)
@checked
class DelayedConfig:
    """Settings of losses of labels that come later than their rows.

    Args:
        loss: of rows that are trained as negatives, and again when a positive comes.
        label: which one comes later; "": the only one of the schema. A stream without a loss of these takes it, too.
        gradient_scaling: multiplies the gradient of the network that learns of delays into embeddings.
    """

    loss: DelayedLoss = DelayedLoss.NONE
    label: str = ""
    gradient_scaling: FloatOrZero = 1.0


class _Map(nn.Linear):
    """A linear map that no conversion of dense products reaches, as it is not served."""


class DelayedFeedback(nn.Module):
    """The loss of a model whose labels come later, and what it learns of delays; made by `correct_labels`.

    Args:
        model: on one device, not yet parallel.
        config: which loss, of which label.
    """

    def __init__(self, model: Model, config: DelayedConfig) -> None:
        super().__init__()
        self.config = config
        self.inputs = model.inputs
        names = [label.name for label in model.inputs.labels]
        self._column = names.index(config.label) if config.label else 0
        self._label_loss = model.loss
        self.network: nn.Sequential | None = None
        if config.loss.learns_delays:
            width = sum(model.field_dims) + len(model.inputs.dense)
            last = _Map(_HIDDEN, 2)
            nn.init.zeros_(last.weight)
            with torch.no_grad():
                last.bias.copy_(torch.tensor([-_START, _START]))
            self.network = nn.Sequential(_Map(width, _HIDDEN), nn.ReLU(), last)
        self._counts: Tensor | None = None

    def inputs_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return nothing: the network reads what the model does."""
        del batch
        return {}

    def outputs_beside(self, outputs: Outputs, embedded: Embedded) -> Outputs:
        """Return the outputs with the logits of d and r, (B, 2), by a name that the loss knows."""
        if self.network is None:
            return outputs
        fields_BX = ScaledGradient.apply(embedded.fields, self.config.gradient_scaling)
        read_BX = torch.cat([fields_BX, embedded.dense.to(fields_BX.dtype)], dim=1)
        return dataclasses.replace(outputs, named={**outputs.named, _LOGITS: self.network(read_BX)})

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Return the loss of the labels, that of the delayed one by its equation, with the gradient of d and r.

        Raises:
            ConfigError: the batch does not say what is known of its labels.
        """
        sums = self._label_loss(outputs, batch)
        if not batch.batch_size:
            # Ranks without rows; the network beside takes part in the sum of gradients all the same.
            return LossSums(total=sums.total + self._nothing(outputs), weight=sums.weight)
        states_B = self._states(batch)
        column = self._column
        weights_B = labelled_weights(batch.labels, batch.weights, inputs=self.inputs)[:, column]
        # Unknown labels are 0 here, and have the weight 0.
        labels_B = batch.labels[:, column].nan_to_num(0.0).float()
        logits_B = outputs.logits[:, column].float()
        logits_BD = outputs.named[_LOGITS].float() if self.network is not None else None
        share = self.inputs.labels[column].weight
        is_confirmed_B = states_B == LabelState.CONFIRMED.number
        chances = None if logits_BD is None else DelayChances.of(logits_BD, states_B)
        rows = DelayedRows(logits=logits_B, labels=labels_B, states=states_B, chances=chances)
        losses_B = self.config.loss.of_rows(rows)
        # What the model adds to the losses of its labels stays: the plain loss of this one alone is taken out.
        plain_B = F.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        wanted = ((losses_B.masked_fill(is_confirmed_B, 0.0) - plain_B) * weights_B).sum() * share
        added = wanted
        if logits_BD is not None:
            beside = (losses_of_delays(logits_BD, states_B) * weights_B).sum() * share
            # Adds 0 and its gradient: the loss that is reported is that of the served scores.
            added = wanted + (beside - beside.detach())
            self._count(states_B, logits_BD.detach())
        is_it_L = torch.arange(len(sums.total), device=sums.total.device) == column
        return LossSums(total=sums.total + torch.where(is_it_L, added, 0.0), weight=sums.weight)

    def facts(self) -> dict[str, object]:
        """Return shares of assumed and corrected rows and the means of d and r, since the last call, for the log."""
        if self._counts is None:
            return {}
        counts = self._counts.tolist()
        self._counts = None
        rows = max(counts[_ROWS], 1.0)
        return {
            "assumed_share": counts[_ASSUMED] / rows,
            "corrected_share": counts[_CORRECTED] / rows,
            "delayed_mean": counts[_SUM_D] / rows,
            "real_mean": counts[_SUM_R] / rows,
        }

    def lines(self) -> dict[str, str]:
        """Return lines for the start-up report by their titles."""
        return {"delayed labels": self._line()}

    def _line(self) -> str:
        label = self.inputs.labels[self._column].name
        if self.network is None:
            return f"{self.config.loss.value} of {label}"
        count = sum(parameter.numel() for parameter in self.parameters())
        scaling = f"gradient scaling {self.config.gradient_scaling:g}"
        return f"{self.config.loss.value} of {label}, {scaling}, {count:,} weights that are not served"

    def _states(self, batch: Batch) -> Float[Tensor, "B"]:
        if LABEL_STATE not in batch.extras:
            raise ConfigError(
                expected="batches of a stream that says what is known of each label",
                found=f"batches without {LABEL_STATE!r}",
                where=f"loss {self.config.loss.value}",
                ways_out=("ziggurat stream … --delay correct --label-time COLUMN", "--delayed.loss none"),
            )
        return batch.extras[LABEL_STATE]

    def _nothing(self, outputs: Outputs) -> Float[Tensor, ""]:
        return outputs.named[_LOGITS].sum() if self.network is not None else outputs.logits.new_zeros(())

    def _count(self, states_B: Tensor, logits_BD: Tensor) -> None:
        found = [
            torch.ones_like(states_B).sum(),
            (states_B == LabelState.ASSUMED.number).sum(),
            (states_B == LabelState.CORRECTED.number).sum(),
            logits_BD[:, DELAYED].sigmoid().sum(),
            logits_BD[:, REAL].sigmoid().sum(),
        ]
        counts = torch.stack([each.double() for each in found])
        self._counts = counts if self._counts is None else self._counts + counts


def losses_of_delays(logits_BD: Float[Tensor, "B 2"], states_B: Float[Tensor, "B"]) -> Float[Tensor, "B"]:
    """Return the cross-entropies of d and r of rows whose label is certain, each added where it has a target.

    Args:
        logits_BD: of d and r.
        states_B: what is known of the labels, numbers of `LabelState`.
    """
    is_corrected_B = (states_B == LabelState.CORRECTED.number).float()
    is_confirmed_B = (states_B == LabelState.CONFIRMED.number).float()
    is_certain_B = (states_B != LabelState.ASSUMED.number).float()
    of_delayed_B = F.binary_cross_entropy_with_logits(logits_BD[:, DELAYED], is_corrected_B, reduction="none")
    of_real_B = F.binary_cross_entropy_with_logits(logits_BD[:, REAL], is_confirmed_B, reduction="none")
    return of_delayed_B * is_certain_B + of_real_B * (is_corrected_B + is_confirmed_B)


def correct_labels(model: Model, config: DelayedConfig, *, seed: int) -> DelayedFeedback | None:
    """Give a model the loss of labels that come later; it is then that of training.

    Args:
        model: on its device, converted to its precision, and not yet parallel.
        config: which loss, of which label.
        seed: of the starting weights of the network beside; those of the model are not touched.

    Returns:
        The loss and what it learns by, which is `model.student`; None where labels are taken as they are.

    Raises:
        ConfigError: positives of the label weigh more than its negatives.
    """
    if config.loss is DelayedLoss.NONE:
        return None
    label = next(each for each in model.inputs.labels if each.name == (config.label or each.name))
    if label.positive_weight != 1.0:
        raise ConfigError(
            expected="positives that weigh as much as negatives: a late positive is both, one after the other",
            found=f"positive_weight = {label.positive_weight:g} of label {label.name!r}",
            where=f"--delayed.loss {config.loss.value}",
            ways_out=("take positive_weight out of the label in the schema", "--delayed.loss none"),
        )
    device = device_of(model)
    # The random state of the run stays as it was, so that the model is the same with each loss.
    with OwnDraws(seed):
        made = DelayedFeedback(model, config)
    model.student = made.to(device)
    return made
