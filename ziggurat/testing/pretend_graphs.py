"""CUDA graphs of a GPU that is none (`pretend_cuda.py`): operations are recorded with their arguments, and made again.

What a graph gets wrong on a GPU it gets wrong here. A number of Python's that was an argument stays as it was when the
graph was recorded; Python code is not run again; what was read from tensors is read anew; a result is written to the
memory of the first one. Whatever makes the host wait ends the recording, as the driver ends it. And a recording
computes nothing: the numbers of all tensors, and the state of the generator, are afterwards what they were before.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from ziggurat.ops.dispatched import OpArgs, OpKwargs
from ziggurat.testing.pretend_queues import recordings

_WRITTEN_UNSAID = ("running_mean", "running_var")  # by batch norm, whose schema does not say so


class CUDAGraph:
    """Operations that were recorded."""

    def __init__(self, *, keep_graph: bool = False) -> None:
        del keep_graph
        self._operations: list[tuple[OpOverload, OpArgs, OpKwargs, list[Tensor]]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._thread = 0
        self._state = torch.get_rng_state()

    @property
    def operations(self) -> list[str]:
        """Names of what was recorded, in its order."""
        return [str(func) for func, *_ in self._operations]

    def begin(self) -> None:
        """Record what this thread computes from here on."""
        assert not recordings, "one recording at a time"
        self._thread = threading.get_ident()
        self._state = torch.get_rng_state()
        recordings.append(self)

    def end(self) -> None:
        """Record no more, and undo what was computed."""
        recordings.remove(self)
        for whole, numbers in self._before.values():
            whole.copy_(numbers)
        self._before.clear()
        torch.set_rng_state(self._state)

    def computed(self, func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> object:
        """Compute an operation on tensors of the host, and keep it."""
        if threading.get_ident() != self._thread:
            return func(*args, **kwargs)
        for tensor in _written(func, args, kwargs):
            self._keep(tensor)
        result = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, _tensors(result)))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Make all operations again."""
        assert self._operations, "nothing was recorded"
        for func, args, kwargs, results in self._operations:
            again = _tensors(func(*args, **kwargs))
            for old, new in zip(results, again, strict=True):
                if new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr():
                    assert new.shape == old.shape, f"{func}: a size that data decide"
                    old.copy_(new)

    def _keep(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            self._before[storage.data_ptr()] = whole, whole.clone()


class Recording:
    """As `torch.cuda.graph`: what is computed inside is recorded."""

    def __init__(self, graph: CUDAGraph, **options: object) -> None:
        del options
        self._graph = graph

    def __enter__(self) -> None:
        self._graph.begin()

    def __exit__(self, *error: object) -> None:
        self._graph.end()
        if error[0] is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def _written(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    found: list[object] = []
    for position, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or argument.name in _WRITTEN_UNSAID:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return _tensors(found)


def _tensors(given: object) -> list[Tensor]:
    return [each for each in tree_leaves(given) if isinstance(each, Tensor)]
