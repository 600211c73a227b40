"""Self-distillation on multiple channels (SMC): a model learns from what it said of the batch one step ago.

    batch ─► lookup ─► fields ─┬────────────────────► network θ_t      ─► z       L = (1 − a_t)·h(z, y)
             (once)            └─► some fields gone ─► network θ_{t−1} ─► z̃ ─────► + a_t·h(z/T, σ(z̃/T))
                                                       no gradient
    a_t = α·(1 − cos(π·min(t/R, 1)))/2      from 0 to α in R steps       h: cross-entropy of σ(z) with a probability

A target that is itself a prediction says how sure the labels allow one to be, and a label that is wrong has less to
say: the article reports gains under label noise above all. The two views of a batch differ: by weights one step older,
by pooled fields that are left out at random (with share p, those that stay are divided by 1 − p, as dropout does), and
by the model's own dropout, of which each view draws. Numbers, vectors and lists that are not pooled are whole in both.

The official code passes batch t + 1 through the network at step t, and keeps the logits in a queue until batch t + 1
is trained. Here the *weights* of the step before are kept, and the second view is computed when its batch is trained.
For a network without tables these are the same bits (`tests/training/test_self_distillation.py` has the official loop).
Rows of embedding tables are looked up once, so both views read the rows of now: those that step t − 1 has changed are
one step younger than in the queue. For this no batch need be known ahead, the first batch of an epoch has a second view
like any other, and a checkpoint holds weights and no logits, so that a run goes on with other ranks.

SMC-n has n − 1 second views, by the weights of 1, 2, … n − 1 steps ago; their probabilities are averaged. (Our reading:
the article's text on n > 2 was not at hand.) With T = 1 the target is the probability itself; another T biases scores.

Second views move no running statistics: they have buffers of their own, copied from the model's before each pass.
Fields that are left out follow from seed, step and `Batch.row_ids`: the same on any number of ranks, and after a
resume. The loss that is reported stays that of the labels; the other term enters by its gradient alone.

Cost: the dense network forward once more for each second view, and a copy of its weights.

Source: Zhao, Luo and Wang, Self-discipline on multiple channels, arXiv 2304.14224.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.func import functional_call

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import LabelSpec
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.contract.losses import labelled_weights, numbers_of_labels
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.parallel.dense import DenseNetwork, DenseParallelism
from ziggurat.parallel.parallelize import Parallel
from ziggurat.training.config import Compile, SelfDistil, SelfDistilConfig, StepGraphs, TrainingConfig

_WHERE = "training settings, self-distil"
_LEAVE_OUT = "train without: --self-distil none"
_VIEWS = 1 << 32  # purposes of random numbers from here on, so that none is that of a feature's unknown ids
_MAX_FIELDS = 1 << 20


class SelfDistillation:
    """Second views of the batches of one run, and the loss with them.

    Args:
        model: on its device, as it is trained.
        config: of the run.

    Attributes:
        config: its settings.
        weight: a_t of the last step.
    """

    def __init__(self, model: Model, config: TrainingConfig) -> None:
        self.config: SelfDistilConfig = config.self_distil
        self._model = model
        self._seed = config.seed
        self._network = DenseNetwork(model)
        self._weights = dict(self._network.named_parameters())
        # Newest first: `_earlier[0]` has the weights of one step ago.
        self._earlier = [
            {name: weight.detach().clone() for name, weight in self._weights.items()}
            for _ in range(self.config.method.num_teachers)
        ]
        self._buffers = {name: buffer.clone() for name, buffer in self._network.named_buffers()}
        self._step: int | None = None
        self._targets_BL: Float[Tensor, "B L"] | None = None
        self._agreement: Tensor | None = None
        self.weight = 0.0
        self._is_learned_L = [_is_probability(label) for label in model.inputs.labels]

    @staticmethod
    def of(model: Model, config: TrainingConfig, *, parallel: Parallel | None) -> SelfDistillation | None:
        """Return that of a run; None where it learns from labels alone.

        Raises:
            ConfigError: a setting of the run, its model or its ranks do not go with it.
        """
        if config.self_distil.method is SelfDistil.NONE:
            return None
        _refuse_settings(config)
        _refuse_model(model)
        _refuse_ranks(model, parallel)
        return SelfDistillation(model, config)

    def begin(self, *, step: int, total_steps: int) -> None:
        """Say which step comes.

        Args:
            step: made before it.
            total_steps: of the whole run; 0 where nobody knows.

        Raises:
            ConfigError: nobody knows, and no `ramp_steps` says how long the weight rises.
        """
        self.weight = weight_of_views(self.config, step=step, total_steps=total_steps)
        self._step = step

    def require_begun(self) -> None:
        """Refuse a step whose number nobody has said.

        Raises:
            ConfigError: `begin` was not called since the last one.
        """
        if self._step is None:
            raise ConfigError(
                expected="self_distillation.begin before each step: the weight of second views depends on its number",
                found="a step without it",
                where="TrainStep, self-distil",
                ways_out=(
                    "step.self_distillation.begin(step=steps_made, total_steps=all_steps), then step(batch)",
                    "zg.Trainer, which calls it",
                ),
            )

    @torch.no_grad()
    def look(self, embedded: Embedded, batch: Batch) -> None:
        """Compute the second views of a batch, and keep the weights of now for the next one.

        Call it in the precision of the step, with what the step itself looked up; collective where batch norms are.

        Args:
            embedded: of the batch.
            batch: names its samples.
        """
        step = self._step
        if step is None:  # no step: ranks set themselves up
            self._targets_BL = None
            return
        self._step = None
        if step == 0:
            for earlier in self._earlier:
                self._copy_into(earlier)
        self._targets_BL = self._targets(embedded, batch, draw=StepDraw(self._seed, step)) if self.weight else None
        # The oldest is forgotten, and its memory takes the weights that this step is about to change.
        self._earlier.insert(0, self._earlier.pop())
        self._copy_into(self._earlier[0])

    def mixed(self, sums: LossSums, outputs: Outputs, batch: Batch) -> LossSums:
        """Return the loss of the labels with the gradient of the loss that has second views too.

        Args:
            sums: of the labels.
            outputs: of the network, with the gradient.
            batch: that was looked at.
        """
        targets_BL = self._targets_BL
        if targets_BL is None:
            return sums
        labels = self._model.inputs.labels
        weights_BL = labelled_weights(batch.labels, batch.weights, inputs=self._model.inputs)
        logits_BL = outputs.logits.float()
        losses_BL = F.binary_cross_entropy_with_logits(
            logits_BL / self.config.temperature, targets_BL, reduction="none"
        )
        shares_L = [self.weight if is_learned else 0.0 for is_learned in self._is_learned_L]
        share_L = numbers_of_labels(shares_L, sums.total)
        importance_L = numbers_of_labels([label.weight for label in labels], sums.total)
        views_L = (losses_BL * weights_BL).sum(dim=0) * importance_L
        total_L = (1.0 - share_L) * sums.total + share_L * views_L
        # Of value 0, or NaN: the loss stays that of the labels, and the gradient is that of the mixture.
        gradient_L = total_L - total_L.detach()
        self._agreement = _agreement(logits_BL.detach(), targets_BL, weights_BL * (share_L > 0))
        return LossSums(total=sums.total.detach() + gradient_L, weight=sums.weight)

    def report(self) -> dict[str, object]:
        """Return what a line of the log says of the last step, on this rank; waits for a GPU.

        `self_distil_weight` is a_t; `self_distil_agreement` 1 minus the mean distance of both views' probabilities.
        """
        found: dict[str, object] = {"self_distil_weight": self.weight}
        if self._agreement is not None:
            found["self_distil_agreement"] = float(self._agreement)
        return found

    def line(self) -> str:
        """Return a line for the start-up report."""
        config = self.config
        rise = f"in {config.ramp_steps:,} steps" if config.ramp_steps else "until the end of the run"
        return (
            f"{config.method.value}, α = {config.alpha:g} {rise}, T = {config.temperature:g}, "
            f"{config.field_dropout:.0%} of fields left out"
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of earlier steps by name, for a checkpoint; they share memory with these."""
        return {
            f"self_distil.{age}.{name}": tensor
            for age, earlier in enumerate(self._earlier, start=1)
            for name, tensor in earlier.items()
        }

    def _copy_into(self, earlier: dict[str, Tensor]) -> None:
        if earlier:
            torch._foreach_copy_(list(earlier.values()), list(self._weights.values()))

    def _targets(self, embedded: Embedded, batch: Batch, *, draw: StepDraw) -> Float[Tensor, "B L"]:
        """The mean probability of the second views."""
        found = []
        for number, earlier in enumerate(self._earlier):
            for name, buffer in self._network.named_buffers():
                self._buffers[name].copy_(buffer)
            view = replace(embedded, fields=self._some_fields(embedded.fields, batch, view=number, draw=draw))
            outputs = functional_call(self._network, {**earlier, **self._buffers}, (view,))
            found.append(torch.sigmoid(outputs.logits.float() / self.config.temperature))
        return torch.stack(found).mean(dim=0)

    def _some_fields(
        self, fields_BX: Float[Tensor, "B X"], batch: Batch, *, view: int, draw: StepDraw
    ) -> Float[Tensor, "B X"]:
        dims = self._model.field_dims
        share = self.config.field_dropout
        if not share or not dims:
            return fields_BX
        purpose = _VIEWS + view * _MAX_FIELDS
        kept_BF = _kept(batch.row_ids, num_fields=len(dims), share=share, draw=draw, purpose=purpose)
        factors_BF = (kept_BF / (1.0 - share)).to(device=fields_BX.device, dtype=fields_BX.dtype)
        widths_F = torch.tensor(dims, device=fields_BX.device)
        return fields_BX * factors_BF.repeat_interleave(widths_F, dim=1, output_size=sum(dims))


