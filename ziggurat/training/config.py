"""Training settings: everything about a run that is neither data nor model.

Two presets frame the field and are never compared with each other (docs/concepts.md): `bars` is the BARS/FuxiCTR
protocol (dense Adam on whole tables, L2 on whole tables, learning rate × 0.1 at each evaluation that does not improve,
early stop), `scale` is how large systems train (row-wise Adagrad on touched rows, warm-up, one pass).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ziggurat.data.balance.partition import Balance
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.errors import ConfigError
from ziggurat.precision.precision import USUAL, Precision
from ziggurat.training.checkpoint import CheckpointConfig
from ziggurat.typed import Count, CountOrNone, FloatOrZero, Fraction, PositiveFloat, ThreadsOrNone, checked

AUTO_METRIC = "auto"
AS_VALIDATION = "as_validation"


class DenseOptimizer(StrEnum):
    """The optimizer of everything but fused tables. In dense-gradient mode it updates the tables too."""

    ADAM = "adam"
    ADAMW = "adamw"
    ADAGRAD = "adagrad"
    SGD = "sgd"


class Compile(StrEnum):
    """torch.compile of the dense network. The first step then takes 10 to 110 s (2 to 5 s from the cache).

    `cuda_graphs` compiles, and on a GPU starts all kernels of a full batch's forward or backward pass at once, where
    the whole step is not one graph (`StepGraphs`).
    """

    OFF = "off"
    DEFAULT = "default"
    MAX_AUTOTUNE = "max_autotune"
    CUDA_GRAPHS = "cuda_graphs"


class StepGraphs(StrEnum):
    """Whether the whole step of a full batch is one CUDA graph, on one GPU (`step/graph.py`); the bits are the same."""

    AUTO = "auto"  # where it can be recorded, and was not slower in a few timed steps
    ON = "on"  # refused where it cannot be
    OFF = "off"


class Decay(StrEnum):
    """The course of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"  # to `final_factor` at the last step
    COSINE = "cosine"  # to `final_factor` at the last step
    INVERSE_SQRT = "inverse_sqrt"  # half after 3 · `decay_steps` steps, a third after 8; needs no end
    HALVING = "halving"  # halves its distance from `final_factor` every `decay_steps` steps; needs no end
    PLATEAU = "plateau"  # × `plateau_factor` at each evaluation that does not improve


class AverageOver(StrEnum):
    """The steps whose weights are averaged."""

    STEPS = "steps"  # those before, the latest most, by `weight_average`
    WINDOW = "window"  # all of a window of data alike


class NonFinite(StrEnum):
    """The reaction to a loss or gradient that is NaN or infinite. The batch is dumped in both cases."""

    STOP = "stop"
    SKIP = "skip"


class DamagedRecords(StrEnum):
    """The reaction of a resumed run to a training log or ledger that is not as its checkpoint has it (`written.py`)."""

    STOP = "stop"
    START_NEW = "start_new"  # the damaged file is kept under another name; what it held is no longer proven


@dataclass(frozen=True, kw_only=True)
@checked
class ScheduleConfig:
    """Learning rate over time, as a factor on the base rates.

    Args:
        warmup_steps: linear from 1/warmup_steps to 1.
        rewarm_steps: the same again at the begin of each window of data after the first; 0: not.
        decay: what the rate does after the warm-up; see `Decay`.
        decay_steps: steps that inverse_sqrt and halving count by.
        final_factor: where linear, cosine and halving end.
        plateau_factor: what plateau multiplies with.
        minimum: plateau never goes below this learning rate.
    """

    warmup_steps: CountOrNone = 0
    rewarm_steps: CountOrNone = 0
    decay: Decay = Decay.CONSTANT
    decay_steps: Count = 1000
    final_factor: FloatOrZero = 0.0
    plateau_factor: FloatOrZero = 0.1
    minimum: FloatOrZero = 1e-6


class Better(StrEnum):
    """The direction in which a metric improves."""

    AUTO = "auto"  # as is known of the built-in metrics
    HIGHER = "higher"
    LOWER = "lower"


