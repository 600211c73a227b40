"""From a column of items to the tensors of an attribute: the sets that `attribute_index` describes.

A million items with ten attributes take a few seconds: every step is a sort, a count or a pass over arrays.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import polars as pl
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from ziggurat.ops.bitmask import num_words, pack_mask
from ziggurat.retrieval.filters.attribute_index import AttributeIndex, Stored
from ziggurat.retrieval.filters.bloom import planes_of, width_for
from ziggurat.retrieval.filters.schema import Attribute, AttributeKind
from ziggurat.typed import Count, CountOrNone, Range, checked

BUCKETS = 255  # the byte above them is for items without a value
MISSING_BYTE = 255


class Tail(enum.StrEnum):
    """The way to keep the values of an attribute with many different texts, apart from the frequent ones."""

    LISTS = "lists"  # the items of each value
    BLOOM = "bloom"  # planes that say "no" or "perhaps", and the code of each item


@dataclass(frozen=True, kw_only=True)
@checked
class FilterConfig:
    """Settings for building a filter index.

    Args:
        attributes: columns of the items that filters can use; every column that can be used, if none is named.
        most_planes: an attribute with at most so many different values gets a plane for each; others get one for each
            value that more than one in so many items has.
        tail: how the other texts of an attribute are found; lists are smaller and faster on a CPU.
        bloom_hashes: planes that a value sets.
        bloom_rate: false positives that the number of planes is chosen for.
        cached: filters that are kept parsed, and kept ready to run.
    """

    attributes: tuple[str, ...] = ()
    most_planes: CountOrNone = 64
    tail: Tail = Tail.LISTS
    bloom_hashes: Annotated[int, Range(1, 8, "more planes of a value than pay")] = 3
    bloom_rate: Annotated[float, Range(1e-9, 0.5)] = 0.0005
    cached: Count = 1024


class Planes:
    """Planes while they are collected.

    Args:
        n: number of items.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._words: list[Tensor] = []

    @property
    def next(self) -> int:
        """The number that the next plane gets."""
        return len(self._words)

    def add(self, flags: Bool[np.ndarray, "N"]) -> int:
        """Add a plane; returns its number."""
        self._words.append(pack_mask(torch.from_numpy(flags)))
        return len(self._words) - 1

    def add_rows(self, rows: Int64[np.ndarray, "R"]) -> int:
        """Add the plane of some items; returns its number."""
        flags = np.zeros(self._n, dtype=np.bool_)
        flags[rows] = True
        return self.add(flags)

    def stacked(self) -> Int64[Tensor, "P W"]:
        """All planes, one below the other."""
        # stack() of nothing knows no width.
        if not self._words:
            return torch.zeros(0, num_words(self._n), dtype=torch.int64)
        return torch.stack(self._words)


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """The values of a column: entry i says that item `rows[i]` has value `codes[i]`; ascending by item and code."""

    codes: Int64[np.ndarray, "E"]
    rows: Int64[np.ndarray, "E"]
    present: Bool[np.ndarray, "N"]
    values: np.ndarray | pl.Series  # the different values, ascending

    @property
    def num_values(self) -> int:
        return len(self.values)


def index_attribute(column: pl.Series, *, attribute: Attribute, planes: Planes, config: FilterConfig) -> AttributeIndex:
    """Make the sets of one column.

    Args:
        column: texts or numbers, in the order of positions; lists if items can have several.
        attribute: its name and kind.
        planes: where its planes go.
        config: how it is built.
    """
    n = len(column)
    entries = _entries_of(column, attribute)
    counts = np.bincount(entries.codes, minlength=entries.num_values)
    tensors = _value_tensors(entries) | {"offsets": _small(np.concatenate([[0], counts.cumsum()]))}
    # A plane that is true of every item would be read for nothing.
    present = -1 if entries.present.all() else planes.add(entries.present)
    planed = _planed(counts, attribute, n=n, config=config)
    tensors["planed"] = torch.from_numpy(planed)
    rows_by_value = np.sort(entries.codes * n + entries.rows) % max(n, 1)  # half the time of a stable argsort
    first_plane = planes.next
    starts = np.concatenate([[0], counts.cumsum()])
    for code in planed:
        planes.add_rows(rows_by_value[starts[code] : starts[code + 1]])
    bloom: dict[str, int] = {}
    has_bytes = not attribute.many and (attribute.kind.is_ordered or len(planed) < entries.num_values <= BUCKETS)
    if has_bytes:
        tensors |= _bytes(entries, counts, n=n)
    if len(planed) < entries.num_values and not (has_bytes and entries.num_values <= BUCKETS):
        if attribute.kind.is_ordered or config.tail is Tail.LISTS:
            tensors["rows"] = torch.from_numpy(rows_by_value.astype(np.int32))
        else:
            tail, bloom = _bloom(entries, planed, attribute=attribute, planes=planes, config=config)
            tensors |= tail
    stored = Stored(
        attribute=attribute,
        num_values=entries.num_values,
        num_present=int(entries.present.sum()),
        present=present,
        first_plane=first_plane,
        **bloom,
    )
    return AttributeIndex(stored, n=n, tensors=tensors)


