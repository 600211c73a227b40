"""Networks of one model that teach each other: each moves towards what they say together, which is a constant to it.

    loss = BCE(p, label) + BCE(σ(y₁), p*) + BCE(σ(y₂), p*)          p = σ(logits), of both together      * as a constant

FinalNet has it for its two blocks (Zhu et al., SIGIR 2023), QNN for two passes with other units dropped (arXiv
2505.17999). c·(σ(y_i) − p) is the gradient of the two further terms, c the weight of the sample times that of the
label. They enter the loss by their gradient alone: the step is the paper's, for soft labels too, and the loss that is
reported stays plain cross-entropy, comparable with other models'. A label that is a number has no such terms.
"""

from __future__ import annotations

import torch.nn.functional as F

from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.contract.losses import LossSums, labelled_weights, numbers_of_labels, times_label_weights
from ziggurat.models.contract.model import Outputs

STUDENTS = ("first", "second")


def add_self_distillation(sums: LossSums, outputs: Outputs, batch: Batch, *, inputs: InputSpec) -> LossSums:
    """Return the loss of the labels with the gradients of the terms by which the students learn from the whole.

    Args:
        sums: of the labels.
        outputs: its logits, and those of the students by their names in `STUDENTS`, FP32 at least.
        batch: has labels and weights.
        inputs: says which label is binary.
    """
    is_binary = [label.task.has_positives for label in inputs.labels]
    is_binary_L = numbers_of_labels(is_binary, outputs.logits.float())
    # A constant: students move towards the whole, and not the whole towards them.
    whole_BL = outputs.logits.detach().float().sigmoid()
    first_BL, second_BL = (
        F.binary_cross_entropy_with_logits(outputs.named[student], whole_BL, reduction="none") for student in STUDENTS
    )
    weights_BL = labelled_weights(batch.labels, batch.weights, inputs=inputs) * is_binary_L
    # Like the loss of the labels beside them, each term counts as much as its label does.
    terms_L = times_label_weights(((first_BL + second_BL) * weights_BL).sum(dim=0), inputs=inputs)
    # Adds 0 and its gradient: the loss that is reported stays plain cross-entropy.
    return LossSums(total=sums.total + (terms_L - terms_L.detach()), weight=sums.weight)