@dataclass(frozen=True, kw_only=True)
@checked
class EarlyStopConfig:
    """Stop when the validation metric no longer improves, and restore the best weights.

    Args:
        metric: any metric of the evaluation (`auc`, `log_loss`, `gauc`, `ne`, `auc/click` with several labels); `auto`
            follows the first label: AUC if it is binary, RMSE if it is a number (see early_stop.py).
        patience: stop after this many evaluations in a row without improvement; 0 never stops (the best weights are
            restored all the same).
        min_steps: never stop before so many steps: a model that finds pairs stands for hundreds of steps where single
            features have brought it, before it leaves that plateau.
        min_delta: an improvement is at least this much.
        better: higher or lower, for a metric of your own; auto for the built-in ones.
    """

    metric: str = AUTO_METRIC
    patience: CountOrNone = 0
    min_steps: CountOrNone = 0
    min_delta: FloatOrZero = 1e-6
    better: Better = Better.AUTO


class SelfDistil(StrEnum):
    """Ways in which a model learns from itself, one step ago; see `step/self_distillation.py`."""

    NONE = "none"
    SMC2 = "smc2"  # one second view, by the weights of one step ago
    SMC3 = "smc3"  # two, by those of one and two steps ago
    SMC4 = "smc4"

    @property
    def num_teachers(self) -> int:
        """Second views of a batch."""
        return {"none": 0, "smc2": 1, "smc3": 2, "smc4": 3}[self.value]


@dataclass(frozen=True, kw_only=True)
@checked
class SelfDistilConfig:
    """Settings of what a model learns from its own earlier weights, and of its second views.

    Args:
        method: smc2 and so on; none: labels alone.
        alpha: the largest weight of the second views; labels have the rest.
        temperature: T, by which logits of both are divided; other than 1 it biases probabilities.
        field_dropout: share of pooled fields that a second view does without, drawn for each sample.
        ramp_steps: steps in which the weight of the second views rises from 0, by half a cosine; 0: those of the run.

    Example:
        >>> from ziggurat.training.config import SelfDistilConfig
        >>> SelfDistilConfig(method="smc3").method.num_teachers
        2
    """

    method: SelfDistil = SelfDistil.NONE
    alpha: Fraction = 0.9
    temperature: PositiveFloat = 1.0
    field_dropout: Fraction = 0.1
    ramp_steps: CountOrNone = 0


