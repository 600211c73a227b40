"""Probe a model: take the statistics of every dense product from one batch, and change nothing.

    forward and backward of 251 samples of a batch, on the side     ─►  ProbeRecord (`numerics/probe/`)

The pass sees each product through the arithmetic of its module (`precision/products.py`), as a conversion does, and
computes natively. It is one of its own: a step that was watched would take no fused kernel, and its sums would have
another order. Here weights, gradients, running statistics of norms and random numbers are afterwards what they were,
so a run that is probed has the bits of one that is not. Embeddings are looked up without gradient.

A module that calls its arithmetic several times has a product for each call. Where a call has other widths in another
batch (attention over lists of any length), nothing is kept of it, and the record says so. So it does of modules that
multiply past their arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models.contract.losses import LossSums
from ziggurat.models.contract.model import Embedded, Model, Outputs
from ziggurat.models.converted import unreached_products
from ziggurat.numerics.probe import ProbeRecord, ProductStatistics
from ziggurat.numerics.probe.product import Shape
from ziggurat.precision.arithmetic import NATIVE, Arithmetic
from ziggurat.precision.precision import PLAIN, Precision
from ziggurat.precision.products import exchanged, products_of

# A prime: of the dims of an operand, the multiple of it is the one that grows with the batch.
MAX_SAMPLES = 251
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 23, 31, 47, 67, 97, 127, 181, MAX_SAMPLES)

Loss = Callable[[Outputs, Batch], LossSums]


class ModelProbe:
    """Takes statistics of the products of one model, batch after batch.

    Args:
        model: on one device.
        loss: whose gradients are looked at; that of the model unless given.
        record: to go on with; None begins anew.

    Raises:
        ConfigError: the record is of another model.
    """

    def __init__(self, model: Model, *, loss: Loss | None = None, record: ProbeRecord | None = None) -> None:
        self.model = model
        self._loss = loss or model.loss
        self._modules = products_of(model)
        if record is None:
            record = ProbeRecord(model=type(model).__name__)
            missed, native = unreached_products(model)
            record.left_out |= {name: f"{kind} multiplies past an arithmetic" for name, kind in missed.items()}
            record.left_out |= native
        self.record = record
        known = {name.partition("#")[0] for name in record.products}
        if unknown := sorted(known - self._modules.keys()):
            raise ConfigError(
                expected="a probe of this model",
                found=f"products of {', '.join(unknown[:3])}, which {type(model).__name__} does not have",
                where="statistics of products to go on with",
                ways_out="begin a new probe: another folder for the run",
            )

    def take(self, batch: Batch) -> None:
        """Look at the products of a batch, of its first 251 samples at most.

        Args:
            batch: on the device of the model.
        """
        if batch.batch_size < 2:
            return
        num_samples = max(prime for prime in _PRIMES if prime <= batch.batch_size)
        part = batch.rows(0, num_samples)
        weights = {each.untyped_storage().data_ptr() for each in self.model.parameters()}
        watch = _Watch(self.record, num_samples=num_samples, batch_size=batch.batch_size, weights=weights)
        with left_as_it_is(self.model), exchanged(self._modules, lambda name: _Watched(name, watch)):
            with torch.no_grad():
                embedded = self.model.embed(part)
            dense_pass(self.model, embedded, part, loss=self._loss)
        self.record.num_passes += 1


def dense_pass(model: Model, embedded: Embedded, batch: Batch, *, loss: Loss, activations: Precision = PLAIN) -> None:
    """Run the dense network forward and backward, and leave gradients of weights alone.

    Args:
        model: whose `forward_dense` is run.
        embedded: of the batch; what was looked up is given a gradient.
        batch: with labels.
        loss: from outputs and batch.
        activations: what the network computes in between its products, as a step does.
    """
    with torch.enable_grad():
        leaves = pytree.tree_map_only(torch.Tensor, _wants_gradient, embedded)
        with activations.autocast(batch.labels.device):
            outputs = model.forward_dense(_with_inputs_of(leaves, embedded))
        mean = loss(outputs, batch).mean()
        inputs = [*model.parameters(), *pytree.tree_leaves(leaves)]
        wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
        if mean.requires_grad and wanted:
            torch.autograd.grad(mean, wanted, allow_unused=True)


class _Watch:
    """Puts the operands of one pass into a record."""

    def __init__(self, record: ProbeRecord, *, num_samples: int, batch_size: int, weights: set[int]) -> None:
        self._record = record
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._weights = weights
        self._calls = Counter[str]()

    def see(self, module: str, left: Tensor, right: Tensor, *, is_right_weight: bool) -> ProductStatistics | None:
        """Take in the operands of a product; returns its statistics, unless nothing is kept of it."""
        self._calls[module] += 1
        call = self._calls[module]
        name = module if call == 1 else f"{module}#{call}"
        if name in self._record.left_out:
            return None
        product = self._record.products.get(name)
        weights = (self._is_weight(left), is_right_weight or self._is_weight(right))
        if product is None:
            product = ProductStatistics.of(
                name,
                left,
                right,
                weights=weights,
                shapes=(self._full(left, is_weight=weights[0]), self._full(right, is_weight=weights[1])),
            )
            self._record.products[name] = product
        if not product.fits(left, right):
            del self._record.products[name]
            self._record.left_out[name] = "widths of its operands differ from batch to batch"
            return None
        product.update(left, right)
        return product

    def _is_weight(self, operand: Tensor) -> bool:
        return operand.untyped_storage().data_ptr() in self._weights

    def _full(self, operand: Tensor, *, is_weight: bool) -> Shape:
        """Return the shape that the operand has in a full batch: the first dim that holds samples is scaled."""
        shape = list(operand.shape)
        for index, size in enumerate(shape):
            if not is_weight and size and size % self._num_samples == 0:
                shape[index] = size // self._num_samples * self._batch_size
                break
        return tuple(shape)


class _Watched(Arithmetic):
    """Multiplies natively, and shows operands and gradients to a watch."""

    name = "watched"

    def __init__(self, module: str, watch: _Watch) -> None:
        self._module = module
        self._watch = watch

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        return self._product(left, right, is_right_weight=False)

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        # A weight that was padded lies in memory of its own: that it is one is known here alone.
        product = self._product(inputs.flatten(0, -2), weight.t(), is_right_weight=True)
        product = product.unflatten(0, inputs.shape[:-1])
        return product if bias is None else product + bias

    def _product(self, left: Tensor, right: Tensor, *, is_right_weight: bool) -> Tensor:
        product = NATIVE.matmul(left, right)
        with torch.no_grad():
            kept = self._watch.see(self._module, left, right, is_right_weight=is_right_weight)
        if kept is not None and product.requires_grad:
            product.register_hook(kept.update_gradient)
        return product


def _wants_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _with_inputs_of(leaves: Embedded, embedded: Embedded) -> Embedded:
    """Return what was looked up as leaves, and numbers and vectors of the batch as they are."""
    return replace(leaves, dense=embedded.dense, vectors=embedded.vectors)


@contextmanager
def left_as_it_is(model: Model) -> Iterator[None]:
    """Give random numbers and buffers back as they were."""
    buffers = [buffer for buffer in model.buffers() if buffer.numel()]
    before = [buffer.clone() for buffer in buffers]
    devices = {each.device for each in model.parameters() if each.device.type == "cuda"}
    with torch.random.fork_rng([device.index or 0 for device in devices]):
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
