"""Distillation: a student learns from labels, and from scores of larger models that were logged beside its rows.

                        ┌─► closing map ──────────────► z      label   L_s = h(z, y)                       served
    … ─► x (final) ─────┼─► GS_β ─► auxiliary head ───► z_d    teacher L_d = h(z_d, LS_α(p))               ┐ training
                        └─► auxiliary head of adapter ► z_a    L_a = h(z_a, σ(A(p)) as a constant)         │ alone
    p (logged) ─────────────► A: 1 ─► 8 ─► 1 ─────────► A(p)   L_A = h(A(p), y)                            ┘

    loss = L_s + w·L_d (+ L_a + L_A)        h(z, t) = cross-entropy of the probability σ(z) with t
    LS_α(p) = min(α·p, 1)                   label scaling: rates of clicks crowd near 0
    GS_β(x) = x, gradient β·∂x              gradient scaling: how much of the teacher reaches the network below
    single head                             L_d = h(z, p): the served logits learn from both, the control

A head of its own keeps the teacher's bias out of the served logits (ExFM, arXiv 2502.17494, equations 1 to 7, theorem
3.1), and the adapter A calibrates a teacher that has become old by labels that are new. The paper makes a step of A
before that of the student; here both learn in one step, so the student reads the A of the step before.

Rows without a teacher (NaN) and without a label have no part in L_d, L_a and L_A. Denominators stay those of the
labels, so of a batch in which one row in two has a teacher, L_d counts half. Several teachers have heads and adapters
of their own, and their terms are added up. The loss that is reported stays L_s, as in a run without a teacher: other
terms enter by their gradient alone.

Heads start at the mean of their targets, adapters at the share of positives: a head that starts at 1/2 sends a gradient
about the share into the network below, which where clicks are rare cost a student more than its teacher gave
(docs/experiments/2026-11-27-when-does-an-auxiliary-head-gain-more-than-a-single-one.md).

The served network is untouched. Heads and adapters are weights of `model.student`, which checkpoints hold and which
whoever loads a run to score it does not build. They compute in what activations have, whatever the precision of dense
products. Cost: 2·width FLOPs a sample for each head and label, three times that with the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError, DataError, nearest_names
from ziggurat.features.batch import Batch
from ziggurat.models import Embedded, LossSums, Model, Outputs
from ziggurat.models.contract.losses import labelled_weights, logits_among_all, numbers_of_labels
from ziggurat.models.contract.model import device_of
from ziggurat.ops.own_draws import OwnDraws
from ziggurat.typed import FloatOrZero, PositiveFloat, checked

_HIDDEN = 8  # of an adapter, as in the paper
_LEAST_SHARE = 1e-4  # that a head starts at
_SCORES = "student.scores"
_TAUGHT, _CLIPPED, _LOSS, _ROWS = range(4)  # places in the counts of a student


class DistilHead(StrEnum):
    """Choices of what learns from a teacher. On the command line a dash may stand for the underscore."""

    NONE = "none"
    SINGLE_HEAD = "single_head"  # the served logits
    AUX_HEAD = "aux_head"  # a head beside them, which is not served

    @classmethod
    def _missing_(cls, value: object) -> DistilHead | None:
        text = str(value).replace("-", "_")
        return next((member for member in cls if member.value == text), None)


@dataclass(frozen=True, kw_only=True)
@checked
class DistilConfig:
    """Settings of what a student learns from logged scores of teachers.

    Args:
        head: what learns from them; none: nothing does.
        teachers: extra columns with probabilities, as "EXTRA" (a number a row for the only label, or a list with one
            for each label) or "EXTRA=LABEL"; none: all extra columns of the schema.
        loss_weight: w, of the teacher's loss.
        label_scaling: α, which multiplies the teacher's probabilities, up to 1; for an auxiliary head.
        gradient_scaling: β, which multiplies the gradient of the auxiliary head into the network below it.
        adapter: whether a small network calibrates the teacher by the labels, with an auxiliary head of its own.

    Example:
        >>> from ziggurat.training.distillation import DistilConfig
        >>> DistilConfig(head="aux-head", loss_weight=2.0).head.value
        'aux_head'
    """

    head: DistilHead = DistilHead.NONE
    teachers: tuple[str, ...] = ()
    loss_weight: FloatOrZero = 1.0
    label_scaling: PositiveFloat = 1.0
    gradient_scaling: FloatOrZero = 1.0
    adapter: bool = False

    def check(self) -> None:
        """Refuse settings of an auxiliary head where there is none.

        Raises:
            ConfigError: there are some; names them.
        """
        if self.head is DistilHead.AUX_HEAD:
            return
        others = [each.name for each in dataclasses.fields(self)[3:] if getattr(self, each.name) != each.default]
        if self.head is DistilHead.NONE:
            others += ["loss_weight"] * (self.loss_weight != 1.0) + ["teachers"] * bool(self.teachers)
        if others:
            flags = ", ".join(f"--distil.{name.replace('_', '-')}" for name in others)
            raise ConfigError(
                expected="an auxiliary head with these settings: a served head would be scaled away from its labels",
                found=f"head = {self.head.value} with {', '.join(others)}",
                where="settings of distillation",
                ways_out=("--distil aux-head", f"leave out {flags}"),
            )


@dataclass(frozen=True)
class _Teacher:
    """A column of logged scores.

    Args:
        extra: its name in `Batch.extras`.
        label: place of the label that it is about; None: a score for each label.
    """

    extra: str
    label: int | None


class _Map(nn.Linear):
    """A linear map that no conversion of dense products reaches, as it is not served."""


class _Tap:
    """Keeps the last input of a closing map, as a hook before its forward pass."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        # Evaluations would keep a batch alive for nothing.
        self.seen = inputs[0] if module.training else None

    def take(self) -> Tensor | None:
        """Return the input, and forget it."""
        seen = self.seen
        self.seen = None
        return seen


