"""The random numbers after a checkpoint are those that would have come without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ziggurat.errors import CheckpointError
from ziggurat.testing.pretend_cuda import pretend_cuda
from ziggurat.training.checkpoint import CheckpointStore, rng_state, set_rng_state


def test_a_resumed_run_draws_the_same_numbers(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.randn(7)  # an odd count leaves half of a pair of normal numbers inside the generator
    store = CheckpointStore(tmp_path)
    store.save(1, tensors=rng_state(), state={})
    expected = torch.randn(100)
    torch.manual_seed(4)
    set_rng_state(store.load().tensors)
    assert torch.equal(torch.randn(100), expected)


def test_states_are_tensors_on_the_host() -> None:
    for name, state in rng_state().items():
        assert state.dtype == torch.uint8, name
        assert state.device.type == "cpu"


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ({"cuda:99": torch.zeros(16, dtype=torch.uint8)}, "cuda:99"),
        ({"cpu": torch.zeros(16, dtype=torch.uint8)}, r"shape \(5056,\)"),
        ({"cpu": torch.zeros(5056)}, "float32"),
    ],
)
def test_what_is_no_state_is_refused(states: dict, told: str) -> None:
    before = rng_state()
    with pytest.raises(CheckpointError, match=told):
        set_rng_state(rng_state() | states)
    assert torch.equal(rng_state()["cpu"], before["cpu"])


def test_one_gpu_is_saved_under_a_name_that_any_gpu_has() -> None:
    with pretend_cuda() as cuda:
        before = rng_state(cuda)
        assert set(before) == {"cpu", "cuda"}
        assert set(rng_state()) == {"cpu"}
        set_rng_state(before | {"cuda": torch.ones(16, dtype=torch.uint8)}, device=cuda)
        assert rng_state(cuda)["cuda"].tolist() == [1] * 16
        with pytest.raises(CheckpointError, match="'cuda'"):
            set_rng_state(before)


@pytest.mark.gpu
def test_cuda_draws_the_same_numbers() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cuda = torch.device("cuda")
    before = rng_state(cuda)
    expected = torch.randn(100, device="cuda")
    set_rng_state(before, device=cuda)
    assert torch.equal(torch.randn(100, device="cuda"), expected)
