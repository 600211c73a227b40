"""to_device: numbers that the host has made reach a GPU without the host waiting for the copy.

A copy from memory that the system may page out first empties the GPU's queue. From locked memory it is one entry of the
queue like a kernel; torch keeps the memory until the copy is done. Meant for what a step draws or counts by itself;
batches travel packed (`features/batches/packed.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """The same numbers on a device.

    Args:
        numbers: in host memory, or there already.
        device: any.
    """
    if device.type != "cuda" or numbers.device.type != "cpu":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
