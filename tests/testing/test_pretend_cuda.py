"""The pretended GPU: what it refuses, what it notes as a wait of the host, and when copies arrive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda
from ziggurat.testing.pretend_queues import record_waits

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "write through a mask": lambda x: x.__setitem__(x > 0, x[:1].expand(2)),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long().abs()),
    "a list as an index": lambda x: x[[0, 2]],
    "indices of the host": lambda x: x[torch.tensor([0, 2])],
    "a new tensor of numbers": lambda x: torch.tensor([1.0, 2.0], device=x.device),
    "new_tensor": lambda x: x.new_tensor([1.0]),
    "a copy from pageable memory": lambda x: torch.ones(3).to(x.device, non_blocking=True),
    "a blocking copy from locked memory": lambda x: torch.ones(3).pin_memory().to(x.device),
    "copy_ to the host": lambda x: torch.zeros(4).copy_(x, non_blocking=True),
    "equal": lambda x: torch.equal(x, x),
    "synchronize": lambda x: torch.cuda.synchronize(),
}
NO_WAITS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x * 2 + 1).where(x > 0, 0.0).sum(),
    "fill through a mask": lambda x: x.__setitem__(x > 0, 1.0),
    "masked_fill": lambda x: x.masked_fill_(x > 0, 0.0),
    "sort, search, cumsum": lambda x: torch.searchsorted(x.sort()[0].cumsum(0), x),
    "repeat_interleave of known size": lambda x: x.repeat_interleave(torch.ones_like(x).long(), output_size=4),
    "a number of the host": lambda x: x * torch.tensor(2.0) + 3,
    "new memory": lambda x: torch.zeros(3, device=x.device) + torch.arange(3, device=x.device) + x.new_full((3,), 2),
    "a copy from locked memory": lambda x: torch.ones(3).pin_memory().to(x.device, non_blocking=True),
    "an event": lambda x: torch.cuda.Event().synchronize(),
}


@pytest.mark.parametrize("what", [*WAITS, *NO_WAITS])
def test_waits_are_noted_with_their_place(what: str) -> None:
    with pretend_cuda() as cuda:
        x = torch.tensor([1.0, -2.0, 3.0, 0.0], device=cuda)
        with record_waits() as waits:
            (WAITS | NO_WAITS)[what](x)
        assert len(waits) == (what in WAITS), waits
        with record_waits() as waits:
            _ = PretendCuda.tolist(x)
        assert not any(wait.where for wait in waits)  # no line of the package


def test_a_copy_arrives_when_somebody_waits_for_it() -> None:
    with pretend_cuda() as cuda:
        source, into = torch.tensor([1.0, 2.0], device=cuda), torch.empty(2, pin_memory=True)
        with record_waits() as waits:
            into.copy_(source, non_blocking=True)
            source.zero_()
            assert into.isnan().all()
            arrived = torch.cuda.Event()
            arrived.record()
            arrived.synchronize()
        assert into.tolist() == [1.0, 2.0]
        assert not waits


def test_a_weight_that_is_given_the_memory_of_a_tensor_shares_it() -> None:
    with pretend_cuda() as cuda:
        weight, rows = torch.nn.Parameter(torch.zeros(3, device=cuda)), torch.zeros(3, device=cuda)
        weight.data = rows
        rows.fill_(2.0)
        assert weight.sum().item() == 6.0
        assert weight.requires_grad
        assert not weight.data.requires_grad


def test_the_machine_has_the_same_gpu_by_both_names_that_torch_asks_it_by() -> None:
    """torch 2.14's optimizers ask `torch.accelerator`, where 2.13's asked `torch.cuda`."""
    with pretend_cuda(), record_waits() as waits:
        assert torch.accelerator.is_available()
        assert torch.accelerator.device_count() == torch.cuda.device_count() == 1
        assert torch.accelerator.current_accelerator(check_available=True) == torch.device("cuda")
        assert torch.accelerator.current_device_index() == torch.cuda.current_device()
        assert not torch.accelerator.current_stream().is_capturing()
        assert not waits
        torch.accelerator.synchronize()
        assert [wait.what for wait in waits] == ["synchronize"]


def test_a_tensor_of_the_gpu_refuses_the_memory_of_the_host() -> None:
    with pretend_cuda() as cuda:
        there = torch.zeros(2, device=cuda)
        with pytest.raises(TypeError, match="incompatible tensor type"):
            there.data = torch.zeros(2)
        assert there.new_tensor([1.0]).device == there.device
        assert there.new_tensor([1.0], device="cpu").device.type == "cpu"