def weight_of_views(config: SelfDistilConfig, *, step: int, total_steps: int) -> float:
    """Return a_t, the weight of the second views in the step after `step` others.

    Args:
        config: of second views.
        step: made before it.
        total_steps: of the whole run; 0 where nobody knows.

    Raises:
        ConfigError: nobody knows, and no `ramp_steps` says how long the weight rises.
    """
    ramp = config.ramp_steps or total_steps
    if not ramp:
        raise ConfigError(
            expected="a number of steps in which the weight of the second views rises, or a run with a known end",
            found="ramp_steps = 0, and data that does not know how many batches it has",
            where=_WHERE,
            ways_out=("--training.self-distil.ramp-steps 1000", "--training.max-steps 10000"),
        )
    return config.alpha * (1.0 - math.cos(math.pi * min(step / ramp, 1.0))) / 2.0


def _kept(
    row_ids_B: Int64[Tensor, "B"], *, num_fields: int, share: float, draw: StepDraw, purpose: int
) -> Bool[Tensor, "B F"]:
    """Draw which fields of each sample stay; the same for a sample on any number of ranks."""
    hashes_FB = draw.hashes(row_ids_B.numpy(), purposes_P=purpose + np.arange(num_fields))
    return torch.from_numpy(hashes_FB >= np.uint64(int(share * 2.0**64))).T


