"""Copies of a GPU's tensors pass through two blocks of one size, whatever their shape."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda
from ziggurat.training.checkpoint import pinned

SHAPES = ((), (0, 4), (7,), (100, 3), (5, 40), (2, 3, 50))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_every_number_arrives_through_blocks_of_one_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wanted = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    started: list[int] = []
    start = pinned._Copies.start

    def counted(self: pinned._Copies, block: torch.Tensor, piece: torch.Tensor) -> object:
        started.append(block.numel() * block.element_size())
        return start(self, block, piece)

    with pretend_cuda() as cuda, mock.patch.object(pinned._Copies, "start", counted):
        source = wanted.to(cuda)
        found = pinned.to_host(source, block_bytes=64)
        turned = pinned.to_host(source.T if len(shape) == 2 else source, block_bytes=64)
    assert not isinstance(found, PretendCuda)
    assert found.is_contiguous()
    assert torch.equal(found, wanted)
    assert torch.equal(turned, wanted.T if len(shape) == 2 else wanted)
    assert max(started, default=0) <= 64
    assert bool(started) == bool(wanted.numel())


def test_tensors_of_the_host_need_no_blocks() -> None:
    with mock.patch.object(pinned, "_blocks", side_effect=AssertionError):
        assert torch.equal(pinned.to_host(torch.arange(5)), torch.arange(5))
