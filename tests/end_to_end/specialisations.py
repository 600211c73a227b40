"""Compile every kernel of Triton's that the recipes ask for, by the calls that launch it; for a GPU that is not there.

    python -m tests.end_to_end.specialisations ARCHITECTURE [RECIPE …]        90 is sm_90

What a launch compiles is decided by far more than a test can write down: widths of tables and of heads, dtypes, lists,
what of a step lies on the device, and which addresses and strides are multiples of 16. So nothing is written down here.
Each recipe trains two steps and is evaluated on its made rows, on tensors that pretend to be on a GPU, in FP32 and in
BF16; launches compile and do nothing:

    autocast       casts what goes into products, as torch does on tensors that it knows to be on a GPU
    new memory     is full of zeros instead of what lay there, so that what no kernel writes is finite
    measurements   run every candidate of Triton's once, and Triton wins
    a step graph   is made where the recipe's model can be recorded

A kernel that does not compile ends the recipe with the compiler's error, as it would on a GPU. One line a recipe says
which kernels it asked for and how many of its specialisations nobody before it had asked for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.end_to_end.recipe_rows import with_rows
from tests.ops.compiled_launches import compiled_only
from ziggurat.embeddings import KernelChoice
from ziggurat.ops import kernel_choice
from ziggurat.ops.machine.measured_choice import Answer
from ziggurat.parallel.device import Device
from ziggurat.recipes.catalogue import RECIPES
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.execute import train_run
from ziggurat.testing.pretend_cuda import PretendCuda, _compute, pretend_cuda
from ziggurat.training.config import Precision

BATCH_SIZE = 64
_aten = torch.ops.aten
_ZEROS = {
    _aten.empty.memory_format: _aten.zeros.default,
    _aten.new_empty.default: _aten.new_zeros.default,
    _aten.empty_like.default: _aten.zeros_like.default,
}
_HALF = (torch.float32, torch.bfloat16, torch.float16)
_LOWER = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum", "conv1d"}
_FP32 = {"layer_norm", "rms_norm", "softmax", "log_softmax", "cross_entropy", "exp", "log", "pow", "norm", "cumsum"}
_SHARED_BYTES = 227 * 1024  # that a program may have on Hopper and Blackwell
_TIMED = (
    "ziggurat.ops.gated_norm",
    "ziggurat.ops.interactions.cross",
    "ziggurat.ops.interactions.dot_interaction",
    "ziggurat.ops.interactions.dot_triton",
    "ziggurat.ops.interactions.fm_norm",
)


def computed_on_zeros(func: Any, args: Any, kwargs: Any) -> object:
    """Compute as a pretended GPU does, on new memory that is full of zeros."""
    # A schema is checked by a model whose shapes alone are looked at: no tensor of it has numbers.
    if any(isinstance(each, Tensor) and each.is_meta for each in tree_leaves((args, kwargs))):
        return func(*args, **kwargs)
    if func is _aten.empty_strided.default:
        found = _compute(func, args, kwargs)
        assert isinstance(found, Tensor)
        return found if found.is_meta else found.zero_()
    if func is _aten.empty.memory_format:
        kwargs = {name: value for name, value in kwargs.items() if name != "memory_format"}
    return _compute(_ZEROS.get(func, func), args, kwargs)


class Autocast(TorchFunctionMode):
    """Cast as torch does under autocast on a GPU, which it does not know these tensors to be on."""

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Cast what goes into products to the lower dtype, and what goes into norms and sums back to FP32."""
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is torch.Tensor.backward:  # what it computes again is under an autocast of its own
            (loss,) = args
            upstream = kwargs["gradient"]
            upstream = torch.ones_like(loss) if upstream is None else upstream
            again = bool(kwargs["create_graph"])
            with self:
                return _engine_run_backward(
                    (loss,), (upstream,), again, again, (), allow_unreachable=True, accumulate_grad=True
                )
        if name in _LOWER | _FP32 and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda") if name in _LOWER else torch.float32

            def cast(each: Tensor) -> Tensor:
                return each.to(dtype) if each.is_cuda and each.dtype in _HALF else each

            args, kwargs = tree_map_only(PretendCuda, cast, (args, kwargs))
        return func(*args, **kwargs)


