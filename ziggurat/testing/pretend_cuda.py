"""pretend_cuda: tensors that say they are on a GPU and are computed on the CPU, to find what would fail on one.

On a GPU an operation that mixes devices raises, and the places that make a tensor on the CPU by mistake are found. This
does the same without a GPU: inside `pretend_cuda()` every tensor on device "cuda" is a wrapper around one on the CPU,
operations run on what is inside, and an operation that mixes both kinds raises as CUDA would. Numbers are real, so
whole runs train, with everything that looks at values. `torch.cuda` says that there is one GPU; streams and events are
there and do nothing but order.

A GPU works behind the host. Whatever makes the host wait for it (`.item()`, a mask as an index, a copy from memory that
the system may page out) costs a stall, and `record_waits` (`pretend_queues.py`) says which, and which line of the
package did it. A copy into locked memory that does not wait arrives when somebody waits for an event, and holds
nonsense before, as on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, ParamSpec, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ziggurat.ops.dispatched import OpArgs, OpKwargs
from ziggurat.ops.machine.memory import host_memory
from ziggurat.testing.pretend_graphs import CUDAGraph, Recording
from ziggurat.testing.pretend_queues import Event, Stream, note_wait, on_their_way, recordings, synchronize

P = ParamSpec("P")
T = TypeVar("T")
_CUDA = torch.device("cuda", 0)
_DEVICE_TYPES = ("cuda", "meta")  # of a pretended tensor, as is asked for and as torch sees it
_aten = torch.ops.aten
_WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive")
_WAITING += ("unique_dim_consecutive", "bincount", "histc", "equal", "is_nonzero", "argwhere")


class PretendCuda(Tensor):
    """A tensor on a GPU that is none; torch sees a tensor of the meta device."""

    host: Tensor
    # What the tensor claims. Torch's own are properties that read the meta device; those of a subclass come first.
    device = _CUDA
    is_cuda = True
    is_meta = False

    @staticmethod
    def __new__(cls, inner: Tensor) -> PretendCuda:
        """Wrap a tensor of the CPU."""
        # A sparse tensor has no strides: its wrapper looks dense, and operations run on what is inside.
        strides = inner.stride() if inner.layout is torch.strided else None
        wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=strides, dtype=inner.dtype, device=torch.device("meta")
        )
        # Operations see the meta device, which computes shapes alone; the numbers are here.
        wrapper.host = inner
        return wrapper

    @property
    def data(self) -> Tensor:
        """The numbers without their history."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        """Share the memory of another tensor of the device: torch would share its shape, and not what is inside."""
        if not isinstance(values, PretendCuda):
            # As torch words it on a GPU.
            raise TypeError("incompatible tensor type: a tensor of the GPU takes the memory of another one there")
        self.host = values.host

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """The tensor inside."""
        del tensor_contents
        return f"PretendCuda({self.host!r})"

    def tolist(self) -> list[object]:
        """Return the values as a GPU's tensor would give them."""
        note_wait("tolist")
        return self.host.tolist()

    def new_tensor(
        self,
        data: object,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> Tensor:
        """Create a tensor on this device, which torch does not know, unless another one is named."""
        return torch.tensor(
            data,
            dtype=dtype or self.dtype,
            device=_CUDA if device is None else device,
            requires_grad=requires_grad,
            pin_memory=pin_memory,
        )

    def record_stream(self, s: object) -> None:
        """Nothing: memory is given back when nobody names it."""
        del s

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused, as a GPU's tensor refuses it."""
        del force
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __getitem__(self, index: object) -> Tensor:
        """Lists as indices become tensors here: torch would make them on the device that it sees, without numbers."""
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: object, value: Tensor | float) -> None:
        """See `__getitem__`."""
        super().__setitem__(_indices(index), value)

    @classmethod
    def __torch_dispatch__(
        cls, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> object:
        """Compute on what is inside."""
        del types
        return _compute(func, args, kwargs or {})


def _indices(index: object) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index, device=_CUDA) if isinstance(index, list) else index


def _is_locked(tensor: Tensor) -> bool:
    """Return True if a tensor of the host lies in memory that is never paged out."""
    base = tensor._base if tensor._base is not None else tensor
    return getattr(base, "is_pretend_locked", False)


