"""A machine with GPUs, without one: which device and backend are chosen, and a training step of every model on CUDA.

The step runs on tensors that pretend to be on a GPU (`ziggurat/testing/pretend_cuda.py`): operations that mix devices
raise as they would there, and the numbers are compared with the CPU's.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ziggurat.embeddings import EmbeddingConfig, KernelChoice, TableOptimizer
from ziggurat.errors import ConfigError
from ziggurat.models import MODEL_CONFIGS, DLRMConfig, ModelConfig, build_model
from ziggurat.models.contract.reads import Reads
from ziggurat.parallel.device import Device, choose_device, usable_kernel
from ziggurat.parallel.job import join_job
from ziggurat.parallel.process_groups import let_gloo_speak_first
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode

# Every model of plain rows: the inputs below have no histories and no items.
MODELS: tuple[ModelConfig, ...] = tuple(cls() for cls in MODEL_CONFIGS if cls.reads is Reads.SAMPLES)


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.kind)
def test_a_step_of_every_model_on_cuda(config: ModelConfig) -> None:
    config = dataclasses.replace(config, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))  # pyright: ignore
    if hasattr(config, "dropout"):
        config = dataclasses.replace(config, dropout=0.0)  # pyright: ignore  # devices draw other units
    inputs = small_inputs()
    batch = random_batch(inputs, 9, seed=1)
    trained = []
    for on_gpu in (False, True):
        with pretend_cuda() as cuda:
            device = cuda if on_gpu else torch.device("cpu")
            model = build_model(config, inputs, seed=0, draw_tables=False).to(device)
            model.embeddings.tables.draw(0)
            optimizer = TableOptimizer(model.embeddings)
            torch.manual_seed(1)
            logits = model(batch.to(device))
            logits.square().sum().backward()
            assert optimizer.all_finite()
            optimizer.step(0.1)
            found = [logits.detach(), *(each.grad for each in model.parameters()), *model.state_dict().values()]
            assert all(each is None or isinstance(each, PretendCuda) is on_gpu for each in found)
            trained.append([None if each is None else each.detach().cpu() for each in found])
    for one, other in zip(*trained, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_from_cuda_loads_on_the_cpu_and_back(tmp_path: Path) -> None:
    config, inputs = DLRMConfig(embedding=EmbeddingConfig(kernel=KernelChoice.TORCH)), small_inputs()
    store = CheckpointStore(tmp_path, config=CheckpointConfig(mode=SaveMode.SYNC))
    on_cpu = build_model(config, inputs, seed=5, draw_tables=False)
    with pretend_cuda() as cuda:
        trained = build_model(config, inputs, seed=0).to(cuda)
        sequence, _ = trained.embeddings.sequence(random_batch(inputs, 3, seed=1).to(cuda), inputs.jagged[0].name)
        assert isinstance(sequence, PretendCuda)
        store.save(1, tensors=trained.state_dict(), state={})
        store.load(into=on_cpu.state_dict())
        on_cpu.embeddings.tables.mark_filled()
        again = build_model(config, inputs, seed=6, draw_tables=False).to(cuda)
        store.load(into=again.state_dict())
        for name, value in trained.state_dict().items():
            assert not isinstance(on_cpu.state_dict()[name], PretendCuda)
            assert isinstance(again.state_dict()[name], PretendCuda)
            assert torch.equal(on_cpu.state_dict()[name], value.cpu()), name
            assert torch.equal(again.state_dict()[name].cpu(), value.cpu()), name


def test_mixing_devices_is_found() -> None:
    with pretend_cuda() as cuda, pytest.raises(AssertionError, match="same device"):
        _ = torch.ones(3, device=cuda) + torch.ones(3)


def gpus(count: int) -> Any:
    return mock.patch.multiple(
        "torch.cuda",
        is_available=lambda: count > 0,
        device_count=lambda: count,
        set_device=mock.DEFAULT,
        get_device_name=lambda device: f"GPU {device.index}",
    )


def test_every_rank_takes_its_gpu_and_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    with gpus(4) as patched:
        chosen = choose_device(Device.AUTO)
        assert (chosen.device, chosen.backend) == (torch.device("cuda", 2), "cpu:gloo,cuda:nccl")
        patched["set_device"].assert_called_once_with(torch.device("cuda", 2))
        assert choose_device(Device.CPU).backend == "gloo"
        monkeypatch.setenv("RANK", "2")
        monkeypatch.setenv("WORLD_SIZE", "4")
        met = iter([(dist.HashStore(), 2, 4)])
        with (
            mock.patch("torch.distributed.rendezvous", return_value=met),
            mock.patch("torch.distributed.init_process_group") as joined,
        ):
            assert join_job(backend=chosen.backend)
        assert joined.call_args.args == ("cpu:gloo,cuda:nccl",)
    with gpus(2):  # fewer than ranks
        assert choose_device(Device.AUTO).device.type == "cpu"
        with pytest.raises(ConfigError, match="2 GPU for 4 ranks"):
            choose_device(Device.CUDA)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_is_missing() -> None:
    assert choose_device().device.type == "cpu"
    with pytest.raises(ConfigError) as refused:
        choose_device(Device.CUDA)
    way_out = "torchrun" if torch.backends.cuda.is_built() else "ACCELERATOR=cuda make setup"
    for part in ("expected: a GPU", "found:", "--device cuda", "--device auto", way_out):
        assert part in str(refused.value)


def test_kernels_belong_to_machines() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert usable_kernel(KernelChoice.CPP, device=cuda) is KernelChoice.AUTO
    assert usable_kernel(KernelChoice.TORCH, device=cuda) is KernelChoice.TORCH
    assert usable_kernel(KernelChoice.TRITON, device=cpu) is KernelChoice.AUTO
    with mock.patch("ziggurat.parallel.device.is_available", return_value=False):
        assert usable_kernel(KernelChoice.FBGEMM, device=cpu) is KernelChoice.AUTO
    with mock.patch("ziggurat.parallel.device.is_available", return_value=True):
        assert usable_kernel(KernelChoice.FBGEMM, device=cpu) is KernelChoice.FBGEMM


def test_gloo_loses_patience_before_nccl() -> None:
    """NCCL's watchdog ends the process and names nobody; gloo's error names the silent rank."""
    gloo, nccl = mock.Mock(), mock.Mock()
    gloo.name.return_value, gloo.options._timeout, nccl.name.return_value = "gloo", timedelta(seconds=7), "nccl"
    group: Any = SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device("cuda")],
        _get_backend=lambda device: nccl if device.type == "cuda" else gloo,
    )
    let_gloo_speak_first(group)
    nccl._set_default_timeout.assert_called_once_with(timedelta(seconds=14))
    group._get_backend = lambda device: gloo
    let_gloo_speak_first(group)
    gloo._set_default_timeout.assert_not_called()
