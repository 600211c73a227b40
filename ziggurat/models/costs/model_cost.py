"""What a model costs: parameters, and the FLOPs of its dense network and towers, forward and backward, exactly.

`torch.utils.flop_counter` counts them while the network runs on the meta device: shapes alone, nothing is computed, no
random number drawn, and the model stays as it is. Only matrix products count, 2·in·out for a linear map and sample.
Backward, each has two products, the gradients of the weight and of the input; a map on raw numbers needs one, and the
pairwise dot product of `ops/interactions/dot.py`, which uses the symmetry of X Xᵀ, pays once.

    FLOPs of a sample = F(3 samples) − F(2 samples)

What runs once a batch and not once a sample (a gate of FinalMLP that reads nothing of the sample) drops out of the
difference. Columns of zeros that only align memory (`mlp.py`) are no work asked for, and are left out on the meta
device. Lookups, pooling, activations and norms are bound by memory and do not count. A list has one row, unless
`lengths` says otherwise, and each sample has a history of its own. What a model costs on real histories, which
neighbours in a batch may share, `flops_of_batch` counts on real samples.

A model with an `embed` of its own looks three rows up, and one whose shapes depend on its data computes on its own
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ziggurat.features.batch import Batch, JaggedRows, SequenceGroup, zero_vectors
from ziggurat.features.jagged import moments_group
from ziggurat.features.tables import NUM_RESERVED_ROWS
from ziggurat.models.contract.model import Embedded, Model, Unpooled
from ziggurat.models.contract.wrapped import WrappedModel

Run = Callable[[int, torch.device], Tensor]
"""From a number of samples and a device to what is computed of them."""

T = TypeVar("T")

_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations a sample; a multiplication and an addition are two."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Forward and backward: one training step a sample."""
        return self.forward + self.backward

    def __add__(self, other: Flops) -> Flops:
        return Flops(forward=self.forward + other.forward, backward=self.backward + other.backward)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(forward=self.forward - other.forward, backward=self.backward - other.backward)