def _note_waits(func: OpOverload, args: OpArgs, kwargs: OpKwargs, *, on_gpu: list[PretendCuda]) -> None:
    """Record what a GPU would make the host wait for."""
    name = func.__name__.split(".")[0]
    if name in _WAITING and on_gpu:
        note_wait(name)
    if func is _aten.repeat_interleave.Tensor and on_gpu and kwargs.get("output_size") is None:
        note_wait("repeat_interleave without output_size")
    if name in ("index", "index_put_", "_index_put_impl_", "index_put") and isinstance(args[0], PretendCuda):
        indices = [each for each in args[1] if each is not None]
        fills = name != "index" and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        if not fills and any(each.dtype in (torch.bool, torch.uint8) for each in indices):
            note_wait("a mask as an index")
        if any(not isinstance(each, PretendCuda) and each.dim() for each in indices):
            note_wait("indices of the host")
    if func is _aten._to_copy.default:
        to = kwargs.get("device")
        source = args[0]
        blocks = not kwargs.get("non_blocking")
        is_to_gpu = to is not None and torch.device(to).type in _DEVICE_TYPES
        if to is not None and is_to_gpu != isinstance(source, PretendCuda) and source.numel():
            if isinstance(source, PretendCuda):
                note_wait("copy to the host")
            elif blocks or not _is_locked(source):
                note_wait("copy from the host" if blocks else "copy from memory of the host that is not locked")


def _late_copy(args: OpArgs, kwargs: OpKwargs) -> Tensor | None:
    """A copy between host and device, noted where the host waits for it; what arrives later is put on its way."""
    into = args[0]
    source = args[1]
    if isinstance(into, PretendCuda) == isinstance(source, PretendCuda):
        return None
    non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
    host = source if isinstance(into, PretendCuda) else into
    if not (non_blocking and _is_locked(host)):
        note_wait("copy from the host" if host is source else "copy to the host")
        return None
    if host is source:
        return None
    on_their_way.append((into, source.host.clone()))
    into.fill_(torch.nan if into.is_floating_point() else 1)
    return into


class _Mode(TorchDispatchMode):
    """Makes new tensors of device "cuda" pretend ones."""

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: OpArgs = (), kwargs: OpKwargs | None = None
    ) -> object:
        del types
        return _compute(func, args, kwargs or {})


def _compute(func: OpOverload, args: OpArgs, kwargs: OpKwargs) -> object:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
    on_gpu = [each for each in tensors if isinstance(each, PretendCuda)]
    assert not any(each.is_meta for each in tensors), f"{func}: a tensor without numbers"
    name = func.__name__.split(".")[0]
    to = kwargs.get("device")
    moves = func in (_aten._to_copy.default, _aten.copy_.default)
    indexes = func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default)
    others = [each for each in tensors if not isinstance(each, PretendCuda) and each.dim()]
    assert moves or indexes or not on_gpu or not others, (
        f"{func}: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
    )
    if indexes and tensors and not isinstance(tensors[0], PretendCuda):
        assert not on_gpu, f"{func}: indices should be on the device of the indexed tensor (cpu)"
    _note_waits(func, args, kwargs, on_gpu=on_gpu)
    own = OPDEFS.get(func.name().split(".")[0]) if on_gpu and func.namespace == "ziggurat" else None
    if own is not None:  # an operation of ours: what it does counts, step by step
        with _Mode():
            return own._init_fn(*args, **kwargs)
    if func is _aten.copy_.default and (late := _late_copy(args, kwargs)) is not None:
        return late
    if name in ("is_pinned", "_pin_memory", "pin_memory"):
        return _is_locked(args[0]) if name == "is_pinned" else _locked(args[0].clone())
    gives_gpu = bool(on_gpu) if to is None else torch.device(to).type in _DEVICE_TYPES
    if func is _aten.copy_.default:
        gives_gpu = isinstance(args[0], PretendCuda)
    if to is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_locked = kwargs.get("pin_memory", False)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
    args, kwargs = tree_map_only(PretendCuda, lambda each: each.host, (args, kwargs))
    result = recordings[0].computed(func, args, kwargs) if recordings else func(*args, **kwargs)
    if result is None:  # operations on lists of tensors
        return None
    if name.endswith("_") and (not name.startswith("__") or name.startswith("__i")):  # in place: add_, __irshift__
        return tensors[0] if tensors else result
    if not gives_gpu:
        return _locked(result) if is_locked and isinstance(result, Tensor) else result
    return tree_map_only(Tensor, lambda each: each if isinstance(each, PretendCuda) else PretendCuda(each), result)


