"""Safetensors files whose tensors all begin at multiples of 64 bytes, so that kernels take them where they are mapped.

The usual writer aligns to eight bytes or less, and a tensor that a kernel cannot take must be copied: then each process
has an index of its own. Here the header ends at a multiple of 64, and between tensors lie small ones of zeros, called
`padding.N`, since the format allows no gaps. Any reader of the format reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ziggurat.files.tensors import load_tensors

ALIGNMENT = 64
_PADDING = "padding."
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def save_aligned(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors into a file.

    Args:
        tensors: by name; on the CPU.
        path: the file.
    """
    header: dict[str, object] = {}
    parts: list[Tensor] = []
    end = 0

    def append(name: str, tensor: Tensor) -> None:
        nonlocal end
        offsets = [end, end + tensor.nbytes]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        parts.append(tensor)
        end = offsets[1]

    for name, tensor in tensors.items():
        if rest := end % ALIGNMENT:
            append(f"{_PADDING}{len(parts)}", torch.zeros(ALIGNMENT - rest, dtype=torch.uint8))
        append(name, tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    # The format begins with 8 bytes that hold the length of the header.
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in parts:
            file.write(_flat(tensor).view(torch.uint8).numpy().data)


def load_aligned(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, mapped from it; copies of those that another writer put at odd places.

    Raises:
        SafetensorError: the file is none of the format.
    """
    tensors = {name: each for name, each in load_tensors(path).items() if not name.startswith(_PADDING)}
    return {name: each if each.data_ptr() % ALIGNMENT == 0 else each.clone() for name, each in tensors.items()}


def _flat(tensor: Tensor) -> Tensor:
    """All numbers side by side. One number or none may have any stride, and then is no view of bytes."""
    flat = tensor.contiguous().reshape(-1)
    return flat if flat.numel() > 1 else flat.new_empty(flat.numel()).copy_(flat)
