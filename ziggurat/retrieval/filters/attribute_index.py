"""One attribute of all items, stored so that a predicate becomes a few sets of `ziggurat.ops.mask_program`.

The different values are numbered in ascending order (*codes*). What is kept depends on how many there are:

    values   kind        kept
    ≤ 64     any         a plane for every value; numbers also as one byte an item
    ≤ 255    one each    one byte an item: the code
    more     numbers     one byte an item: one of at most 255 *buckets* of neighbouring values with about as many items
                         each; and the items in the order of their values. A range is a range of buckets, and the items
                         of the two buckets that it cuts
    more     texts       the items in the order of their values (`tail=lists`), or Bloom planes and the code of each
                         item (`tail=bloom`). Values that more than one item in 64 has get a plane in both cases

An item that has no value is in none of these sets; the plane `present` knows it, unless every item has a value. Numbers
in lists have no buckets: their ranges are merged from the items of each value.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from ziggurat.errors import DataError
from ziggurat.ops.bitmask import mask_of_rows
from ziggurat.ops.mask_program import BloomLeaf, CodesLeaf, ConstantLeaf, Leaf, ListLeaf, MaskLeaf, PlaneLeaf
from ziggurat.retrieval.filters.bloom import planes_of_one
from ziggurat.retrieval.filters.expression import Equals, Number, Within
from ziggurat.retrieval.filters.schema import Attribute

_FEW_PLANES = 4  # are read faster than one byte an item
_ITEMS_TO_A_LISTED_ONE = 32  # above, a mask is smaller than the list
_MAX_FOUND = 4096  # texts whose codes are remembered


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The meaning of an attribute's tensors; plain data.

    Args:
        attribute: name and kind.
        num_values: different values.
        num_present: items that have one.
        present: the plane of those; -1 if it is every item.
        first_plane: of the values that have one.
        bloom_first: the first Bloom plane.
        bloom_width: Bloom planes; 0 if there are none.
        bloom_hashes: Bloom planes of a value.
    """

    attribute: Attribute
    num_values: int
    num_present: int
    present: int = -1
    first_plane: int = 0
    bloom_first: int = 0
    bloom_width: int = 0
    bloom_hashes: int = 0


_INT32 = (torch.int32,)


def ascending(rows: Tensor) -> Tensor:
    """Sort the numbers of items; numpy does it several times faster than torch."""
    return torch.from_numpy(np.sort(rows.numpy())) if rows.device.type == "cpu" else rows.sort().values


def _is(
    tensor: Tensor | None,
    length: int | None,
    *,
    least: int | None = None,
    most: int | None = None,
    of: tuple[torch.dtype, ...] = (torch.int32, torch.int64),
) -> bool:
    """Return whether a tensor is absent, or contiguous and has a length, a type and numbers in bounds."""
    # Absent is well here: whether a tensor must be there is asked by whoever needs it.
    if tensor is None:
        return True
    if tensor.dim() != 1 or tensor.dtype not in of or not tensor.is_contiguous():
        return False
    if length is not None and len(tensor) != length:
        return False
    if len(tensor) == 0:
        return True
    return (least is None or int(tensor.min()) >= least) and (most is None or int(tensor.max()) <= most)


