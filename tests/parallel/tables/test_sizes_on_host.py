"""Ids of a batch on a GPU: how many go where is counted in the copy on the host; nobody waits for the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.parallel.test_parity import build, inputs, placed
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.tables.ids import LocalIds
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.testing import pretend_cuda as pretended
from ziggurat.testing.batches import random_batch
from ziggurat.testing.pretend_cuda import PretendCuda, pretend_cuda

_READS = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_consecutive", "equal")


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """Raise where the host would wait for a number of the GPU."""
    compute = pretended._compute

    def checked(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        first = next((each for each in args if isinstance(each, PretendCuda)), None)
        name = func.__name__.split(".")[0]
        assert first is None or name not in _READS, f"{name} of a tensor on a GPU"
        to = kwargs.get("device")
        assert first is None or to is None or torch.device(to).type == "cuda", "a copy from the GPU"
        return compute(func, args, kwargs)

    refused = mock.Mock(side_effect=AssertionError("tolist of a tensor on a GPU"))
    with mock.patch.object(pretended, "_compute", checked), mock.patch.object(PretendCuda, "tolist", refused):
        yield


def ids_of(kind: Placement, *, on_gpu: bool) -> LocalIds:
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    model = build(towers=None, optimizer="sgd").to(device)
    spread = parallelize(model, placed(1, kind), Topology.create()).spread
    batch = random_batch(inputs(), 9, seed=4).to(device)
    with no_reads():
        spread.announce(batch)
        spread.send_ids()
        return spread.take_ahead(batch)[0]


@pytest.mark.parametrize("kind", list(Placement))
def test_ids_ask_their_gpu_for_nothing(kind: Placement) -> None:
    with pretend_cuda():
        found, wanted = ids_of(kind, on_gpu=True), ids_of(kind, on_gpu=False)
        assert found.sizes == wanted.sizes
        for one, other in zip(found.batches, wanted.batches, strict=True):
            for name in ("single", "jagged.values", "jagged.offsets"):
                assert torch.equal(one.tensors()[name].cpu(), other.tensors()[name]), name


def test_a_copy_of_other_rows_is_not_asked() -> None:
    """A batch that was changed on the GPU has no copy on the host; parts of one that was not, have theirs."""
    with pretend_cuda() as cuda:
        host = random_batch(inputs(), 9, seed=4)
        batch = host.to(cuda)
        assert batch.on_host is not None
        changed = replace(batch, single=batch.single + 0)
        assert changed.on_host is None
        part = batch.rows(2, 7)
        assert part.on_host is not None
        for name, tensor in host.rows(2, 7).tensors().items():
            assert torch.equal(part.tensors()[name].cpu(), tensor), name
            assert torch.equal(part.on_host.tensors()[name], tensor), name