class HostGenerator(torch.Generator):
    """A generator of the CPU, on whatever device it is asked for."""

    def __new__(cls, device: torch.device | str = "cpu") -> HostGenerator:
        """Make one of the CPU."""
        del device
        return super().__new__(cls)


def all_of_triton(_what: str, contestants: Mapping[str, Callable[[], object]], **_: object) -> Answer:
    """Run every contestant but torch once; the last of them wins."""
    names = [name for name in contestants if name != "torch"]
    for name in names:
        contestants[name]()
    return Answer(name=names[-1], times_ms={}, reason="nothing is timed")


@contextlib.contextmanager
def gpu_that_compiles(architecture: int) -> Iterator[None]:
    """Pretend that there is a GPU, whose kernels can be imported."""
    imported = kernel_choice._imported
    facts = SimpleNamespace(
        name="a pretended GPU",
        major=architecture // 10,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_block_optin=_SHARED_BYTES,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(pretend_cuda())
        stack.enter_context(mock.patch("ziggurat.ops.kernel_choice._imported", imported))
        stack.enter_context(mock.patch.object(PretendCuda, "data_ptr", lambda self: self.host.data_ptr(), create=True))
        stack.enter_context(mock.patch("torch.Generator", HostGenerator))
        stack.enter_context(
            mock.patch.multiple(
                "torch.cuda",
                get_device_capability=lambda device=None: (architecture // 10, 0),
                get_device_properties=lambda device=None: facts,
            )
        )
        stack.enter_context(mock.patch("ziggurat.testing.pretend_cuda._compute", computed_on_zeros))
        for module in _TIMED:
            stack.enter_context(mock.patch(f"{module}.fastest", all_of_triton))
        stack.enter_context(Autocast())
        yield


def prepared(name: str, precision: Precision, *, folder: Path) -> RunConfig:
    """A recipe on its made rows, whose tables are Triton's."""
    config = with_rows(name, folder=folder)
    loader = dataclasses.replace(config.training.loader, batch_size=BATCH_SIZE, prefetch=0)
    training = dataclasses.replace(config.training, precision=precision, threads=1, loader=loader, max_steps=2)
    embedding = dataclasses.replace(config.model.embedding, kernel=KernelChoice.TRITON)
    model = dataclasses.replace(config.model, embedding=embedding)
    if hasattr(model, "negatives_block"):
        model = dataclasses.replace(model, negatives_block=BATCH_SIZE)
    return dataclasses.replace(config, training=training, model=model, device=Device.CUDA)


def main(architecture: int, names: list[str]) -> None:
    """Compile what recipes ask for; all of them unless some are named."""
    known = [recipe.__name__ for recipe in RECIPES]
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as text, compiled_only(architecture) as asked:
        folder = Path(text)
        for name in names or known:
            for precision in (Precision.FP32, Precision.BF16):
                start = time.perf_counter()
                before = asked.total
                asked.launches.clear()
                config = prepared(name, precision, folder=folder)
                try:
                    with gpu_that_compiles(architecture):
                        train_run(config, folder=folder / f"{name}-{precision}")
                    assert asked.launches, "no kernel was launched"
                except Exception:  # the others are compiled all the same
                    failed.append(f"{name} {precision}")
                    traceback.print_exc()
                print(
                    f"{name} {precision}: {asked.total - before} new, {time.perf_counter() - start:.0f} s, "
                    f"{', '.join(sorted(asked.launches))}",
                    flush=True,
                )
    for kernel, found in sorted(asked.kernels.items()):
        print(f"{kernel}: {len(found)}")
    print(f"sm_{architecture}: {asked.total} specialisations")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