NO_FLOPS = Flops(forward=0, backward=0)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Learned numbers of a model."""

    embedding: int
    dense: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.dense


def num_parameters(model: Model) -> ParameterCount:
    """Parameters in tables (rows × columns, reserved rows too) and in the dense network, tower modules included."""
    tables = model.embeddings.inputs.tables
    open_dim = model.embeddings.config.dim
    embedding = sum(table.num_rows * (table.embedding_dim or open_dim) for table in tables)
    dense = [p for name, p in model.named_parameters() if not name.startswith("embeddings.")]
    return ParameterCount(embedding=embedding, dense=sum(parameter.numel() for parameter in dense))


def flops_per_sample(model: Model, *, lengths: Mapping[str, int] | None = None, backward: bool = True) -> Flops:
    """FLOPs of the matrix products of the towers and of `model.forward_dense` for one sample.

    Args:
        model: on one device, or what `parallelize` made of it.
        lengths: rows of its lists, by name; 1 where a list is not named, nor one that has its length in every sample.
        backward: whether it is counted, which takes as long again; 0 otherwise.
    """
    dense = dense_run(model, lengths=lengths)
    towers = NO_FLOPS if model.towers is None else flops_of(model.towers, model.towers.input_dim, backward=backward)
    return towers + count_flops(model, dense, backward=backward)


def flops_of_batch(model: Model, batch: Batch, *, backward: bool = True) -> Flops:
    """FLOPs of the matrix products of the towers and of `model.forward_dense` for the mean sample of a batch.

    Lists have the lengths that they have there, and a history that samples share counts once.

    Args:
        model: on one device, or what `parallelize` made of it.
        batch: of samples in host memory; of so many that their lists are like those of all.
        backward: whether it is counted; 0 otherwise.
    """
    batch = batch.expanded()
    network = model.forward_dense  # itself, not what ranks have put in its slot
    towers = NO_FLOPS if model.towers is None else flops_of(model.towers, model.towers.input_dim, backward=backward)

    def dense(size: int, device: torch.device) -> Tensor:
        del size  # that of the batch
        return network(_embedded(model, batch, device)).logits

    def count(device: torch.device) -> tuple[int, int]:
        return _count(model, dense, batch.batch_size, device, counts_backward=backward)

    forward, back = on_shapes(model, count)
    return towers + Flops(forward=round(forward / batch.batch_size), backward=round(back / batch.batch_size))


def dense_run(model: Model, *, lengths: Mapping[str, int] | None = None) -> Run:
    """Return what runs `model.forward_dense` on samples without content, for `on_shapes`; it returns the logits.

    Args:
        model: on one device, or what `parallelize` made of it.
        lengths: as of `flops_per_sample`.
    """
    lengths = _all_lengths(model, lengths or {})
    network = model.forward_dense  # itself, not what ranks have put in its slot

    def dense(size: int, device: torch.device) -> Tensor:
        return network(_embedded(model, _row_zero(model, size, lengths), device)).logits

    return dense


def flops_of(module: nn.Module, input_dim: int, *, backward: bool = True) -> Flops:
    """FLOPs of one sample in a module that maps (B, input_dim) to a tensor, and whose input needs a gradient."""
    return count_flops(module, lambda size, device: module(_leaf(size, input_dim, device)), backward=backward)


def count_flops(module: nn.Module, run: Run, *, backward: bool = True) -> Flops:
    """FLOPs of one sample in whatever `run` computes with the weights of `module`, by torch's counter.

    Args:
        module: what `run` calls; its weights are elsewhere meanwhile, and as they were afterwards.
        run: on as many samples as asked for; inputs that need a gradient require one.
        backward: whether it is counted; 0 otherwise.
    """
    return on_shapes(module, lambda device: _difference(module, run, device, backward=backward))


def on_shapes(module: nn.Module, measure: Callable[[torch.device], T]) -> T:
    """Call `measure` with the meta device or, where a shape depends on data, with the device of the module."""
    try:
        return measure(_META)
    except RuntimeError:  # NotImplementedError is one of these
        first = next(module.parameters(), None)
        # Dropout draws here, as shapes alone would not: the run's random numbers stay where they are.
        with torch.random.fork_rng():
            return measure(torch.device("cpu") if first is None else first.device)


def _difference(module: nn.Module, run: Run, device: torch.device, *, backward: bool) -> Flops:
    # 3 less 2: what runs once a batch drops out. Not 2 less 1: to a batch norm one sample is a special case.
    counts = [_count(module, run, size, device, counts_backward=backward) for size in (2, 3)]
    (forward_2, backward_2), (forward_3, backward_3) = counts
    return Flops(forward=forward_3 - forward_2, backward=backward_3 - backward_2)


def _count(module: nn.Module, run: Run, size: int, device: torch.device, *, counts_backward: bool) -> tuple[int, int]:
    """Return FLOPs forward and backward of a batch."""
    with torch.enable_grad(), FlopCounterMode(display=False) as forward:
        found = run_apart(module, run, size=size, device=device)
    if not (counts_backward and found.requires_grad):
        return forward.get_total_flops(), 0
    with FlopCounterMode(display=False) as backward:
        found.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def run_apart(module: nn.Module, run: Run, *, size: int, device: torch.device) -> Tensor:
    """Run on a device, with weights that share nothing with the module's gradients and statistics."""
    weights = {
        f"module.{name}": weight.detach().to(device).requires_grad_(weight.requires_grad)
        for name, weight in module.named_parameters()
        if not name.startswith("embeddings.")  # tables that are parameters: no dense network reads them
    }
    # Copies: batch norms move their statistics, and those of the model must stay.
    buffers = {f"module.{name}": buffer.detach().to(device, copy=True) for name, buffer in module.named_buffers()}
    return functional_call(_Call(module, run), weights | buffers, (size, device))


