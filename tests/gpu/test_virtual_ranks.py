"""Ranks that are threads with tensors on one GPU: every placement, tower and wire equals one device (`make test-gpu`).

What travels goes through gloo: numbers are tested here, not NCCL, which wants a GPU for each rank.
"""

from __future__ import annotations

import pytest
import torch

from tests.parallel.parity_of_threads import cases, compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]


@pytest.mark.parametrize("name", cases(2))
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_virtual_ranks_equal_one_gpu(world_size: int, name: str) -> None:
    compare(world_size, cases(world_size)[name], device=torch.device("cuda", 0))
