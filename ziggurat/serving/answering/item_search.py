"""The index of an export: built of vectors and catalogue, written, read, and asked by numbers of catalogue rows.

What finds items is `retrieval/item_index.py`; this module keeps it in an export (its whole state is tensors, and a
safetensors file is read without a copy, so that processes which serve the same export share its memory), and translates
between positions of the index and rows of the catalogue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import polars as pl
from jaxtyping import Bool, Float32, Int64
from safetensors import SafetensorError
from torch import Tensor

from ziggurat.errors import RequestError, ZigguratError
from ziggurat.retrieval.filters import Filter, FilterIndex
from ziggurat.retrieval.item_index import ItemIndex, ItemIndexConfig
from ziggurat.retrieval.vectors import VectorIndexConfig
from ziggurat.retrieval.vectors.index import Kept
from ziggurat.serving.answering.shards import Retrieved, ShardQuestion, Shards
from ziggurat.serving.export.aligned_tensors import load_aligned, save_aligned
from ziggurat.serving.export.export_folder import damaged

INDEX_FILE = "items/index.safetensors"
LESS = 4  # by which less effort divides the probes and the candidates


class ItemSearch:
    """Finds items of a catalogue for vectors of users.

    Args:
        index: whose numbers are rows of the catalogue.
        shards: search in the place of the index, if there are any; the index answers all but searches.
    """

    def __init__(self, index: ItemIndex, *, shards: Shards | None = None) -> None:
        self.index = index
        self.shards = shards

    @staticmethod
    def build(vectors: Float32[Tensor, "N D"], *, items: pl.DataFrame) -> ItemSearch:
        """Index vectors, and all columns of their items that filters can use.

        Args:
            vectors: one a row of the catalogue.
            items: the catalogue.
        """
        # Vectors as they are: answers have to be those of the run.
        config = ItemIndexConfig(vectors=VectorIndexConfig(kept=Kept.FLOAT32))
        return ItemSearch(ItemIndex.build(vectors, items=items, config=config))

    @property
    def attributes(self) -> dict[str, str]:
        """The attributes that filters may name, each with its kind."""
        return {each.name: each.describe() for each in self._filters().schema.attributes}

    def tune(self, queries: Float32[Tensor, "Q D"], *, k: int, recall: float) -> int:
        """Raise the probes until they reach a recall, for vectors of users like these, and keep them.

        They are never lowered: what an index looks into by itself is cheap, and users that nobody knows may be unlike.
        """
        vectors = self.index.vectors
        k = min(k, len(vectors))
        least = vectors.probes_for(k)
        vectors.keep_tuned(max(least, vectors.tune(queries, k=k, recall=recall)), k=k)
        return vectors.default_probes

    def parse(self, text: str) -> Filter:
        """A filter from its text; raises FilterError."""
        return self._filters().parse(text)

    def explain(self, wanted: Filter, item: int) -> str:
        """Explain why an item passes a filter, or does not."""
        return self.index.explain(wanted, item)

    def notes(self, wanted: Filter) -> tuple[str, ...]:
        """Return notes for somebody who wrote a filter: values that no item has, with the nearest that some have."""
        return self.index.notes(wanted)

    def example(self) -> str:
        """A filter for documentation that some items pass and others do not, as many as can be; "" without one."""
        found: dict[str, float] = {}
        if not len(self.index.vectors):
            return ""
        # The values of the first item: they exist, and so at least it passes.
        for name, values in self._filters().values_of(0).items():
            for value in (values or [])[:3]:  # None: the item has none
                text = f"{name}:{_quoted(value)}"
                try:
                    passing = self._filters().selectivity(text)
                except ZigguratError:  # a value that filters have no way to write
                    continue
                # An example needs a name that is written without quotes, and has to leave something out.
                if " " not in name and passing < 1:
                    found[text] = passing
        return max(found, key=lambda text: found[text], default="")

    def passing(
        self, *, filters: Sequence[Filter | None], exclude: Sequence[Tensor | None]
    ) -> Sequence[Bool[Tensor, "N"]]:
        """Masks of the items that pass each filter and are not excluded, in the order of the catalogue."""
        return [self.index.passing(wanted, exclude=items) for wanted, items in zip(filters, exclude, strict=True)]

    def search(
        self,
        queries: Float32[Tensor, "Q D"],
        *,
        k: int,
        filters: Sequence[Filter | None],
        exclude: Sequence[Int64[Tensor, "_"] | None],
        fewer_probes: bool = False,
    ) -> Retrieved:
        """The k items of each query with the largest inner products, of those that pass.

        Args:
            queries: vectors of users.
            k: items a query.
            filters: one a query; None for all items.
            exclude: numbers of items to leave out, one tensor a query.
            fewer_probes: look at a quarter of the clusters that are looked at otherwise.
        """
        probes = max(1, self.index.vectors.probes_for(k) // (LESS if fewer_probes else 1))
        if self.shards is None:
            found = self.index.search(queries, k=k, filters=filters, exclude=exclude, probes=probes)
            return Retrieved(scores=found.scores, items=found.items, plans=tuple(map(str, found.plans)))
        # As text: a shard reads it by its own index, whose codes are others.
        texts = [None if wanted is None else wanted.text for wanted in filters]
        question = ShardQuestion(queries=queries, k=k, filters=texts, exclude=exclude, probes=probes)
        return self.shards.search(question)

    def vectors_of(self, items: Int64[Tensor, "n"]) -> Float32[Tensor, "n D"]:
        """The vectors of some items, as searches multiply them."""
        return self.index.vectors_of(items)

    def changed(
        self, numbers: Int64[Tensor, "M"], *, vectors: Float32[Tensor, "M D"], items: pl.DataFrame, gone: Sequence[int]
    ) -> ItemSearch:
        """The search after a change; this one stays as it is.

        Args:
            numbers: items that are new or have changed.
            vectors: theirs.
            items: their rows of the catalogue.
            gone: numbers of items that are deleted, whether or not they were ever found here.
        """
        # Searches that are under way keep the index that they began with.
        index = self.index.fork()
        # Numbers of deleted items count as well: no item that comes later may get one of them.
        index.reserve(max([-1, *numbers.tolist(), *gone]) + 1)
        if len(gone):
            index.delete(list(gone))
        if len(numbers):
            index.update(numbers, vectors, items=items)
        shards = self.shards
        if shards is not None:
            shards = shards.changed(numbers, vectors=vectors, items=items, gone=gone)
        return ItemSearch(index, shards=shards)

    def merged(self, items: pl.DataFrame) -> ItemSearch:
        """The search whose clusters hold all items that are there now; `items` is the whole catalogue."""
        return ItemSearch(self.index.merged(items))

    def save(self, path: Path) -> None:
        """Write the index into an export."""
        save_aligned(self.index.state_dict(), path)

    @staticmethod
    def load(path: Path, *, num_items: int, num_gone: int = 0) -> ItemSearch:
        """Read the index of a catalogue from an export.

        Args:
            path: of the file.
            num_items: rows of the catalogue.
            num_gone: those of them that are deleted, so that the index lacks them.

        Raises:
            ExportError: the file holds no index, or one of other items.
        """
        try:
            index = ItemIndex.from_state(load_aligned(path))
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise damaged(path, expected="an index in the format safetensors", found=str(error)[:200]) from error
        order = index.vectors.order.sort().values
        # Each number once: sorted, they rise everywhere.
        fits = len(order) == num_items - num_gone and bool((order.diff() > 0).all())
        if index.filters is None or not fits or (len(order) and not 0 <= int(order[0]) <= int(order[-1]) < num_items):
            raise damaged(path, expected=f"an index of {num_items - num_gone:,} items", found=f"one of {len(order):,}")
        # Deleted items keep their numbers, though the index lacks them.
        index.reserve(num_items)
        return ItemSearch(index)

    def _filters(self) -> FilterIndex:
        filters = self.index.filters
        if filters is None:
            raise RequestError(
                expected="an export whose index knows attributes of items",
                found="none",
                where="request, filter",
                ways_out="leave the filter out",
            )
        return filters


def _quoted(value: object) -> str:
    if isinstance(value, str):
        return value if value.isalnum() else json.dumps(value, ensure_ascii=False)
    return str(value)
