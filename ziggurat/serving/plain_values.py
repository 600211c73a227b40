"""Cells of data frames as JSON has them: for examples, requests and the web page."""

from __future__ import annotations

import json
from typing import Any

import polars as pl


def plain(value: Any) -> Any:
    """A cell of a frame, or rows of cells, as JSON has it: NaN as null, dates and infinities as text."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, pl.Series):
        return [plain(each) for each in value.to_list()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return None if value != value else str(value)  # NaN is missing
    return value
