"""A slow, obvious twin of Preprocessing: Python values, dicts and loops. It defines what the fast one must do."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import Any

import numpy as np

from ziggurat.features.hashing import hash_ids
from ziggurat.features.schema import (
    Dense,
    Encoding,
    MultiHot,
    NumericTransform,
    OutOfRange,
    Schema,
    Sequence,
    Vector,
    column_of,
    table_of,
)

Row = dict[str, Any]


def canonical(value: Any) -> str | None:
    """The canonical text of an id."""
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    text = str(value)
    if text in ("True", "False"):
        return text.lower()
    if re.fullmatch(r"-?[0-9]+\.0", text):
        return "0" if text == "-0.0" else text[:-2]
    return text


def number(value: Any) -> float:
    """A raw number; NaN where missing."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return math.nan
    return float(value)


def elements(feature: MultiHot | Sequence, value: Any) -> list[str | None]:
    """The canonical texts of a list, cut to its length."""
    if value is None or value == "":
        return []
    raw = value.split(feature.separator) if isinstance(value, str) else list(value)
    texts = [canonical(item) for item in raw]
    return texts[-feature.max_length :] if isinstance(feature, Sequence) else texts[: feature.max_length]


def bucket(value: float) -> str | None:
    """Criteo's bucket of a number, as an id."""
    if math.isnan(value):
        return None
    return str(math.floor(math.log(value) ** 2) if value > 2 else int(value))


class Reference:
    """Fits on rows and encodes rows."""

    def __init__(self, schema: Schema, rows: list[Row]) -> None:
        self.schema = schema
        counts: dict[str, Counter[str]] = {}
        for feature in schema.features:
            table = table_of(feature)
            if table and schema.table(table).encoding is Encoding.VOCABULARY:
                counter = counts.setdefault(table, Counter())
                counter.update(text for row in rows for text in self._texts(feature, row) if text is not None)
        self.vocabularies: dict[str, dict[str, int]] = {}
        for name, counter in counts.items():
            table = schema.table(name)
            kept = [(text, count) for text, count in counter.items() if count >= table.min_count]
            kept.sort(key=lambda item: (-item[1], item[0].encode()))
            kept = kept[: table.max_rows] if table.max_rows else kept
            self.vocabularies[name] = {text: index + 3 for index, (text, _) in enumerate(kept)}
        self.moments: dict[str, tuple[float, float]] = {}
        for feature in schema.features:
            if isinstance(feature, Dense):
                values = np.array([self._prepared(feature, row) for row in rows])
                sd = float(values.std()) if len(values) else 0.0
                mean = float(values.mean()) if len(values) else 0.0
                self.moments[feature.name] = (mean, sd if sd > 1e-12 * max(abs(mean), 1e-300) else 1.0)

    def encode(self, row: Row) -> dict[str, Any]:
        """One row, encoded."""
        out: dict[str, Any] = {}
        for feature in self.schema.features:
            if isinstance(feature, Dense) and not feature.transform.makes_rows:
                value = self._prepared(feature, row)
                if feature.transform in (NumericTransform.STANDARDISE, NumericTransform.LOG1P_STANDARDISE):
                    mean, sd = self.moments[feature.name]
                    value = (value - mean) / sd
                largest = float(np.finfo(np.float32).max)
                out[feature.name] = max(-largest, min(largest, value))  # a tiny sd may throw a value out of float32
            elif isinstance(feature, Vector):
                given = row[column_of(feature)]
                out[feature.name] = [0.0] * feature.dim if given is None else list(given)
            else:
                rows = [self._row(table_of(feature), text) for text in self._texts(feature, row)]
                out[feature.name] = rows if isinstance(feature, MultiHot | Sequence) else rows[0]
        return out

    def _texts(self, feature: Any, row: Row) -> list[str | None]:
        value = row[column_of(feature)]
        if isinstance(feature, MultiHot | Sequence):
            return elements(feature, value)
        return [bucket(number(value))] if isinstance(feature, Dense) else [canonical(value)]

    def _prepared(self, feature: Dense, row: Row) -> float:
        value = number(row[column_of(feature)])
        value = feature.missing if math.isnan(value) else value
        if feature.transform in (NumericTransform.LOG1P, NumericTransform.LOG1P_STANDARDISE):
            value = math.copysign(math.log1p(abs(value)), value)
        return value

    def _row(self, table_name: str, text: str | None) -> int:
        table = self.schema.table(table_name)
        if text is None:
            return 2
        if table.encoding is Encoding.VOCABULARY:
            return self.vocabularies[table_name].get(text, 1)
        if table.encoding is Encoding.HASHING:
            return 3 + int(hash_ids(np.array([text], dtype=object))[0]) % table.num_rows
        value = int(text)
        if 0 <= value < table.num_rows:
            return 3 + value
        assert table.out_of_range is not OutOfRange.ERROR
        if table.out_of_range is OutOfRange.UNKNOWN:
            return 1
        return 3 + min(max(value, 0), table.num_rows - 1)