class AttributeIndex(nn.Module):
    """The sets of items of one attribute.

    Args:
        stored: what the tensors mean.
        n: number of items.
        tensors: by name, those of `TENSORS` that are kept.
    """

    TENSORS = (
        "numbers",  # values, ascending: int64 or float64
        "text",  # values, ascending, one after the other in UTF-8
        "text_offsets",  # where they begin
        "offsets",  # how many entries the values before have
        "rows",  # items in the order of their values
        "planed",  # codes of values that have a plane, ascending
        "codes",  # one byte an item
        "buckets",  # the first code of each byte
        "item_codes",  # of each item; -1 where it has none or one with a plane; of one item after the other if many
        "item_offsets",  # where an item's codes begin
    )

    numbers: Tensor | None
    text: Tensor | None
    text_offsets: Tensor | None
    offsets: Tensor
    rows: Tensor | None
    planed: Tensor
    codes: Tensor | None
    buckets: Tensor | None
    item_codes: Tensor | None
    item_offsets: Tensor | None

    def __init__(self, stored: Stored, *, n: int, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.stored = stored
        self.n = n
        self._copies: dict[str, np.ndarray] = {}
        self._lists: dict[str, list[int]] = {}
        self._found: dict[str, int | None] = {}
        for name in self.TENSORS:
            self.register_buffer(name, tensors.get(name))
        self._check()

    def _check(self) -> None:
        """Tensors come from files, and C++ follows what they say."""
        stored = self.stored
        n = self.n
        values = self.stored.num_values
        entries = self.item_codes if self.item_offsets is not None else None
        fits = (
            _is(self.offsets, values + 1, least=0)
            and _is(self.planed, None, least=0, most=values - 1)
            and _is(self.codes, n, of=(torch.uint8,))
            and _is(self.buckets, None, least=0, most=values)
            and _is(self.rows, None if self.rows is None else int(self.offsets[-1]), least=0, most=n - 1, of=_INT32)
            and _is(self.item_offsets, n + 1, least=0, most=0 if entries is None else len(entries), of=_INT32)
            # The last offset ends the last item, and has to end the codes as well.
            and (self.item_offsets is None or (entries is not None and int(self.item_offsets[-1]) == len(entries)))
            and _is(self.item_codes, n if entries is None else None, of=_INT32)
            and (_is(self.text_offsets, values + 1, least=0) if self.numbers is None else len(self.numbers) == values)
            and (stored.bloom_width == 0 or (self.item_codes is not None and 1 <= stored.bloom_hashes <= 8))
        )
        if not fits:
            raise self._misfit("other sizes, types or numbers")

    def _misfit(self, found: str) -> DataError:
        return DataError(
            expected="tensors of a filter index that fit each other",
            found=f"{found} for attribute {self.stored.attribute.name!r}",
            where="the state of a filter index",
            ways_out=("load the state that FilterIndex.state_dict() gave", "build the index again"),
        )

    def _needed(self, name: str) -> Tensor:
        """Return a tensor that is kept where the others are as they are; raise DataError where it is missing."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise self._misfit(f"no {name}")
        return tensor

    @property
    def has_all_planes(self) -> bool:
        """True if every value has a plane."""
        return len(self.planed) == self.stored.num_values

    def leaves(self, term: Equals | Within) -> list[Leaf]:
        """The sets whose union is the items for which a predicate is true."""
        first, stop = self.codes_of(term)
        if first >= stop:
            return []
        # A range over all values is true of each item that has any.
        is_all = stop - first == self.stored.num_values and not self.stored.attribute.many  # a list may be empty
        if isinstance(term, Within) and is_all:
            return [ConstantLeaf(True) if self.stored.present < 0 else PlaneLeaf(self.stored.present)]
        if isinstance(term, Within) and self.codes is not None:
            # A few planes are read faster than a byte of each item.
            if self.has_all_planes and stop - first <= _FEW_PLANES:
                return [self._plane(code) for code in range(first, stop)]
            return self._bucket_leaves(self.codes, first, stop)
        if isinstance(term, Within):
            if self.has_all_planes:
                return [self._plane(code) for code in range(first, stop)]
            return self._listed([(first, stop)])
        return [self._value_leaf(first)]

    def codes_of(self, term: Equals | Within) -> tuple[int, int]:
        """The first code that fulfils a predicate, and the one after the last."""
        if isinstance(term, Equals):
            code = self._code(term.value)
            return (0, 0) if code is None else (code, code + 1)
        if self.stored.num_values == 0:
            return 0, 0
        return self._place(term.low, "left", 0), self._place(term.high, "right", self.stored.num_values)

    def share(self, term: Equals | Within) -> float:
        """The share of items for which a predicate is true; an upper bound for ranges of several values."""
        first, stop = self.codes_of(term)
        if first >= stop:
            return 0.0
        offsets = self._host("offsets")
        entries = int(offsets[stop]) - int(offsets[first])
        # An item with several values of the range is counted once for each of them, but is one item.
        return min(entries, self.stored.num_present) / max(self.n, 1)

    def value(self, code: int) -> str | Number:
        """The value of a code."""
        if self.numbers is not None:
            return self.numbers[code].item()
        text = self._host("text")
        offsets = self._host("text_offsets")
        return text[offsets[code] : offsets[code + 1]].tobytes().decode()

    def values_of(self, position: int, *, planes: Int64[Tensor, "P W"]) -> list[str | Number] | None:
        """The values of one item, ascending; None if they are missing."""
        if not self.is_present(position, planes=planes):
            return None
        return [self.value(code) for code in self.codes_at(position, planes=planes)]

    def codes_at(self, position: int, *, planes: Int64[Tensor, "P W"]) -> list[int]:
        """The codes of one item, ascending."""
        word, bit = divmod(position, 64)
        first = self.stored.first_plane
        # One bit of each plane of a value.
        bits = (planes[first : first + len(self.planed), word] >> bit) & 1
        found = set(self.planed[bits.bool()].tolist())
        if self.has_all_planes:
            return sorted(found)
        if self.rows is not None:
            # Items are listed by value, so the values of one item take a look at all entries.
            entries = (self.rows == position).nonzero().view(-1)
            found |= set((torch.searchsorted(self.offsets, entries.to(self.offsets.dtype), right=True) - 1).tolist())
        elif self.item_codes is not None and self.item_offsets is None:
            found |= {int(self.item_codes[position])} - {-1}
        elif self.item_codes is not None and self.item_offsets is not None:
            begin, end = self.item_offsets[position : position + 2].tolist()
            found |= set(self.item_codes[begin:end].tolist())
        # Without lists and codes of items each item has one byte, which is its code.
        elif self.codes is not None and self.is_present(position, planes=planes):
            found.add(int(self.codes[position]))
        return sorted(found)

    def is_present(self, position: int, *, planes: Int64[Tensor, "P W"]) -> bool:
        """Return whether an item has the attribute; an empty list counts."""
        if self.stored.present < 0:
            return True
        word, bit = divmod(position, 64)
        return bool((planes[self.stored.present, word] >> bit) & 1)

    def bloom_leaf(self, code: int) -> BloomLeaf:
        """The Bloom planes of a value, and where it is verified."""
        item_codes = self._needed("item_codes")
        stored = self.stored
        planes = planes_of_one(code, width=stored.bloom_width, hashes=stored.bloom_hashes)
        numbers = tuple(stored.bloom_first + plane for plane in planes)
        offsets = self._host("offsets")
        holders = int(offsets[code + 1]) - int(offsets[code])
        return BloomLeaf(numbers, item_codes, self.item_offsets, code, holders)

    def tail_lengths(self) -> Int64[np.ndarray, "N"]:
        """Count the values that each item has in the Bloom planes."""
        if self.item_offsets is not None:
            return self.item_offsets.diff().cpu().numpy()
        # One code an item here: it has one in the planes, or none.
        return (self._needed("item_codes") >= 0).cpu().numpy().astype(np.int64)

    def _value_leaf(self, code: int) -> Leaf:
        planed = self._list("planed")
        at = bisect.bisect_left(planed, code)
        if at < len(planed) and planed[at] == code:
            return PlaneLeaf(self.stored.first_plane + at)
        if self.stored.bloom_width:
            return self.bloom_leaf(code)
        if self.rows is not None:
            return self._listed([(code, code + 1)])[0]
        return CodesLeaf(self._needed("codes"), code, code)

    def _plane(self, code: int) -> PlaneLeaf:
        return PlaneLeaf(self.stored.first_plane + code)

    def _bucket_leaves(self, codes: Tensor, first: int, stop: int) -> list[Leaf]:
        """Return whole buckets by their bytes, and the items of the buckets that the range cuts."""
        buckets = self._list("buckets")
        low = bisect.bisect_left(buckets, first)
        high = bisect.bisect_right(buckets, stop) - 1
        # The range lies within one bucket, or across the border of two: no bucket is whole.
        if low >= high:
            return self._listed([(first, stop)])
        whole = CodesLeaf(codes, low, high - 1)
        return [whole, *self._listed([(first, buckets[low]), (buckets[high], stop)])]

    def _listed(self, ranges: list[tuple[int, int]]) -> list[Leaf]:
        """The items that have one of the codes in ranges, by number."""
        ranges = [(first, stop) for first, stop in ranges if first < stop]
        if not ranges:
            return []
        listed = self._needed("rows")
        offsets = self._host("offsets")
        parts = [listed[int(offsets[first]) : int(offsets[stop])] for first, stop in ranges]
        # Of several values the items of each are ascending, but not all together.
        if len(parts) == 1 and ranges[0][1] - ranges[0][0] == 1:
            return [ListLeaf(parts[0])]  # of one value they are ascending
        # Merged, and perhaps with one item for several values: a mask takes no notice.
        rows = torch.cat(parts)
        if len(rows) * _ITEMS_TO_A_LISTED_ONE > self.n:
            return [MaskLeaf(mask_of_rows(rows.long(), n=self.n))]
        return [ListLeaf(ascending(rows))]

    def _place(self, bound: Number | None, side: str, at_no_bound: int) -> int:
        """Locate a bound among the values; Python compares, since the bound may be beyond 64 bits."""
        if bound is None:
            return at_no_bound
        numbers = self._host("numbers")
        if bound < numbers[0].item():
            return 0
        if bound > numbers[-1].item():
            return len(numbers)
        # In the type of the values, or numpy would convert all of them to another one first.
        return int(np.searchsorted(numbers, numbers.dtype.type(bound), side="left" if side == "left" else "right"))

    def _code(self, value: str) -> int | None:
        if value in (found := self._found):
            return found.get(value)
        code = self._search(value)
        if len(found) >= _MAX_FOUND:
            self._found = {}  # another thread may still read the old ones
        self._found[value] = code
        return code

    def _search(self, value: str) -> int | None:
        text, offsets = self._host("text"), self._host("text_offsets")
        # Bytes of UTF-8 stand in the order of their code points, so that no value is decoded to be compared. Half a
        # surrogate, which no value has, finds nothing instead of raising.
        wanted = value.encode(errors="surrogatepass")

        def text_of(code: int) -> bytes:
            return text[offsets[code] : offsets[code + 1]].tobytes()

        # A search over codes that reads texts only where it looks.
        at = bisect.bisect_left(range(self.stored.num_values), wanted, key=text_of)
        return at if at < self.stored.num_values and text_of(at) == wanted else None

    def _host(self, name: str) -> np.ndarray:
        """A tensor as an array; one from another device is kept, since values are looked up one at a time."""
        tensor = getattr(self, name)
        if tensor.device.type == "cpu":
            return tensor.numpy()
        # Kept, since a copy from the device waits for it.
        if name not in self._copies:
            self._copies[name] = tensor.cpu().numpy()
        return self._copies[name]

    def _list(self, name: str) -> list[int]:
        if name not in self._lists:
            self._lists[name] = getattr(self, name).tolist()
        return self._lists[name]

    def forget(self) -> None:
        """Drop what was derived from tensors that are no longer the same."""
        self._copies.clear()
        self._lists.clear()
        self._found.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AttributeIndex:
        self.forget()
        return super()._apply(fn, recurse)
