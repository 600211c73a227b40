"""Ziggurat: topology-aware recommendation models in PyTorch. `__init__.pyi` beside this file lists the public API.

Names load on first use, so that `import ziggurat` and `ziggurat --help` do not wait for torch.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

__version__ = "0.1.0"


def _homes_of_names() -> dict[str, str]:
    """Return the module of each public name, from the lines `from MODULE import NAME as NAME` of the stub."""
    with open(os.path.join(__path__[0], "__init__.pyi"), encoding="utf-8") as stub:
        imports = [line.split() for line in stub if line.startswith("from ")]
    return {words[3]: words[1] for words in imports}


_HOME_OF = _homes_of_names()
__all__ = [*_HOME_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ziggurat' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return [*_HOME_OF, "__version__"]
