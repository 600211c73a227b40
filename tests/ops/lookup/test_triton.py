"""Embedding tables by Triton: parity by its interpreter (`make test-triton`) or on a GPU, and who chooses it."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from tests.ops.lookup_problems import make_layout
from tests.ops.triton_runs import run_python
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.features.inputs import InputSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.ops.lookup import FieldKind, KernelChoice, KernelSetting, TableOptimizerKind, UpdateRule, choose
from ziggurat.ops.lookup.choose import BatchShape, choose_kernel
from ziggurat.ops.lookup.triton import TritonKernel, kernel
from ziggurat.parallel.device import usable_kernel
from ziggurat.testing.pretend_cuda import pretend_cuda

HAS_TRITON = importlib.util.find_spec("triton") is not None
CASES = ["-m", "tests.ops.lookup.triton_cases"]
LAYOUT = make_layout(dim=4, table_rows=[9], fields=[(FieldKind.SINGLE, 0)])
ON_CUDA = KernelSetting(
    layouts=(LAYOUT,),
    rule=UpdateRule(kind=TableOptimizerKind.SGD),
    dtype=torch.float32,
    device=torch.device("cuda", 0),
)
ON_CPU = dataclasses.replace(ON_CUDA, device=torch.device("cpu"))


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_kernels_equal_the_reference_under_the_interpreter() -> None:
    done = run_python(*CASES, "cpu", interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_kernels_equal_the_reference_on_a_gpu() -> None:
    done = run_python(*CASES, "cuda", interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr


def pretend_triton(monkeypatch: pytest.MonkeyPatch, *, found: str) -> None:
    """Let importing the kernels give a reason against it, or none, whatever is installed here."""
    monkeypatch.setattr(kernel, "kernels_or_reason", lambda module: (None, found))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernel, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_auto_takes_triton_on_cuda_where_it_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_triton(monkeypatch, found="")
    chosen = choose_kernel(KernelChoice.AUTO, setting=ON_CUDA, shape=BatchShape())
    assert chosen.kernel.choice is KernelChoice.TRITON
    assert "cuda" in chosen.reason
    assert chosen.launches.startswith("sm_90: measured on")
    double = dataclasses.replace(ON_CUDA, dtype=torch.float64)
    chosen = choose_kernel(KernelChoice.AUTO, setting=double, shape=BatchShape())
    assert chosen.kernel.choice is KernelChoice.TORCH
    assert "float64" in chosen.not_eligible["triton"]


def test_tables_of_triton_are_made_on_the_cpu_and_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are built on the CPU, so a kernel of GPUs is asked where tables lie when rows are looked up."""
    inputs = InputSpec(
        single=(SingleSpec(name="item", table="item"),),
        tables=(TableSpec(name="item", num_rows=9),),
        labels=(LabelSpec(name="click"),),
    )
    tables = EmbeddingTables(inputs, EmbeddingConfig(dim=4, kernel=KernelChoice.TRITON), seed=0)
    pretend_triton(monkeypatch, found="")
    with pytest.raises(ConfigError, match="runs on CUDA devices"):
        tables.choose_kernel(BatchShape())
    with pretend_cuda() as cuda:
        tables.to(cuda)
        assert tables.choose_kernel(BatchShape()).choice is KernelChoice.TRITON


def test_auto_takes_torch_on_cuda_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_triton(monkeypatch, found="no package triton")
    chosen = choose_kernel(KernelChoice.AUTO, setting=ON_CUDA, shape=BatchShape())
    assert chosen.kernel.choice is KernelChoice.TORCH
    assert chosen.not_eligible == {"triton": "no package triton"}
    with pytest.raises(MissingDependencyError, match="no package triton"):
        TritonKernel()


def test_triton_never_serves_tables_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_triton(monkeypatch, found="")
    with pytest.raises(ConfigError, match="runs on CUDA devices"):
        choose_kernel(KernelChoice.TRITON, setting=ON_CPU, shape=BatchShape())
    assert choose_kernel(KernelChoice.AUTO, setting=ON_CPU, shape=BatchShape(batch_size=4)).kernel.choice in (
        KernelChoice.CPP,
        KernelChoice.TORCH,
    )


@pytest.mark.parametrize(
    ("wanted", "device", "usable"),
    [("triton", "cpu", "auto"), ("triton", "cuda", "triton"), ("cpp", "cuda", "auto"), ("torch", "cuda", "torch")],
)
def test_a_run_that_moves_keeps_a_kernel_that_works_there(
    monkeypatch: pytest.MonkeyPatch, wanted: str, device: str, usable: str
) -> None:
    pretend_triton(monkeypatch, found="")
    assert usable_kernel(KernelChoice(wanted), device=torch.device(device)).value == usable
    assert choose.is_available(KernelChoice.TRITON)