class _Call(nn.Module):
    """Runs a function while `functional_call` has exchanged the weights of a module."""

    def __init__(self, module: nn.Module, run: Run) -> None:
        super().__init__()
        self.module = module
        self.run = run

    def forward(self, size: int, device: torch.device) -> Tensor:
        return self.run(size, device)


def _all_lengths(model: Model, lengths: Mapping[str, int]) -> dict[str, int]:
    """The lengths, and those of lists that are as long as one of them in every sample."""
    found = dict(lengths)
    for group in model.joined_lists:
        found |= dict.fromkeys(group, next((lengths[name] for name in group if name in lengths), 1))
    return found


def _embedded(model: Model, batch: Batch, device: torch.device) -> Embedded:
    """Make what the dense network reads of a batch, with zeros for what would be looked up; it requires a gradient."""
    is_wrapped = isinstance(model, WrappedModel)
    if type(model).embed is not Model.embed and not is_wrapped:
        # Caught in `on_shapes`, which then tries the model's own device.
        if device == _META:
            raise NotImplementedError("the model has an `embed` of its own, which reads rows")
        with torch.no_grad():
            embedded = model.embed(batch.to(device))
        wanting = pytree.tree_map_only(torch.Tensor, _wants_gradient, embedded)
        return replace(wanting, dense=embedded.dense, vectors=embedded.vectors)
    inputs = model.inputs
    places = model.embeddings.tables.places
    size = batch.batch_size
    sequences = {}
    for spec in inputs.sequences:
        offsets = batch.lists(inputs.list_position(spec.name))[0].offsets
        values = _leaf(int(offsets[-1]), places[spec.table].dim, device)
        sequences[spec.name] = Unpooled(values=values, offsets=offsets.to(device))
    embedded = Embedded(
        dense=torch.zeros(size, len(inputs.dense), device=device),
        fields=_leaf(size, sum(model.field_dims), device),
        sequences=sequences,
        vectors=zero_vectors(inputs, size, device=device),
    )
    if type(model).further is not Model.further:
        with torch.no_grad():
            named = model.further(batch)
        return replace(embedded, named={name: value.to(device) for name, value in named.items()})
    return WrappedModel.batched(embedded, batch=batch.to(device)) if is_wrapped else embedded


def _row_zero(model: Model, size: int, lengths: Mapping[str, int]) -> Batch:
    """Samples of reserved rows, a row in each list that `lengths` does not name; times for the longest list.

    Neighbours differ in every row, so that no model takes their histories for one.
    """
    inputs = model.inputs
    rows = torch.tensor([lengths.get(spec.name, 1) for spec in inputs.jagged], dtype=torch.int64)
    offsets = torch.cat([rows.new_zeros(1), rows.repeat_interleave(size).cumsum(0)])
    longest = max(lengths.values(), default=1)
    return Batch(
        dense=torch.zeros(size, len(inputs.dense)),
        single=(torch.arange(size) % NUM_RESERVED_ROWS).expand(len(inputs.single), size).contiguous(),
        jagged=JaggedRows(_sample_of_row(rows, size) % NUM_RESERVED_ROWS, offsets),
        vectors=zero_vectors(inputs, size),
        sequences={
            spec.name: _moments(size, min(spec.max_length, lengths.get(spec.name, longest))) for spec in inputs.moments
        },
        labels=torch.zeros(size, len(inputs.labels)),
        row_ids=torch.arange(size),
    )


def _sample_of_row(rows: Int64[Tensor, "F"], size: int) -> Int64[Tensor, "N"]:
    """Return the sample of each row of lists, feature after feature, of so many rows in each sample."""
    samples = torch.arange(size).repeat(len(rows))
    return samples.repeat_interleave(rows.repeat_interleave(size))


def _moments(size: int, length: int) -> SequenceGroup:
    """Make the same number of times, all 0, in each of some samples."""
    return moments_group(torch.zeros(size * length, dtype=torch.int64), torch.arange(size + 1) * length)


def _leaf(size: int, dim: int, device: torch.device) -> Tensor:
    return torch.zeros(size, dim, device=device, requires_grad=True)


def _wants_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
