"""Cells of data frames as JSON has them: for examples, requests and the web page."""

from __future__ import annotations

import math
from decimal import Decimal

import polars as pl

from ziggurat.plain import JSON


def shortest_text(value: Decimal) -> str:
    """A Decimal without the zeros that only its type adds: 1.50 is "1.5", as the id that it is in a file."""
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def plain(value: object) -> JSON:
    """A cell of a frame, or rows of cells, as JSON has it: NaN as null, dates and infinities as text."""
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, pl.Series):
        return [plain(each) for each in value.to_list()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, Decimal):
        return shortest_text(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return None if value != value else str(value)  # NaN is missing
