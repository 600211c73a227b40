"""Funnel: labels that happen one after another (shown → clicked → bought), each a product of conditional chances.

    a_k       what the network computes for label k: the logit of "k, given that k − 1 happened"
    p_k       = σ(a_1) · σ(a_2) · … · σ(a_k)                  chance of label k among all rows
    z_k       = ln p_k − ln(1 − p_k)                          its logit, which the loss of label k takes

Conversions are learned from all rows that were shown, and not from the clicked ones alone, whose users are others than
those who are asked when the model serves (sample selection bias), and who are few. A label may then not be likelier
than the one before: rows that say so (bought, never clicked) cost loss and are not refused.

    ln p_k   = Σ_{j ≤ k} ln σ(a_j)              exact where p_k is tiny: no product of small numbers is made
    1 − p_k  = −expm1(ln p_k)                   exact where p_k is near 1

Source: Ma et al., "Entire Space Multi-Task Model", SIGIR 2018, arXiv 1804.07931, equations 1 to 3; for longer funnels
Wen et al., "Entire Space Multi-Task Modeling via Post-Click Behavior Decomposition", SIGIR 2020, arXiv 1910.07099.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.features.labels import Label, MissingLabel

# 1 − p is kept above 0, where the logit would be infinite; FP32 has 1.2e-38 as its last normal number.
_LEAST = 1e-37


def funnel_logits(conditional_BL: Float[Tensor, "B L"]) -> Float[Tensor, "B L"]:
    """Return the logit of each label among all rows, from that of each label given the one before.

    Args:
        conditional_BL: a, in the order of the labels.
    """
    log_chance_BL = F.logsigmoid(conditional_BL.float()).cumsum(dim=1)
    log_rest_BL = torch.log((-torch.expm1(log_chance_BL)).clamp_min(_LEAST))
    later_BL = log_chance_BL - log_rest_BL
    # The first label is a itself: through exponents and back it would lose bits for nothing.
    return torch.cat([conditional_BL[:, :1].float(), later_BL[:, 1:]], dim=1)


def conditional_logits(logits: Sequence[float]) -> list[float]:
    """Return a_k of labels whose logits among all rows are z_k.

    A label that is likelier than the one before counts as if it were as likely.

    Args:
        logits: z, in the order of the labels.
    """
    chances = [1.0 / (1.0 + math.exp(-logit)) for logit in logits]
    found: list[float] = []
    before = 1.0
    for chance in chances:
        share = min(chance / before, 1.0 - 1e-4)
        found.append(math.log(share / (1.0 - share)))
        before = min(before, chance)
    return found


def check_funnel(inputs: InputSpec, *, where: str) -> None:
    """Refuse labels that are no funnel. One label is a funnel of one step: an ordinary model.

    Raises:
        ConfigError: a label that is not binary.
    """
    others = [label.name for label in inputs.labels if not label.task.has_positives]
    if others:
        raise ConfigError(
            expected="binary labels, in the order in which they happen (clicked, then bought)",
            found=f"not binary: {', '.join(others)}",
            where=where,
            ways_out=(
                "take these labels out of the schema, or make them binary (positive_from)",
                "mmoe or ple without model.funnel, which take labels of any kind",
            ),
        )


def refuse_unknown_steps(labels: Sequence[Label], *, where: str) -> None:
    """Refuse later steps that are known of some rows only: of the rows where the step before happened, as a rule.

    The product of a row is then compared with what holds for those who came so far, and every chance is too high.

    Raises:
        ConfigError: a label behind the first one is left out where it is missing.
    """
    unknown = [label.name for label in labels[1:] if label.missing is MissingLabel.LEFT_OUT]
    if unknown:
        raise ConfigError(
            expected="a funnel whose later labels are known of every row: 0 where the step before did not happen",
            found=f'missing = "left_out" of {", ".join(unknown)}',
            where=where,
            ways_out=(
                'write 0 into the empty cells of the data, and take missing = "left_out" out of the schema',
                "mmoe or ple without model.funnel, whose labels may be known of some rows",
            ),
        )
