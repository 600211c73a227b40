"""Everything that a run must remember to go on bit for bit: tensors by stable names, and plain data.

    model.<name>                      weights and buffers; embedding tables under their own names
    live.<name>, average_count        with `weight_average`: what training goes on with (`model.…` is the average)
    dense_optimizer.<weight>.<part>   Adam's moments and step, …
    table_optimizer.<table>.<part>    row-wise sums, …
    self_distil.<age>.<weight>        weights of so many steps ago, with `self_distil`
    negatives.mined                   what was found for each user, where negatives are mined
    growing.<table>.<part>            ids with their rows, and sightings, of vocabularies that grow
    rng.<generator>                   random state, as bytes; on many ranks rng.rank<r>.<generator>

On many ranks each holds its part of it; the names, and what is stored under them, do not depend on the number of ranks,
except those of random state.

The plain data is the run's `Position`, how much of log and ledger was written, and of a run by dispatch what its
safety valve has seen and done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.data.encoded.ledger import Ledger
from ziggurat.models import Model
from ziggurat.parallel.tables.sharded_tables import tables_of
from ziggurat.training.checkpoint import JSON, Checkpoint, CheckpointStore, Match, rng_state, set_rng_state
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.negatives import DrawnNegatives
from ziggurat.training.position import Position
from ziggurat.training.records.shared_ledger import SharedLedger
from ziggurat.training.safety_valve import SafetyValve
from ziggurat.training.step.train_step import TrainStep

RNG = "rng."
VALVE = "safety_valve"


@dataclass(kw_only=True)
class TrainState:
    """Everything that training changes: what a checkpoint holds, and what a resumed run goes on with.

    Args:
        step: the model, its weights and optimizers.
        position: steps, epochs, rows and evaluations so far.
        negatives: what was mined; None where the model draws none.
        growing: vocabularies that grow; None where there are none.
        ledger: which rows were trained; None while no run is open.
        valve: judges losses of a run by dispatch; None where products are not dispatched.
    """

    step: TrainStep
    position: Position
    negatives: DrawnNegatives | None = None
    growing: GrowingTables | None = None
    ledger: Ledger | SharedLedger | None = None
    valve: SafetyValve | None = None

    def seed(self, seed: int, *, rank: int) -> None:
        """Seed torch's generators; each rank draws numbers of its own."""
        seed_everything(seed, rank=rank)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of a checkpoint by name. They share memory with the run. Collective."""
        return snapshot_tensors(self.step, self.negatives, self.growing)

    def load(self, store: CheckpointStore) -> Checkpoint:
        """Load tensors and position of the newest intact checkpoint. Collective.

        Raises:
            CheckpointError: none is intact, or it does not fit.
        """
        prepare_to_load(self.step)
        into = self.tensors()
        checkpoint = store.load(into=into, optional=optional_names(self.step))
        restore_state(self.step, into, self.growing)
        self.position = Position.from_json(checkpoint.state.get("position"))
        if self.valve is not None:
            self.valve.load(checkpoint.state.get(VALVE))
        return checkpoint

    def plain(self) -> dict[str, JSON]:
        """Return the plain data of a checkpoint, but for what was written."""
        found: dict[str, JSON] = {"position": self.position.to_json()}
        if self.valve is not None:
            found[VALVE] = self.valve.state()
        return found

    def load_weights(self, store: CheckpointStore, step: int) -> None:
        """Load the weights of the checkpoint of a step, and what was grown; optimizers stay. Collective.

        Raises:
            DamagedCheckpointError: it is damaged or gone; nothing was changed.
        """
        wanted = into_model(self.step.model)
        wanted |= {} if self.growing is None else self.growing.state()
        store.load(step, into=wanted, match=Match.SUBSET)
        if self.growing is not None:
            self.growing.rebuild()


def state_tensors(step: TrainStep) -> dict[str, Tensor]:
    """All tensors of a run by name. They share memory with the run: loading into them restores it. Collective."""
    # An update that is still under way would be in some tensors and not in others.
    step.settle()
    _make_optimizer_state(step)
    if step.average is not None:
        tensors = step.average.state()
    else:
        tensors = {f"model.{name}": value for name, value in step.model.state_dict().items()}
    if step.dense_optimizer is not None:
        # Torch numbers weights in their order; a name outlives another order.
        names: dict[Tensor, str] = {parameter: name for name, parameter in step.dense_named.items()}
        for parameter, parts in step.dense_optimizer.state.items():
            for part, value in parts.items():
                if isinstance(value, Tensor):
                    tensors[f"dense_optimizer.{names[parameter]}.{part}"] = value
    if step.self_distillation is not None:
        tensors |= step.self_distillation.tensors()
    if step.table_optimizer is not None:
        tensors |= {f"table_optimizer.{name}": value for name, value in step.table_optimizer.state_dict().items()}
    return tensors


def snapshot_tensors(
    step: TrainStep, negatives: DrawnNegatives | None = None, growing: GrowingTables | None = None
) -> dict[str, Tensor]:
    """Return what a checkpoint saves: the run's tensors, mined negatives, grown vocabularies and the random state."""
    prefix = rng_prefix(step)
    more = {} if negatives is None else negatives.state()
    # Beside the weights: a grown table without its vocabulary could not be read.
    more |= {} if growing is None else growing.state()
    return state_tensors(step) | more | {f"{prefix}{name}": value for name, value in rng_state(step.device).items()}