def _locked(tensor: Tensor) -> Tensor:
    setattr(tensor, "is_pretend_locked", True)  # noqa: B010  # torch declares no such attribute
    return tensor


def _grouped(
    tensorlists: list[list[Tensor | None]], with_indices: bool = False
) -> dict[tuple[torch.device | None, torch.dtype | None], tuple[list[list[Tensor | None]], list[int]]]:
    """Group weights as torch's optimizers do, with the device that the weights claim to be on."""
    found = _group(tensorlists, with_indices)
    meta = torch.device("meta")
    return {(_CUDA if device == meta else device, dtype): each for (device, dtype), each in found.items()}


def _submit_inside(pool: ThreadPoolExecutor, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Work of a thread, with the device that there is inside: modes hold for one thread."""

    def inside() -> T:
        with _Mode():
            return fn(*args, **kwargs)

    return _submit(pool, inside)


_submit, _group = ThreadPoolExecutor.submit, torch.optim.Optimizer._group_tensors_by_device_and_dtype


@contextlib.contextmanager
def pretend_cuda() -> Iterator[torch.device]:
    """The device that there is inside."""
    before = torch._C._only_lift_cpu_tensors()
    state = {"rng": torch.zeros(16, dtype=torch.uint8)}
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") makes a tensor here, then moves it
    machine = mock.patch.multiple(
        "torch.cuda",
        _lazy_init=lambda: None,
        mem_get_info=_memory,
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        get_device_name=lambda device=None: "a pretended GPU",
        get_device_capability=lambda device=None: (9, 0),
        is_current_stream_capturing=lambda: bool(recordings),
        CUDAGraph=CUDAGraph,
        graph=Recording,
        memory_reserved=lambda device=None: 0,
        memory_allocated=lambda device=None: 0,
        max_memory_allocated=lambda device=None: 0,
        reset_peak_memory_stats=lambda device=None: None,
        synchronize=synchronize,
        Stream=Stream,
        Event=Event,
        stream=lambda stream: stream or Stream(),
        current_stream=lambda device=None: Stream(),
        default_stream=lambda device=None: Stream(),
        get_rng_state=lambda device=None: state["rng"].clone(),
        get_rng_state_all=lambda: [state["rng"].clone()],
        set_rng_state=lambda given, device=None: state.update(rng=given.clone()),
        manual_seed_all=lambda seed: None,
    )
    # The same machine by its other name: torch 2.14 asks here where 2.13 asked `torch.cuda` (optimizers, in each step).
    accelerator = mock.patch.multiple(
        "torch.accelerator",
        is_available=lambda: True,
        device_count=lambda: 1,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        current_device_index=lambda: 0,
        current_stream=lambda device=None: Stream(),
        synchronize=lambda device=None: synchronize(),
    )
    no_kernels = (None, "tensors pretend to be on a GPU")
    kernels = mock.patch("ziggurat.ops.kernel_choice._imported", return_value=no_kernels)
    threads = mock.patch.object(ThreadPoolExecutor, "submit", _submit_inside)
    optimizers = mock.patch.object(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(_grouped))
    built = mock.patch("torch.backends.cuda.is_built", return_value=True)
    try:
        with machine, accelerator, kernels, optimizers, threads, built, _Mode():
            yield _CUDA
    finally:
        on_their_way.clear()
        recordings.clear()
        torch._C._set_only_lift_cpu_tensors(before)


def _memory(device: object = None) -> tuple[int, int]:
    """Free and all bytes of the device, whose tensors are in the host's memory."""
    return (host := host_memory()).free_bytes, host.total_bytes
