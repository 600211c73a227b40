"""The search of an export whose index is divided: ask every shard, put the answers together, say who gave none.

    question ──► scatter ──► a `PartFound` of each shard, or None ──► merged (`retrieval/sharding.py`) ──► Retrieved

What carries questions to shards is a `Scatter`: `serving/server/shards/client.py` over HTTP, a few lines in a test.

*Items that change* (`changed`). A shard is told how its items differ from those that the index was built of, all of
them at once, under a name that is a digest of exactly that (`ShardItems`). A question names what it wants to know, so
a shard answers for these items or not at all, whichever process asks; processes that have made the same change name
it alike; and a shard that was started again needs nothing but the latest difference.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import polars as pl
import torch
from jaxtyping import Float32, Int64
from torch import Tensor

from ziggurat.errors import UnavailableError
from ziggurat.retrieval.sharding import PartFound, ShardChange, is_of_shard, merged


@dataclass(frozen=True, kw_only=True, eq=False)
class Retrieved:
    """The items of each query with the largest inner products, best first.

    Args:
        scores: inner products; −∞ where fewer than k items pass.
        items: numbers of the items; −1 there.
        plans: how each query was answered.
        missing: shards that gave no answer; their items are not among those found.
    """

    scores: Float32[Tensor, "Q K"]
    items: Int64[Tensor, "Q K"]
    plans: tuple[str, ...]
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardQuestion:
    """The question to every shard.

    Args:
        queries: vectors of users.
        k: items a query.
        filters: texts, one a query; None for all items.
        exclude: numbers of items to leave out, one tensor a query.
        probes: clusters to look into without a filter.
    """

    queries: Float32[Tensor, "Q D"]
    k: int
    filters: Sequence[str | None]
    exclude: Sequence[Tensor | None]
    probes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardItems:
    """The items of one shard at one moment: as the index was built, or how they differ from that.

    Args:
        change: the difference; None: there is none.
    """

    change: ShardChange | None = None

    @functools.cached_property
    def id(self) -> str:
        """32 hex digits of the difference, or "" where there is none."""
        if self.change is None:
            return ""
        change = self.change
        digest = hashlib.sha256()
        for tensor in (change.numbers, change.vectors, change.gone):
            # The shape, too: the same bytes may be divided among rows in several ways.
            digest.update(f"{tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
        digest.update(repr(change.items.rows()).encode())
        return digest.hexdigest()[:32]

    def then(self, later: ShardChange) -> ShardItems:
        """The items after a further change."""
        if self.change is None:
            return ShardItems(change=_in_order(later))
        before = self.change
        # What was changed or deleted later counts no more as it was.
        stays = ~torch.isin(before.numbers, torch.cat([later.numbers, later.gone]))
        # A deleted item that was put again is there.
        gone = before.gone[~torch.isin(before.gone, later.numbers)]
        both = ShardChange(
            numbers=torch.cat([before.numbers[stays], later.numbers]),
            vectors=torch.cat([before.vectors[stays], later.vectors]),
            items=pl.concat([before.items.filter(pl.Series(stays.numpy())), later.items]),
            gone=torch.cat([gone, later.gone]).unique(),
        )
        return ShardItems(change=_in_order(both))


class Scatter(Protocol):
    """Carries questions to all shards of one version of an index."""

    @property
    def num_shards(self) -> int:
        """Shards of the index."""
        ...

    def ask(self, question: ShardQuestion, *, items: Sequence[ShardItems]) -> Sequence[PartFound | str]:
        """Return what each shard finds among its items, or why it gave no answer in time.

        Args:
            question: for all.
            items: of each shard.
        """
        ...

    def prepare(self, items: Sequence[ShardItems]) -> None:
        """Tell shards of changed items, before questions name them; shards that cannot be told now will be."""
        ...


class Shards:
    """All shards of an index, with their items at one moment.

    Args:
        scatter: carries the questions.
        order: numbers of the items by their position in the whole index.
        items: of each shard; as the index was built unless given.
    """

    def __init__(self, scatter: Scatter, *, order: Int64[Tensor, "N"], items: Sequence[ShardItems] = ()) -> None:
        self.scatter = scatter
        self._order = order
        self._items = tuple(items) or (ShardItems(),) * scatter.num_shards

    def search(self, question: ShardQuestion) -> Retrieved:
        """The best items of each query, of the shards that answer.

        Raises:
            UnavailableError: none of them does.
        """
        answers = self.scatter.ask(question, items=self._items)
        there = {shard: each for shard, each in enumerate(answers) if isinstance(each, PartFound)}
        if not there:
            reasons = "; ".join(f"shard {shard}: {why}" for shard, why in enumerate(answers))
            raise UnavailableError(
                expected="an answer of at least one shard of the index",
                found=reasons,
                where="search",
                ways_out=("ask again: shards that end are started again", "/readyz says which shards are there"),
            )
        found = merged(list(there.values()), order=self._order, k=question.k)
        plans = [
            "; ".join(f"shard {shard}: {each.plans[row]}" for shard, each in there.items())
            for row in range(len(question.queries))
        ]
        missing = tuple(shard for shard in range(len(answers)) if shard not in there)
        return Retrieved(scores=found.scores, items=found.positions, plans=tuple(plans), missing=missing)

    def changed(
        self, numbers: Int64[Tensor, "M"], *, vectors: Float32[Tensor, "M D"], items: pl.DataFrame, gone: Sequence[int]
    ) -> Shards:
        """The shards after a change; those that have none of its items stay as they are.

        Args:
            numbers: items that are new or have changed.
            vectors: theirs.
            items: their rows of the catalogue.
            gone: numbers of items that are deleted.
        """
        left = torch.tensor(list(gone), dtype=torch.int64)
        num_shards = self.scatter.num_shards
        after = []
        for shard, before in enumerate(self._items):
            own = is_of_shard(numbers, shard=shard, num_shards=num_shards)
            out = left[is_of_shard(left, shard=shard, num_shards=num_shards)]
            if not own.any() and not len(out):
                after.append(before)
                continue
            rows = items.filter(pl.Series(own.numpy(), dtype=pl.Boolean))
            change = ShardChange(numbers=numbers[own], vectors=vectors[own], items=rows, gone=out)
            after.append(before.then(change))
        # Before a question names the new items.
        self.scatter.prepare(after)
        return Shards(self.scatter, order=self._order, items=after)


def _in_order(change: ShardChange) -> ShardChange:
    """The same change by number: equal ones are equal bytes, however they came about."""
    order = change.numbers.argsort()
    return ShardChange(
        numbers=change.numbers[order],
        vectors=change.vectors[order].detach().float(),
        items=change.items[order.numpy()],
        gone=change.gone.sort().values,
    )