class ScaledGradient(torch.autograd.Function):
    """GS_β: returns its input, and passes β times the gradient on."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor, factor: float) -> Tensor:
        """Return the input."""
        ctx.factor = factor  # pyright: ignore[reportAttributeAccessIssue]
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the scaled gradient."""
        # None: the factor is a number, and has no gradient.
        return grads[0] * ctx.factor, None  # pyright: ignore[reportAttributeAccessIssue]


class Student(nn.Module):
    """Heads and adapters of a model that learns from teachers, and its loss; made by `teach`.

    Args:
        model: the student, on one device, not yet parallel.
        config: heads, weights, scalings.
        teachers: columns of logged scores.
        maps: closing maps of the model; () with a single head.
        mean_targets: of each extra column, the mean of min(α·p, 1) for each label it has; see `teach`.
    """

    def __init__(
        self,
        model: Model,
        config: DistilConfig,
        *,
        teachers: Sequence[_Teacher],
        maps: Sequence[nn.Linear],
        mean_targets: Mapping[str, Sequence[float]],
    ) -> None:
        super().__init__()
        self.config = config
        self.inputs = model.inputs
        self.teachers = tuple(teachers)
        self._label_loss = model.loss
        self._model_name = type(model).__name__
        self._taps = [_Tap() for _ in maps]
        for linear, tap in zip(maps, self._taps, strict=True):
            linear.register_forward_pre_hook(tap)
        self.heads = nn.ModuleList(_like(maps) for _ in teachers)
        self.adapter_heads = nn.ModuleList()
        self.adapters = nn.ModuleList()
        if config.adapter:
            self.adapter_heads.extend(_like(maps) for _ in teachers)
            num_labels = len(model.inputs.labels)
            self.adapters.extend(nn.ModuleList(_adapter() for _ in range(num_labels)) for _ in teachers)
        self._start_at_shares(maps, mean_targets)
        self._counts: Tensor | None = None

    @torch.no_grad()
    def _start_at_shares(self, maps: Sequence[nn.Linear], mean_targets: Mapping[str, Sequence[float]]) -> None:
        """Let heads and adapters start at the shares of positives that they will learn.

        A head that starts at 1/2 first learns the share: where clicks are rare, its first gradients say little else,
        and all of them go into the network below.
        """
        if any(linear.bias is None for linear in maps):
            return
        for index, teacher in enumerate(self.teachers):
            # Where nobody has measured what a teacher says: at what the served logits start at.
            starts = torch.cat([linear.bias.detach().cpu() for linear in maps]) if maps else torch.empty(0)
            if self.adapters:
                _set_biases(self.adapter_heads[index], starts)
                last_maps = [adapter[-1] for adapter in self.adapters[index]]  # pyright: ignore[reportGeneralTypeIssues]
                for last, start in zip(last_maps, starts, strict=True):
                    last.bias.fill_(start)
            if teacher.extra in mean_targets and len(starts):
                means = torch.tensor(mean_targets[teacher.extra]).clamp(_LEAST_SHARE, 1.0 - _LEAST_SHARE)
                columns = slice(None) if teacher.label is None else [teacher.label]
                starts[columns] = torch.logit(means)
            if self.heads and maps:
                _set_biases(self.heads[index], starts)

    def inputs_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return the scores of the teachers for the adapters, a part of the dense network; 0 where unknown."""
        if not self.adapters:
            return {}
        scores_BTL = torch.stack([self._scores(batch, teacher) for teacher in self.teachers], dim=1)
        return {_SCORES: scores_BTL.nan_to_num(0.0)}

    def outputs_beside(self, outputs: Outputs, embedded: Embedded) -> Outputs:
        """Return the outputs with the logits of heads and adapters, (B, L) each, by names that the loss knows."""
        if not self._taps:
            return outputs
        # Taken, and so forgotten: the next forward pass must not find those of this one.
        finals = [tap.take() for tap in self._taps]
        missed = [index for index, final in enumerate(finals) if final is None]
        if missed:
            raise ConfigError(
                expected="a dense network that calls its closing maps, whose input the auxiliary heads read",
                found=f"one that reads the weights of closing map {missed[0]} past its forward pass",
                where=f"forward_dense of {self._model_name}",
                ways_out=("call the module: self.output(x)", "--distil single-head, which reads the logits alone"),
            )
        known = [final for final in finals if final is not None]
        named = dict(outputs.named)
        for index, heads in enumerate(self.heads):
            scaled = [ScaledGradient.apply(final, self.config.gradient_scaling) for final in known]
            named[f"student.head.{index}"] = _logits(heads, scaled)
        for index, heads in enumerate(self.adapter_heads):
            named[f"student.adapter_head.{index}"] = _logits(heads, known)
            # Scores came with the dense inputs, so they may be in another type than the network.
            scores_BL = embedded.named[_SCORES][:, index].to(known[0].dtype)
            # One label at a time: each has an adapter of its own, which takes one number.
            columns = [adapter(scores_BL[:, label : label + 1]) for label, adapter in enumerate(self.adapters[index])]  # pyright: ignore[reportArgumentType]
            named[f"student.adapter.{index}"] = torch.cat(columns, dim=1)
        return dataclasses.replace(outputs, named=named)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Return the loss of the labels, with the gradient of all terms.

        Raises:
            DataError: a teacher's score is no probability (on a CPU; on a GPU the loss is then NaN).
        """
        sums = self._label_loss(outputs, batch)
        terms_L = self.terms(outputs, batch)
        # Adds 0 and its gradient: the loss that is reported is that of a run without a teacher.
        return LossSums(total=sums.total + (terms_L - terms_L.detach()), weight=sums.weight)

    def terms(self, outputs: Outputs, batch: Batch) -> Float[Tensor, "L"]:
        """Return w·L_d + L_a + L_A of all teachers as numerators: sums over samples, for each label."""
        weights_BL = labelled_weights(batch.labels, batch.weights, inputs=self.inputs)
        # Unknown labels are 0 here, and have the weight 0.
        labels_BL = batch.labels.nan_to_num(0.0).float()
        logits_BL = outputs.logits.float()
        share_L = numbers_of_labels([label.weight for label in self.inputs.labels], logits_BL)
        served_BL = logits_among_all(logits_BL, inputs=self.inputs)
        total_L = logits_BL.new_zeros(logits_BL.shape[1])
        for index, teacher in enumerate(self.teachers):
            scores_BL = self._scores(batch, teacher)
            is_known_BL = scores_BL.isnan().logical_not()
            # Rows without a teacher get the weight 0, so that the sum passes them over.
            weights_of_known_BL = weights_BL * is_known_BL
            # Before anything is computed of it: NaN times the weight 0 is NaN.
            probabilities_BL = torch.where(is_known_BL, scores_BL, 0.0)
            scaled_BL = self.config.label_scaling * probabilities_BL
            targets_BL = scaled_BL.clamp(max=1.0)
            student_BL = served_BL if not self._taps else outputs.named[f"student.head.{index}"].float()
            of_teacher_BL = _entropy(student_BL, targets_BL)
            teacher_L = (of_teacher_BL * weights_of_known_BL).sum(dim=0)
            total_L = total_L + self.config.loss_weight * teacher_L
            if self.adapters:
                adapted_BL = outputs.named[f"student.adapter.{index}"].float()
                of_adapter_BL = _entropy(adapted_BL, labels_BL)
                head_BL = outputs.named[f"student.adapter_head.{index}"].float()
                # Detached: this head follows the adapter, which must not learn from it (L_a).
                of_head_BL = _entropy(head_BL, adapted_BL.detach().sigmoid())
                total_L = total_L + ((of_adapter_BL + of_head_BL) * weights_of_known_BL).sum(dim=0)
            is_bad_BL = is_known_BL & ((scores_BL < 0.0) | (scores_BL > 1.0))
            total_L = self._refused(is_bad_BL, scores_BL, teacher, total_L)
            columns_L = is_known_BL.new_ones(is_known_BL.shape[1])
            if teacher.label is not None:
                # A teacher of one label has no score for the others, and these rows do not count as not taught.
                columns_L = torch.arange(len(columns_L), device=columns_L.device) == teacher.label
            self._count(
                taught=is_known_BL.sum(),
                clipped=(is_known_BL & (scaled_BL > 1.0)).sum(),
                loss=(of_teacher_BL.detach() * is_known_BL).sum(),
                rows=columns_L.sum() * is_known_BL.shape[0],
            )
        # The weight of a label in the loss holds for what is taught of it, too.
        return total_L * share_L

    def facts(self) -> dict[str, object]:
        """Return the teacher's loss, and the shares of taught rows and of clipped scores, since the last call."""
        if self._counts is None:
            return {}
        counts = self._counts.tolist()
        # Counts begin anew after each log line.
        self._counts = None
        taught = max(counts[_TAUGHT], 1.0)
        found: dict[str, object] = {"teacher_share": counts[_TAUGHT] / max(counts[_ROWS], 1.0)}
        found["distil_loss"] = counts[_LOSS] / taught
        if self.config.label_scaling != 1.0:
            found["distil_clip_rate"] = counts[_CLIPPED] / taught
        return found

    def lines(self) -> dict[str, str]:
        """Return lines for the start-up report by their titles."""
        return {"distillation": self._line()}

    def _line(self) -> str:
        config = self.config
        names = ", ".join(teacher.extra for teacher in self.teachers)
        parts = [f"{config.head.value} of {names}", f"w = {config.loss_weight:g}"]
        if self._taps:
            parts += [f"α = {config.label_scaling:g}", f"β = {config.gradient_scaling:g}"]
            parts += ["with adapter"] if config.adapter else []
            count = sum(parameter.numel() for parameter in self.parameters())
            parts.append(f"{count:,} weights that are not served")
        return ", ".join(parts)

    def _scores(self, batch: Batch, teacher: _Teacher) -> Float[Tensor, "B L"]:
        """Return the scores of a teacher for each label, NaN where it has none."""
        num_labels = len(self.inputs.labels)
        scores = batch.extras[teacher.extra].float()
        if teacher.label is None:
            return scores.view(-1, num_labels)
        columns = [
            scores.view(-1) if label == teacher.label else torch.full_like(scores.view(-1), torch.nan)
            for label in range(num_labels)
        ]
        return torch.stack(columns, dim=1)

    def _refused(self, is_bad_BL: Tensor, scores_BL: Tensor, teacher: _Teacher, total_L: Tensor) -> Tensor:
        """Return the sums as they are, if all scores are probabilities; else NaN, where asking would hold up a GPU."""
        if is_bad_BL.device.type != "cpu":
            return torch.where(is_bad_BL.any(), torch.nan, total_L)
        if bool(is_bad_BL.any()):
            raise DataError(
                expected="probabilities of a teacher, between 0 and 1",
                found=f"{float(scores_BL[is_bad_BL][0]):g}",
                where=f"extra column {teacher.extra!r}, in training",
                ways_out=(
                    "log probabilities: of a logit z, 1 / (1 + exp(-z))",
                    f"leave the teacher out: --distil.teachers without {teacher.extra}",
                ),
            )
        return total_L

    def _count(self, *, taught: Tensor, clipped: Tensor, loss: Tensor, rows: Tensor) -> None:
        # In float64, which counts rows exactly for as long as a run lasts.
        counts = torch.stack([each.double() for each in (taught, clipped, loss, rows)])
        self._counts = counts if self._counts is None else self._counts + counts