def _agreement(
    logits_BL: Float[Tensor, "B L"], targets_BL: Float[Tensor, "B L"], weights_BL: Float[Tensor, "B L"]
) -> Float[Tensor, ""]:
    distance_BL = (torch.sigmoid(logits_BL) - targets_BL).abs()
    return 1.0 - (distance_BL * weights_BL).sum() / weights_BL.sum().clamp(min=1e-30)


def _is_probability(label: LabelSpec) -> bool:
    return label.task.has_positives and label.task.gives_probabilities


def _refuse_settings(config: TrainingConfig) -> None:
    found = ""
    way = ""
    if config.compile is not Compile.OFF:
        found = f"--training.compile {config.compile.value}: a compiled network keeps its weights"
        way = "--training.compile off"
    elif config.step_graph is StepGraphs.ON:
        found = "--training.step-graph on: a recorded step would keep the weight that the second views had then"
        way = "--training.step-graph auto"
    elif config.precision.is_dispatched:
        found = "--training.precision dispatch, which measures each product in a step"
        way = "--training.precision auto"
    if found:
        raise ConfigError(
            expected="a step whose network can be called with earlier weights",
            found=found,
            where=_WHERE,
            ways_out=(way, _LEAVE_OUT),
        )


def _refuse_model(model: Model) -> None:
    found = ""
    if model.draws is not None or model.coupled_samples > 1:
        found = f"{type(model).__name__}, whose loss looks at samples together"
    elif not any(_is_probability(label) for label in model.inputs.labels):
        found = "labels that are numbers: " + ", ".join(label.name for label in model.inputs.labels)
    elif type(model).loss_weight is not Model.loss_weight:
        found = f"{type(model).__name__}, whose loss has denominators of its own"
    elif model.student is not None:
        found = "a model that learns from logged scores of teachers too (--distil)"
    if found:
        raise ConfigError(
            expected="a model with a binary label, each sample of which has a loss of labels alone",
            found=found,
            where=_WHERE,
            ways_out=_LEAVE_OUT,
        )


def _refuse_ranks(model: Model, parallel: Parallel | None) -> None:
    if parallel is None:
        return
    found = ""
    way = "train on one device"
    if parallel.config.dense is not DenseParallelism.DDP:
        found = f"--dense {parallel.config.dense.value}, which has parts of weights"
        way = "--dense ddp"
    elif parallel.config.num_parts > 1:
        found = f"batches in {parallel.config.num_parts} parts"
        way = "--parallel.num-parts 1"
    elif model.slots.outputs is not None:
        found = "histories that ranks divide"
    if found:
        raise ConfigError(
            expected="ranks that have whole copies of the network, and whole batches of their own",
            found=found,
            where=_WHERE,
            ways_out=(way, _LEAVE_OUT),
        )
