"""Which device a run computes on, and what follows from it: the backend between ranks, and the GPU of each rank.

    --device auto    a GPU for every rank of this host: CUDA; otherwise the CPU
    --device cuda    CUDA, or an error that says what is missing
    --device cpu     the CPU, whatever else is there

Ranks on GPUs exchange tensors through NCCL, and what stays on the host (agreements, counts) through gloo.

The device belongs to the machine and not to the run: checkpoints hold tensors by name, so that a run which was trained
on GPUs is loaded on a CPU and the other way, and a lookup kernel that a device lacks gives way to another.
Under torchrun, rank l of a host takes its GPU number l (`LOCAL_RANK`), before anything is allocated there.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

import torch

from ziggurat.errors import ConfigError
from ziggurat.ops.lookup import KernelChoice
from ziggurat.ops.lookup.choose import is_available


class Device(StrEnum):
    """The kind of device that a run computes on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"

    @staticmethod
    def other_words() -> dict[str, str]:
        """Return what else members are called, for ways out: the nearest word by its letters would be cpu."""
        return {"gpu": "cuda", "nvidia": "cuda"}


@dataclass(frozen=True, kw_only=True)
class ChosenDevice:
    """A device of this machine, and why.

    Args:
        device: of this rank.
        reason: for the start-up report.
    """

    device: torch.device
    reason: str

    @property
    def backend(self) -> str:
        """The backend of ranks on such devices: NCCL for tensors on GPUs, gloo for those on the host."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    def describe(self) -> str:
        """One line for start-up reports."""
        return f"{self.device} ({self.reason})"


def device_of_finished_run(wanted: Device) -> Device:
    """Return the device that a finished run is loaded on: a GPU where there is one, unless the run asked for the CPU.

    Args:
        wanted: what the run asked for when it was trained, maybe on another machine.
    """
    return Device.CPU if wanted is Device.CPU else Device.AUTO


def choose_device(wanted: Device = Device.AUTO) -> ChosenDevice:
    """The device of this rank; a GPU becomes torch's current one.

    Args:
        wanted: what the run asks for.

    Raises:
        ConfigError: CUDA was asked for, and there is no GPU for every rank of this host.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    missing = _missing(max(local_ranks, local_rank + 1))
    if wanted is Device.CPU:
        return ChosenDevice(device=torch.device("cpu"), reason="as configured")
    if missing and wanted is Device.CUDA:
        builds = "ACCELERATOR=cuda make setup installs the builds of torch and its kernels for GPUs"
        fewer = "torchrun --nproc-per-node with no more ranks than GPUs"
        raise ConfigError(
            expected=f"a GPU for each of {local_ranks} ranks on this host",
            found=missing,
            where="--device cuda",
            ways_out=(
                "--device auto takes the CPU where there is no GPU",
                fewer if torch.backends.cuda.is_built() else builds,
                "ziggurat doctor shows the devices of this machine",
            ),
        )
    if missing:
        return ChosenDevice(device=torch.device("cpu"), reason=missing)
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return ChosenDevice(device=device, reason=torch.cuda.get_device_name(device))


def usable_kernel(wanted: KernelChoice, *, device: torch.device) -> KernelChoice:
    """The kernel that a run names if it works here, else `auto`: kernels belong to machines, runs move between them."""
    if wanted in (KernelChoice.AUTO, KernelChoice.TORCH):
        return wanted
    is_for_device = (wanted is KernelChoice.TRITON) == (device.type != "cpu")
    return wanted if is_for_device and is_available(wanted) else KernelChoice.AUTO


def _missing(num_ranks: int) -> str:
    """Say why this host's ranks cannot each have a GPU, or return "" if they can."""
    if not torch.backends.cuda.is_built():
        return "torch was built without CUDA"
    if not torch.cuda.is_available():
        return "no GPU"
    count = torch.cuda.device_count()
    return "" if count >= num_ranks else f"{count} GPU for {num_ranks} ranks on this host"
