"""FilterIndex: which items pass a filter, exactly, as a mask of bits; a module whose whole state is tensors.

    items (a line each) ──build──► planes (P, W): presence, values, Bloom       the same order as the vectors' clusters
                                   an AttributeIndex for each column
    text ──parse──► Filter ──program──► AND and OR of sets, NOT at the sets ──run──► words (W)

A filter in negation normal form needs no third value: an expression is true where its AND and OR of *literals* is, a
literal being either "has the value" or "has a value, and not this one". An item without a value is in neither, which
is SQL's unknown. `ziggurat.ops.mask_program` computes that in one pass over the planes, and looks up what Bloom planes
leave open.

The schema, what the tensors mean, and the settings are themselves a tensor (`about`: JSON in UTF-8), so `state_dict` or
a safetensors file holds all there is: `FilterIndex.from_state(state)`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from ziggurat.config import from_json, to_json
from ziggurat.errors import ConfigError, DataError, FilterError
from ziggurat.ops.bitmask import count, full_mask, num_words
from ziggurat.ops.mask_program import MaskProgram, clear_rows
from ziggurat.retrieval.filters.arguments import check_order, check_positions, check_spans
from ziggurat.retrieval.filters.attribute_index import AttributeIndex, Stored
from ziggurat.retrieval.filters.bloom import FalsePositives, predicted_rate
from ziggurat.retrieval.filters.build import FilterConfig, Planes, index_attribute
from ziggurat.retrieval.filters.explanation import explain_item, notes_of
from ziggurat.retrieval.filters.expression import Filter, Missing, Within, terms_of
from ziggurat.retrieval.filters.parser import parse_filter
from ziggurat.retrieval.filters.program import estimate, tree_of
from ziggurat.retrieval.filters.recent import Recent
from ziggurat.retrieval.filters.schema import FilterSchema

_SAMPLE_WORDS = 256  # 16,384 items, on which an estimate looks
_SAMPLE_SPANS = 32


class FilterIndex(nn.Module):
    """The attributes of items, ready for filters.

    `FilterIndex.build` makes one from a table of items, `from_state` from a saved one. Items are named by *position*,
    the place in the order that was given to `build`.

    Args:
        about: schema, settings and meaning of the tensors, as plain data.
        tensors: the state, by name, as `state_dict` has it.
    """

    planes: Tensor
    about: Tensor

    def __init__(self, about: Mapping[str, Any], *, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        where = "the state of a filter index"
        self.config = from_json(FilterConfig, about["config"], where=where)
        self.schema = from_json(FilterSchema, about["schema"], where=where)
        self.left_out: dict[str, str] = dict(about["left_out"])
        self.n = int(about["n"])
        stored = [from_json(Stored, each, where=where) for each in about["stored"]]
        attributes = [
            AttributeIndex(each, n=self.n, tensors=_below(tensors, f"attributes.{number}."))
            for number, each in enumerate(stored)
        ]
        self.attributes = nn.ModuleList(attributes)
        self._named = dict(zip(self.schema.names, attributes, strict=True))
        self.register_buffer("planes", tensors["planes"])
        # A buffer, so that what the tensors mean is saved and loaded with them.
        encoded = json.dumps(dict(about), sort_keys=True).encode()
        # A copy, because the bytes of a text cannot be written to, and torch wants memory that can.
        self.register_buffer("about", torch.from_numpy(np.frombuffer(encoded, dtype=np.uint8).copy()))
        self._check_planes()
        self._parsed: Recent[str, Filter] = Recent(self.config.cached)
        self._programs: Recent[Filter, MaskProgram] = Recent(self.config.cached)
        self._estimates: Recent[Filter, float] = Recent(self.config.cached)
        self._notes: Recent[Filter, tuple[str, ...]] = Recent(self.config.cached)
        # Behind the load, since only then the new `about` can be compared.
        self.register_load_state_dict_post_hook(_refuse_another_index)

    @classmethod
    def build(
        cls,
        items: pl.DataFrame,
        *,
        order: Int64[Tensor, "N"] | None = None,
        config: FilterConfig | None = None,
        schema: FilterSchema | None = None,
    ) -> FilterIndex:
        """Index the attributes of items.

        Args:
            items: a line an item, in the order of the catalogue.
            order: the number in the catalogue of each position; as they come if None.
            config: settings.
            schema: the attributes, if another index decided them: a segment of further items has the same ones, and
                whatever values.

        Raises:
            ConfigError: the order is not one of these items, or an attribute is no column.
            DataError: the columns do not fit the schema.
        """
        config = config or FilterConfig()
        left_out: dict[str, str] = {}
        if schema is None:
            schema, left_out = FilterSchema.of_frame(items, attributes=config.attributes)
        n = len(items)
        # Numbers of items are kept in 32 bits.
        if n >= 1 << 31:
            raise ConfigError(
                expected="fewer than 2,147,483,648 items",
                found=f"{n:,}",
                where="FilterIndex.build",
                ways_out="spread the items over several indices",
            )
        columns = schema.cast(items)
        if order is not None:
            check_order(order, n=n)
            # Brought into the order of positions once, so that no search has to translate.
            columns = columns[order.cpu().numpy()]
        planes = Planes(n)
        attributes = [
            index_attribute(columns[attribute.name], attribute=attribute, planes=planes, config=config)
            for attribute in schema.attributes
        ]
        about = {
            "config": to_json(config),
            "schema": to_json(schema),
            "left_out": left_out,
            "n": n,
            "stored": [to_json(attribute.stored) for attribute in attributes],
        }
        tensors = {"planes": planes.stacked()}
        for number, attribute in enumerate(attributes):
            tensors |= {f"attributes.{number}.{name}": tensor for name, tensor in attribute.state_dict().items()}
        return cls(about, tensors=tensors)

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], *, prefix: str = "") -> FilterIndex:
        """The index whose `state_dict` this is.

        Args:
            state: tensors by name; they are kept, not copied.
            prefix: before each name, if they stand among others: "filters.".
        """
        tensors = _below(state, prefix)
        return cls(json.loads(tensors["about"].cpu().numpy().tobytes()), tensors=tensors)

    def parse(self, text: str) -> Filter:
        """Read a filter; the latest ones are kept.

        Raises:
            FilterError: it cannot be read, or names what items do not have; points at the column of the text.
        """
        if not isinstance(text, str):
            return parse_filter(text, schema=self.schema, left_out=self.left_out)  # refuses it
        return self._parsed.get(text, make=lambda: parse_filter(text, schema=self.schema, left_out=self.left_out))

    def program(self, wanted: Filter | str) -> MaskProgram:
        """A filter that is ready to run; the latest ones are kept."""
        parsed = self._filter(wanted)
        return self._programs.get(parsed, make=lambda: self._program(parsed))

    def masks(
        self,
        filters: Sequence[Filter | str | None],
        *,
        exclude: Sequence[Tensor | None] = (),
        spans: Int64[Tensor, "S 2"] | None = None,
    ) -> Int64[Tensor, "Q W"]:
        """The items that pass, for each query: exactly those for which its filter is true.

        Args:
            filters: one a query; every item passes where it is None.
            exclude: positions never to return, one tensor a query (already seen); -1 among them is passed over.
            spans: first and last + 1 of the words that are wanted; the others are 0.

        Returns:
            A bit an item, as in `ziggurat.ops.bitmask`.

        Raises:
            FilterError: a filter cannot be read.
            BoundsError: an excluded position or a span is none.
            ConfigError: there are not as many exclusions as filters.
        """
        check_spans(spans, words=num_words(self.n))
        if exclude and len(exclude) != len(filters):
            raise ConfigError(
                expected=f"exclusions for each of {len(filters)} queries, or none at all",
                found=f"{len(exclude)}",
                where="FilterIndex.masks, argument 'exclude'",
                ways_out="give None for a query that excludes nothing",
            )
        shape = (len(filters), num_words(self.n))
        # With spans the words between them are not written, and have to be 0.
        empty = torch.empty if spans is None else torch.zeros
        words = empty(shape, dtype=torch.int64, device=self.planes.device)
        # Rows of the result are filled in place.
        for row, wanted in zip(words, filters, strict=True):
            if wanted is not None:
                self.program(wanted).run(self.planes, n=self.n, out=row, spans=spans)
            else:
                _fill(row, self.n, spans)
        for query, positions in enumerate(exclude):
            if positions is not None and positions.numel():
                # Checked before memory is written by these numbers.
                check_positions(positions, n=self.n, query=query)
                clear_rows(words[query], positions.to(torch.int64))
        return words

    def selectivity(self, wanted: Filter | str | None) -> float:
        """The share of items that pass, estimated from 16,384 of them and from the counts of values; in [0, 1].

        Positions are spread over the whole index, so that every cluster has a part. Small indices are counted.
        """
        if wanted is None or self.n == 0:
            return 1.0
        if num_words(self.n) <= _SAMPLE_WORDS:
            return int(count(self.masks([wanted]))[0]) / self.n
        hits = int(count(self.masks([wanted], spans=_sample(num_words(self.n))))[0])
        sampled = 64 * _SAMPLE_WORDS
        parsed = self._filter(wanted)
        prior = self._estimates.get(parsed, make=lambda: estimate(parsed.expression, self._named))
        # The counts of values weigh as much as an eighth of the sample: they decide where it has no hit.
        return (hits + prior * sampled / 8) / (sampled + sampled / 8)

    def explain(self, wanted: Filter | str, position: int) -> str:
        """Explain why an item passes or does not: each part of the filter, and the values of the item.

        Raises:
            BoundsError: there is no such position.
        """
        check_positions(torch.tensor([position]), n=self.n)
        return explain_item(self._filter(wanted), self._named, position=position, planes=self.planes)

    def notes(self, wanted: Filter | str) -> list[str]:
        """List notes for a reader of the filter: values that no item has, each with the nearest that some have.

        The latest ones are kept. Nearest values are looked for among 2,000, for the first eight that no item has.
        """
        parsed = self._filter(wanted)
        return list(self._notes.get(parsed, make=lambda: tuple(notes_of(parsed, self._named))))

    def values_of(self, position: int) -> dict[str, list[str | int | float] | None]:
        """The stored values of an item by attribute; None where it has none."""
        check_positions(torch.tensor([position]), n=self.n)
        return {
            name: each.values_of(position, planes=self.planes)
            if each.is_present(position, planes=self.planes)
            else None
            for name, each in self._named.items()
        }

    def false_positives(self, *, probes: int = 64, seed: int = 0) -> list[FalsePositives]:
        """Predicted and measured false positives of each attribute that has Bloom planes.

        Args:
            probes: values to measure with, drawn among those that have no plane of their own.
            seed: of the draw.
        """
        found = []
        for attribute in self._named.values():
            stored = attribute.stored
            if not stored.bloom_width:
                continue
            measured, tried = _measured_rate(attribute, planes=self.planes, probes=probes, seed=seed)
            found.append(
                FalsePositives(
                    attribute=stored.attribute.name,
                    planes=stored.bloom_width,
                    hashes=stored.bloom_hashes,
                    predicted=predicted_rate(
                        np.bincount(attribute.tail_lengths()), width=stored.bloom_width, hashes=stored.bloom_hashes
                    ),
                    measured=measured,
                    probes=tried,
                )
            )
        return found

    def index_bytes(self) -> dict[str, int]:
        """Bytes of the planes, and of the other tensors of each attribute."""
        sizes = {"planes": self.planes.nbytes}
        for name, attribute in self._named.items():
            sizes[name] = sum(tensor.nbytes for tensor in attribute.buffers())
        return sizes

    def _filter(self, wanted: Filter | str) -> Filter:
        return wanted if isinstance(wanted, Filter) else self.parse(wanted)

    def _program(self, parsed: Filter) -> MaskProgram:
        """A filter may have been read by another index: its attributes must be here, too."""
        for term in terms_of(parsed.expression):
            kind = self._named[term.attribute].stored.attribute.kind if term.attribute in self._named else None
            if kind is None or (not isinstance(term, Missing) and kind.is_ordered != isinstance(term, Within)):
                raise FilterError(
                    expected=f"a filter for the attributes {', '.join(self._named):.500}",
                    found=f"{term.text!r:.80}, read for another index",
                    where=f"the filter {parsed.text!r:.80}",
                    ways_out="let this index read the text: index.parse(text)",
                )
        return MaskProgram(tree_of(parsed.expression, self._named))

    def _check_planes(self) -> None:
        stored = [each.stored for each in self._named.values()]
        # One behind the last plane that any attribute names.
        ends = [0, *(each.present + 1 for each in stored), *(each.bloom_first + each.bloom_width for each in stored)]
        ends += [each.stored.first_plane + len(each.planed) for each in self._named.values()]
        fits = self.planes.dim() == 2 and self.planes.shape[1] == num_words(self.n) and self.planes.is_contiguous()
        if not fits or self.planes.dtype != torch.int64 or len(self.planes) < max(ends):
            raise DataError(
                expected=f"at least {max(ends)} planes of {num_words(self.n)} words of int64",
                found=f"{self.planes.dtype} of shape {tuple(self.planes.shape)}",
                where="the state of a filter index",
                ways_out="load the state that FilterIndex.state_dict() gave",
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FilterIndex:
        self._programs.clear()  # they hold addresses
        return super()._apply(fn, recurse)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@functools.lru_cache(maxsize=64)
def _sample(words: int) -> Int64[Tensor, "S 2"]:
    """Spans of words that are spread evenly over a mask."""
    length = _SAMPLE_WORDS // _SAMPLE_SPANS
    # In double precision: FP32 does not hold the number of a word in a large mask exactly.
    begins = torch.linspace(0, words - length, _SAMPLE_SPANS, dtype=torch.float64).to(torch.int64)
    return torch.stack([begins, begins + length], dim=1)


def _fill(row: Tensor, n: int, spans: Tensor | None) -> None:
    full = full_mask(n, device=row.device)
    for begin, end in [(0, len(row))] if spans is None else spans.tolist():
        row[begin:end] = full[begin:end]


def _refuse_another_index(module: nn.Module, _: object) -> None:
    assert isinstance(module, FilterIndex)
    about = json.loads(module.about.cpu().numpy().tobytes())
    # Parsed attributes are not loaded, so a state of other values would be read by the wrong ones.
    if about["stored"] != [to_json(each.stored) for each in module._named.values()] or about["n"] != module.n:
        raise ConfigError(
            expected="the state of an index over the same values",
            found="the state of another index",
            where="FilterIndex.load_state_dict",
            ways_out="make the index by FilterIndex.from_state(state)",
        )
    module._programs.clear()
    module._estimates.clear()
    module._notes.clear()
    for attribute in module._named.values():
        attribute.forget()


def _measured_rate(attribute: AttributeIndex, *, planes: Tensor, probes: int, seed: int) -> tuple[float, int]:
    """The share of items without a value that its Bloom planes let pass, over some values."""
    # Values without a plane of their own are those in the Bloom planes.
    tail = np.setdiff1d(np.arange(attribute.stored.num_values), attribute.planed.cpu().numpy())
    chosen = np.random.default_rng(seed).permutation(tail)[:probes]
    false = without = 0
    for code in chosen.tolist():
        leaf = attribute.bloom_leaf(code)
        words = planes[leaf.planes[0]]
        for plane in leaf.planes[1:]:
            words = words & planes[plane]
        holders = int(attribute.offsets[code + 1] - attribute.offsets[code])
        # Items that have the value pass rightly; the others are false.
        false += int(count(words)) - holders
        without += attribute.n - holders
    return false / max(without, 1), len(chosen)