def teach(
    model: Model, config: DistilConfig, *, seed: int, mean_targets: Mapping[str, Sequence[float]] | None = None
) -> Student | None:
    """Give a model what it learns from teachers by; its `loss` is then that of training.

    Args:
        model: on its device, converted to its precision, and not yet parallel.
        config: what learns, and how.
        seed: of the starting weights of heads and adapters; those of the model are not touched.
        mean_targets: by extra column, the mean of min(α·p, 1) over some rows for each label that it has scores of, at
            which its heads start; others start at what the served logits start at, and so do adapters.

    Returns:
        The student, which is `model.student`; None where nothing is to be learned from a teacher.

    Raises:
        ConfigError: the model has no final representation, the schema no such extra column, or a label no probability.

    Example:
        >>> import ziggurat as zg
        >>> from ziggurat.features.inputs import ExtraSpec
        >>> from ziggurat.testing.batches import small_inputs
        >>> import dataclasses
        >>> inputs = dataclasses.replace(small_inputs(), extras=(ExtraSpec(name="teacher"),))
        >>> model = zg.build_model(zg.DLRMConfig(embedding_dim=4), inputs, seed=0)
        >>> teach(model, DistilConfig(head="aux-head"), seed=0).lines()["distillation"]
        'aux_head of teacher, w = 1, α = 1, β = 1, 257 weights that are not served'
    """
    config.check()
    if config.head is DistilHead.NONE:
        return None
    teachers = _teachers(config, model=model)
    maps: Sequence[nn.Linear] = ()
    if config.head is DistilHead.AUX_HEAD:
        maps = model.closing_maps()
        # Several maps that add up to one logit have no final representation in common.
        if sum(linear.out_features for linear in maps) != len(model.inputs.labels):
            raise ConfigError(
                expected="a model with one final representation before its logits, which an auxiliary head reads",
                found=f"{type(model).__name__}, which names no closing maps, or several that add up to a logit",
                where="--distil aux-head",
                ways_out=(
                    "--distil single-head",
                    "another model: --model dcn_v2, or a recipe with dlrm, dnn, dcn_v2",
                    "in a model of your own: def closing_maps(self): return [self.output]",
                ),
            )
    device = device_of(model)
    # The random state of the run stays as it was, so that the model is the same with a teacher and without.
    with OwnDraws(seed):
        student = Student(model, config, teachers=teachers, maps=maps, mean_targets=mean_targets or {})
    model.student = student.to(device)
    return student