@dataclass(frozen=True, kw_only=True)
@checked
class TrainingConfig:
    """Settings of training: everything about a run that is neither data nor model.

    Args:
        epochs: passes over the training data.
        max_steps: stop after this many steps in all; 0: no limit.
        learning_rate: of the dense network (and of dense-gradient tables).
        table_learning_rate: of fused tables (row-wise Adagrad, SGD, sparse Adam).
        optimizer: of the dense network.
        beta1: β₁ of Adam and AdamW: how long the average of gradients remembers; the other optimizers have none.
        beta2: β₂ of Adam and AdamW: the same of squared gradients.
        weight_decay: L2 on the weights of the dense network, in the gradient (decoupled for AdamW); never on tables,
            whose penalties are `embedding_l2` and `model.embedding.weight-decay`.
        embedding_l2: λ of (λ/2)·‖W‖² over *whole* tables at every step; needs dense-gradient tables (BARS).
        clip_norm: clip the global norm of all gradients, tables included; 0: off.
        weight_average: β of the running average of weights that is evaluated and kept instead of them; 0: off. On one
            device; of fused tables the rows stay as they are. See `weight_average.py`.
        average_over: `window` keeps the plain mean of the weights behind each step of a window of data, in the place of
            the running average; in a stream each window has its own. See `AverageOver`.
        forget: share of what row-wise Adagrad has summed up that is forgotten at the begin of each window of data after
            the first, so that rates of its rows rise again; 0: nothing.
        precision: what the dense network computes in; auto measures at start whether BF16 pays on this machine.
        dispatch: file of `ziggurat numerics dispatch`, for precision dispatch: the kernel of each product.
        compile: torch.compile of the dense network; slow first step, faster later ones.
        step_graph: whether the whole step of a full batch is one CUDA graph; see `StepGraphs`.
        non_finite: what to do when a loss or gradient is NaN or infinite: stop the run, or skip the batch.
        evaluate_every: evaluate each so many steps; 0: at the end of every epoch.
        checkpoint_every: save each so many steps; 0: at the end of every epoch.
        log_every: write loss and rate to metrics.jsonl each so many steps.
        threads: CPU threads; 0: torch's own choice. Kept at resume, because sums depend on it.
        evaluation_batch_size: rows a step in evaluation; 0: four times the training batch.
        seed: of weights, shuffling and dropout.
        balance: how the samples of a step are dealt to ranks, by the lengths of their lists; see `Balance`.
        balance_cost: what a sample costs, as terms: "1*clicks, 0.002*clicks^2"; none: FLOPs counted from the model.
        balance_shares: how much of the work each rank gets, in any unit, for `balance` variable; none: all the same.
        token_budget: a step on one device takes samples, in the order of the stream, until their lists have so many
            events together, and `loader.batch_size` samples at most; 0: it takes `loader.batch_size` samples.
        damaged_records: see `DamagedRecords`.
        unknown_ids: how often ids are made unknown in training, as "FEATURE=SHARE"; `as_validation`: as often as
            validation rows have unknown ids; none: never. See `unknown_ids.py`.
        start_at_base_rate: whether a new model starts at the share of positives among the training rows, by the bias of
            its output, and not at 50 %; published protocols start at 50 %.
        self_distil: whether the model also learns from what its weights of one step ago say of a second view of the
            batch; see `SelfDistilConfig`.

    Example:
        >>> zg.TrainingConfig(epochs=2, learning_rate=1e-3).epochs
        2
    """

    epochs: Count = 1
    max_steps: CountOrNone = 0
    learning_rate: PositiveFloat = 1e-3
    table_learning_rate: FloatOrZero = 0.02
    optimizer: DenseOptimizer = DenseOptimizer.ADAM
    beta1: Fraction = 0.9
    beta2: Fraction = 0.999
    weight_decay: FloatOrZero = 0.0
    embedding_l2: FloatOrZero = 0.0
    clip_norm: FloatOrZero = 0.0
    weight_average: Fraction = 0.0
    average_over: AverageOver = AverageOver.STEPS
    forget: Fraction = 0.0
    precision: Precision = USUAL
    dispatch: str = ""
    compile: Compile = Compile.OFF
    step_graph: StepGraphs = StepGraphs.AUTO
    non_finite: NonFinite = NonFinite.STOP
    evaluate_every: CountOrNone = 0
    checkpoint_every: CountOrNone = 0
    log_every: Count = 50
    threads: ThreadsOrNone = 0
    evaluation_batch_size: CountOrNone = 0
    seed: int = 0
    balance: Balance = Balance.NONE
    balance_cost: tuple[str, ...] = ()
    balance_shares: tuple[PositiveFloat, ...] = ()
    token_budget: CountOrNone = 0
    damaged_records: DamagedRecords = DamagedRecords.STOP
    unknown_ids: tuple[str, ...] = ()
    start_at_base_rate: bool = False
    self_distil: SelfDistilConfig = field(default_factory=SelfDistilConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.precision.is_dispatched != bool(self.dispatch):
            raise ConfigError(
                expected="precision dispatch together with the file that names the kernels",
                found=f"precision {self.precision}, dispatch {self.dispatch!r}",
                where="training settings, dispatch",
                ways_out=(
                    "--training.precision dispatch --training.dispatch dispatch.json",
                    "leave --training.dispatch out, and name another precision",
                ),
            )
        if self.average_over is AverageOver.WINDOW and self.weight_average:
            raise ConfigError(
                expected="one average: the running one, or that of a window",
                found=f"average_over = window, weight_average = {self.weight_average}",
                where="training settings",
                ways_out=("--training.weight-average 0", "--training.average-over steps"),
            )
        is_adam = self.optimizer in (DenseOptimizer.ADAM, DenseOptimizer.ADAMW)
        if not is_adam and (self.beta1, self.beta2) != (0.9, 0.999):
            raise ConfigError(
                expected="optimizer adam or adamw, which have β₁ and β₂",
                found=f"beta1 = {self.beta1}, beta2 = {self.beta2} with optimizer {self.optimizer.value}",
                where="training settings",
                ways_out=("--training.optimizer adam", "--training.beta1 0.9 --training.beta2 0.999"),
            )