def optional_names(step: TrainStep) -> tuple[str, ...]:
    """Return the prefixes of the names that a checkpoint may have or not.

    The random state of each rank, whose number may have changed; and what optimizers keep of weights that learned once
    and no longer do (`models/blocks/without_gradient.py`).
    """
    still = (name for name, weight in step.model.named_parameters() if not weight.requires_grad)
    return RNG, *(f"dense_optimizer.{name}." for name in still)


def rng_prefix(step: TrainStep) -> str:
    """Return the prefix of the names of this rank's random state."""
    many = step.parallel is not None and step.parallel.topology.world_size > 1
    return f"{RNG}rank{step.parallel.topology.rank}." if many and step.parallel is not None else RNG


def restore_state(step: TrainStep, into: Mapping[str, Tensor], growing: GrowingTables | None = None) -> None:
    """Finish a load into `snapshot_tensors`: what does not share memory with them is set."""
    if growing is not None:
        growing.rebuild()
    if step.table_optimizer is not None:
        prefix = "table_optimizer."
        own = {name.removeprefix(prefix): value for name, value in into.items() if name.startswith(prefix)}
        step.table_optimizer.load_state_dict(own)
    # Not drawn but loaded: lookups refuse tables that are neither.
    for tables in tables_of(step.model):
        tables.mark_filled()
    prefix = rng_prefix(step)
    states = {name.removeprefix(prefix): value for name, value in into.items() if name.startswith(prefix)}
    set_rng_state(states, device=step.device)


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed torch's generators; each rank draws numbers of its own."""
    # 2⁶⁴ divided by the golden ratio: seeds of neighbouring ranks and runs are far from each other.
    torch.manual_seed((seed + rank * 0x9E3779B97F4A7C15) % (1 << 63))


def into_model(model: Model) -> dict[str, Tensor]:
    """The weights of a model by name, all of which are about to be loaded."""
    for tables in tables_of(model):
        tables.about_to_load()
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def prepare_to_load(step: TrainStep) -> None:
    """Tell tables that they are about to be loaded, and make torch create its (lazily made) optimizer state."""
    for tables in tables_of(step.model):
        tables.about_to_load()
    _make_optimizer_state(step)


@torch.no_grad()
def _make_optimizer_state(step: TrainStep) -> None:
    """Make torch create what its optimizer keeps, as it is before the first update, where there was none yet.

    A checkpoint may come before the first update: when all batches until then were skipped. An update with zero
    gradients at rate 0 leaves the weights as they are.
    """
    optimizer = step.dense_optimizer
    if optimizer is None or optimizer.state or isinstance(optimizer, torch.optim.SGD):  # ours keeps nothing
        return
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # every step sets its own
    for parameter in step.dense_named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    # Also the count of steps, which the update above has raised.
    for parts in optimizer.state.values():
        for value in parts.values():
            if isinstance(value, Tensor):
                value.zero_()
    for parameter in step.dense_named.values():
        parameter.grad = None