def _teachers(config: DistilConfig, *, model: Model) -> list[_Teacher]:
    """Return the columns of logged scores and what they are about.

    Raises:
        ConfigError: there is no such column or label, or a label has no probability.
    """
    extras = {spec.name: spec for spec in model.inputs.extras}
    labels = [label.name for label in model.inputs.labels]
    found: list[_Teacher] = []
    for text in config.teachers or tuple(extras):
        name, _, label = text.partition("=")
        if name not in extras:
            near = [f"did you mean {each!r}?" for each in nearest_names(name, tuple(extras))]
            raise ConfigError(
                expected=f"an extra column of the schema: {', '.join(extras) or 'it has none'}",
                found=repr(name),
                where="settings of distillation, teachers",
                ways_out=(*near, f'declare it in the schema: [[extra]], name = "{name}"'),
            )
        if label and label not in labels:
            raise ConfigError(
                expected=f"a label of the schema: {', '.join(labels)}",
                found=repr(label),
                where=f"settings of distillation, teachers, {text}",
                ways_out=[f"--distil.teachers {name}={each}" for each in labels],
            )
        width = max(extras[name].dim, 1)
        if width != (1 if label else len(labels)):
            raise ConfigError(
                expected="a number a row of a teacher of one label, else a list with one for each label",
                found=f"{width} of {name!r}, for {label or f'{len(labels)} labels'}",
                where="settings of distillation, teachers",
                ways_out=[f"--distil.teachers {name}={each}" for each in labels]
                if width == 1
                else (f"dim = {len(labels)} in [[extra]] of {name!r}",),
            )
        found.append(_Teacher(name, labels.index(label) if label else None))
    if not found:
        raise ConfigError(
            expected="logged scores of a teacher, as extra columns of the schema",
            found="a schema without extra columns",
            where="--distil",
            ways_out=(
                "--teacher FOLDER, of `ziggurat teacher log`",
                'in the schema: [[extra]], name = "teacher", column = "COLUMN"',
                "leave --distil out",
            ),
        )
    about = {name for each in found for name in (labels if each.label is None else [labels[each.label]])}
    for spec in model.inputs.labels:
        if spec.name in about and not spec.task.has_positives:
            raise ConfigError(
                expected="teachers of labels that are probabilities",
                found=f"label {spec.name!r}, which is a number",
                where="settings of distillation, teachers",
                ways_out="name the labels that teachers are about: --distil.teachers EXTRA=LABEL",
            )
    return found


def _like(maps: Sequence[nn.Linear]) -> nn.ModuleList:
    """Return a head for each closing map, of its shape."""
    return nn.ModuleList(_Map(linear.in_features, linear.out_features) for linear in maps)


def _set_biases(heads: nn.Module, starts: Tensor) -> None:
    """Let the heads of a teacher start at a logit for each label."""
    first = 0
    for head in heads.children():
        assert isinstance(head, nn.Linear), "made by `_like`"
        head.bias.copy_(starts[first : first + head.out_features])
        first += head.out_features


def _adapter() -> nn.Sequential:
    return nn.Sequential(_Map(1, _HIDDEN), nn.ReLU(), _Map(_HIDDEN, 1))


def _logits(heads: nn.Module, finals: Sequence[Tensor]) -> Float[Tensor, "B L"]:
    columns = [head(final) for head, final in zip(heads.children(), finals, strict=True)]
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)


def _entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