def _entries_of(column: pl.Series, attribute: Attribute) -> _Entries:
    if attribute.many:
        present = column.is_not_null().to_numpy()
        column = column.list.drop_nulls()
        lengths = column.list.len().fill_null(0).to_numpy()
        rows = np.repeat(np.arange(len(column)), lengths)
        # Empty lists would explode to a null each, which is no value.
        column = column.filter(lengths > 0).explode()
    else:
        if column.dtype == pl.Float64:
            # NaN is no number that a filter could name: the item has no value.
            column = column.fill_nan(None)
        present = column.is_not_null().to_numpy()
        rows = present.nonzero()[0]
        column = column.drop_nulls()
    if attribute.many and column.dtype == pl.Float64:
        is_number = ~column.is_nan().to_numpy()
        rows = rows[is_number]
        column = column.filter(is_number)
    if attribute.kind.is_ordered:
        values, codes = np.unique(column.to_numpy(), return_inverse=True)
    else:
        texts = column.cast(pl.String)
        # Both, whatever occurs, so that a filter by the other one finds nothing instead of being refused.
        values = pl.Series(["false", "true"]) if attribute.kind is AttributeKind.BOOLEAN else texts.unique().sort()
        codes = texts.cast(pl.Enum(values)).to_physical().to_numpy() if len(texts) else np.zeros(0)
    codes = codes.astype(np.int64)
    if attribute.many and len(codes):  # a value that an item has twice counts once
        pairs = np.sort(rows * len(values) + codes)
        rows, codes = np.divmod(pairs[np.diff(pairs, prepend=-1) > 0], len(values))
    return _Entries(codes=codes, rows=rows.astype(np.int64), present=present, values=values)


def _value_tensors(entries: _Entries) -> dict[str, Tensor]:
    if isinstance(entries.values, np.ndarray):
        return {"numbers": torch.from_numpy(entries.values.copy())}
    text = np.frombuffer("".join(entries.values.to_list()).encode(), dtype=np.uint8)
    lengths = entries.values.str.len_bytes().to_numpy()
    return {
        # A view of bytes is read-only, which tensors cannot be.
        "text": torch.from_numpy(text.copy()),
        "text_offsets": _small(np.concatenate([[0], lengths.astype(np.int64).cumsum()])),
    }


def _planed(
    counts: Int64[np.ndarray, "V"], attribute: Attribute, *, n: int, config: FilterConfig
) -> Int64[np.ndarray, "F"]:
    """The codes that get a plane."""
    if len(counts) <= config.most_planes:
        return np.arange(len(counts))
    if attribute.kind.is_ordered or config.most_planes == 0:
        return np.zeros(0, dtype=np.int64)
    # Values of more than n / `most_planes` items: where items have one value each, these are fewer than that.
    return (counts * config.most_planes > n).nonzero()[0]


def _bytes(entries: _Entries, counts: Int64[np.ndarray, "V"], *, n: int) -> dict[str, Tensor]:
    """One byte an item: the bucket of its value."""
    bounds = _buckets(counts)
    bucket_of_code = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)).astype(np.uint8)
    codes = np.full(n, MISSING_BYTE, dtype=np.uint8)
    codes[entries.rows] = bucket_of_code[entries.codes]
    return {"codes": torch.from_numpy(codes), "buckets": torch.from_numpy(bounds)}


def _buckets(counts: Int64[np.ndarray, "V"]) -> Int64[np.ndarray, "B+1"]:
    """The first code of each bucket, and the number of codes: a value each, or at most 2/255 of the items each."""
    if len(counts) <= BUCKETS:
        return np.arange(len(counts) + 1)
    before = np.concatenate([[0], counts.cumsum()])
    most = -(-2 * before[-1] // (BUCKETS - 1))  # two neighbours hold more, so there are at most 255
    bounds = [0]
    while bounds[-1] < len(counts):
        stop = int(np.searchsorted(before, before[bounds[-1]] + most, side="right")) - 1
        # A value with more items than that gets a bucket of its own.
        bounds.append(max(stop, bounds[-1] + 1))
    assert len(bounds) <= BUCKETS + 1
    return np.array(bounds)


def _bloom(
    entries: _Entries, planed: Int64[np.ndarray, "F"], *, attribute: Attribute, planes: Planes, config: FilterConfig
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The Bloom planes of the values that have no plane of their own, and the codes that tell for sure."""
    n = len(entries.present)
    has_plane = np.zeros(entries.num_values, dtype=np.bool_)
    has_plane[planed] = True
    in_tail = ~has_plane[entries.codes]
    codes = entries.codes[in_tail]
    rows = entries.rows[in_tail]
    lengths = np.bincount(rows, minlength=n)
    width = width_for(np.bincount(lengths), hashes=config.bloom_hashes, rate=config.bloom_rate)
    chosen = planes_of(np.arange(entries.num_values), width=width, hashes=config.bloom_hashes)[codes]
    first = planes.next
    holders = np.sort((chosen * n + rows[:, None]).reshape(-1))
    stops = np.searchsorted(holders, np.arange(width + 1) * n)
    for plane in range(width):
        planes.add_rows(holders[stops[plane] : stops[plane + 1]] - plane * n)
    if attribute.many:
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        tensors = {"item_codes": codes.astype(np.int32), "item_offsets": offsets}
    else:
        item_codes = np.full(n, -1, dtype=np.int32)
        item_codes[rows] = codes
        tensors = {"item_codes": item_codes}
    numbers = {"bloom_first": first, "bloom_width": width, "bloom_hashes": config.bloom_hashes}
    return {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}, numbers


def _small(numbers: Int64[np.ndarray, "N"]) -> Tensor:
    """Ascending numbers in 32 bits, if they fit."""
    return torch.from_numpy(numbers.astype(np.int32 if numbers[-1] < 1 << 31 else np.int64))
