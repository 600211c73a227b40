"""pretend_cuda: tensors that say they are on a GPU and are computed on the CPU, to find what would fail on one.

On a GPU an operation that mixes devices raises, and the places that make a tensor on the CPU by mistake are found. This
does the same without a GPU: inside `pretend_cuda()` every tensor on device "cuda" is a wrapper around one on the CPU,
operations run on what is inside, and an operation that mixes both kinds raises as CUDA would. Numbers are real, so a
whole training step runs, with everything that looks at values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ziggurat.ops.machine_memory import host_memory

_CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten


class PretendCuda(Tensor):
    """A tensor on a GPU that is none; torch sees a tensor of the meta device."""

    host: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        """Wrap a tensor of the CPU."""
        wrapper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=torch.device("meta")
        )
        wrapper.host = inner
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that the tensor claims to be on."""
        return _CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """True, as on a GPU."""
        return True

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """No: it has numbers."""
        return False

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """The tensor inside."""
        del tensor_contents
        return f"PretendCuda({self.host!r})"

    def tolist(self) -> Any:
        """As a GPU's tensor would give it."""
        return self.host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refused, as a GPU's tensor refuses it."""
        del force
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __getitem__(self, index: Any) -> Any:
        """Lists as indices become tensors here: torch would make them on the device that it sees, without numbers."""
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """See `__getitem__`."""
        super().__setitem__(_indices(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on what is inside."""
        del types
        return _compute(func, args, kwargs or {})


def _indices(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index, device=_CUDA) if isinstance(index, list) else index


class _Mode(TorchDispatchMode):
    """Makes new tensors of device "cuda" pretend ones."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, PretendCuda)]
    assert not any(each.is_meta for each in tensors), f"{func}: a tensor without numbers"
    to = kwargs.get("device")
    moves = func in (_aten._to_copy.default, _aten.copy_.default)
    indexes = func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)
    others = [each for each in tensors if not isinstance(each, PretendCuda) and each.dim()]
    assert moves or indexes or not on_gpu or not others, (
        f"{func}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    )
    if indexes and tensors and not isinstance(tensors[0], PretendCuda):
        assert not on_gpu, f"{func}: indices should be on the device of the indexed tensor (cpu)"
    gives_gpu = bool(on_gpu) if to is None else torch.device(to).type == "cuda"
    if func is _aten.copy_.default:
        gives_gpu = isinstance(args[0], PretendCuda)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(PretendCuda, lambda each: each.host, (args, kwargs))
    result = func(*args, **kwargs)
    name = func.__name__.split(".")[0]
    if name.endswith("_") and (not name.startswith("__") or name.startswith("__i")):  # in place: add_, __irshift__
        return tensors[0] if tensors else result
    if not gives_gpu:
        return result
    return tree_map_only(Tensor, lambda each: each if isinstance(each, PretendCuda) else PretendCuda(each), result)


@contextlib.contextmanager
def pretend_cuda() -> Iterator[torch.device]:
    """The device that there is inside."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") makes a tensor here, then moves it
    try:
        with mock.patch("torch.cuda._lazy_init"), mock.patch("torch.cuda.mem_get_info", _memory), _Mode():
            yield _CUDA
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def _memory(device: Any = None) -> tuple[int, int]:
    """Free and all bytes of the device, whose tensors are in the host's memory."""
    host = host_memory()
    return host.free_bytes, host.total_bytes
