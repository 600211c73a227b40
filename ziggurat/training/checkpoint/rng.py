"""The state of torch's random number generators as tensors, so that a resumed run draws the same numbers.

A generator's state is a uint8 tensor (5,056 bytes of Mersenne Twister on the CPU, 16 bytes of seed and offset on
CUDA), so it goes into a checkpoint like any weight. Of several GPUs only the one that computes counts, and its number
is not in the name: a run goes on with another one, or with none. With several ranks, give each rank's state a name of
its own (`rng.rank3.cpu`): tensors of the same name count as copies of one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import UInt8
from torch import Tensor

from ziggurat.errors import CheckpointError

_CPU = torch.device("cpu")


def rng_state(device: torch.device = _CPU) -> dict[str, UInt8[Tensor, "N"]]:
    """The states of the generators that a run draws from: `cpu`, and `cuda` if it computes there. uint8, on the host.

    Args:
        device: that the run computes on. Others are left alone: to ask a GPU takes memory on it.
    """
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_rng_state(states: Mapping[str, UInt8[Tensor, "N"]], *, device: torch.device = _CPU) -> None:
    """Restore what `rng_state` returned.

    Args:
        states: by name.
        device: that the run computes on.

    Raises:
        CheckpointError: a device is not here, or a tensor is not a generator's state; nothing was restored.
    """
    known = rng_state(device)
    for name, state in states.items():
        if name not in known:
            raise _refusal(
                f"one of {sorted(known)}", f"state of {name!r}", f"leave {name!r} out, and expect other draws"
            )
        if state.dtype != torch.uint8 or state.shape != known[name].shape:
            found = f"{state.dtype}, shape {tuple(state.shape)}"
            raise _refusal(f"uint8, shape {tuple(known[name].shape)}", found, "use the torch release that saved it")
    for name, state in states.items():
        if name == "cpu":
            torch.set_rng_state(state.cpu())
        else:
            # A GPU's generator, too, takes its state from the host.
            torch.cuda.set_rng_state(state.cpu(), device=device)


def _refusal(expected: str, found: str, way_out: str) -> CheckpointError:
    return CheckpointError(expected=expected, found=found, where="random number generators", ways_out=way_out)
