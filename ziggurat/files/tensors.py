"""Read files in the format safetensors; what the system refuses is an error that names the file.

safetensors lets torch map a file, and torch says "unable to open file <…>: Too many open files (24)" as a plain
`RuntimeError`, which is no `OSError` and looks like a damaged file to whoever catches that kind.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from ziggurat.errors import FileError, MissingFileError, ZigguratError
from ziggurat.files.reading import WAYS_OUT
from ziggurat.files.system_text import WAYS_OUT_OF_PROCESS, text_of

_OF_TORCH = re.compile(r"unable to (?:open|mmap|stat|read)\b.*: (?P<text>[^:]*) \((?P<number>\d+)\)", re.DOTALL)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a file, mapped from it.

    Raises:
        SafetensorError: the file is none of the format.
        MissingFileError: there is none.
        FileError: the system does not let it be read.
    """
    with _refused(path):
        return load_file(str(path))


@contextmanager
def open_tensors(path: Path, *, framework: Literal["pt", "numpy"] = "pt") -> Iterator[safe_open]:
    """Open a file for its names and single tensors.

    Args:
        path: of the file.
        framework: which tensors it gives.

    Raises:
        SafetensorError: the file is none of the format.
        MissingFileError: there is none.
        FileError: the system does not let it be read.
    """
    with _refused(path), safe_open(str(path), framework=framework) as file:
        yield file


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    expected = f"to read {path.name}"
    try:
        yield
    except ZigguratError:  # some of ours are OSErrors as well
        raise
    except OSError as problem:
        reason = _reason(path) or problem
        if isinstance(reason, FileNotFoundError):
            raise MissingFileError(
                expected=expected, found="no such file", where=str(path), ways_out=WAYS_OUT
            ) from problem
        ways_out = WAYS_OUT_OF_PROCESS.get(reason.errno or 0, WAYS_OUT)
        raise FileError(expected=expected, found=text_of(reason), where=str(path), ways_out=ways_out) from problem
    except RuntimeError as problem:
        said = _OF_TORCH.search(str(problem))
        if said is None:
            raise
        ways_out = WAYS_OUT_OF_PROCESS.get(int(said["number"]), WAYS_OUT)
        raise FileError(expected=expected, found=said["text"].strip(), where=str(path), ways_out=ways_out) from problem


def _reason(path: Path) -> OSError | None:
    """Return why a file cannot be opened: safetensors says "No such file", whatever the reason; None if it can be."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as problem:
        return problem
    return None
