"""Types of what torch hands to a `__torch_dispatch__`: an operation, and arguments that its schema alone describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OpArgs = Sequence[Any]
OpKwargs = dict[str, Any]
