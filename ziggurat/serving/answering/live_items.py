"""Changes of single items while an export serves: a new chain for each change, made beside the one that answers.

    {"upsert": [{"movie_id": "17", "in_stock": false}, …], "delete": ["18", …]}
                                                        ┌► catalogue   the row, its id
    chain ──► rows, completed by what is known of them ─┼► index       vector and attributes, in its fresh segment
                                                        ├► OverArch    the parts of its vector
                                                        ├► ranker      the row, encoded
                                                        └► value model the row's numbers        ──► chain, changed

First the items to delete go, then rows are put: of an item that is there, columns that are left out stay as they are;
of a new one (or one that was deleted, also in the same change) they are missing. An item keeps its number for ever, so
that what users have had stays excluded and equal values keep their order. The models stay as they are: an id that
training never saw is an unknown one to them, and the item is found by its features.

A chain is a value, so an answer comes from one state, whatever changes meanwhile. Cost: the catalogue is copied once,
0.1 s for a million items, however many change; and the fresh segment is indexed anew (`retrieval/changes.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import polars as pl
import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.data.raw.written_numbers import WrittenColumns
from ziggurat.errors import RequestError
from ziggurat.serving.answering.chain import Chain, numbers_of
from ziggurat.serving.answering.item_catalogue import ItemCatalogue
from ziggurat.serving.answers import Info
from ziggurat.serving.plain_values import plain
from ziggurat.serving.request_rows import canonical_id, refuse_unknown, series_of
from ziggurat.typed import Reader, checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=RequestError)
class ItemChanges:
    """Items to put into a catalogue, and ids of items to take out.

    Args:
        upsert: columns of items by name, the id's among them; other columns of known items stay as they are.
        delete: ids of items; an id that is there in `upsert`, too, means that the item begins anew.
    """

    upsert: tuple[dict[str, object], ...] = ()
    delete: tuple[str, ...] = ()

    @staticmethod
    def from_json(data: object, *, where: str = "request") -> ItemChanges:
        """Changes from plain data; raises RequestError."""
        reader = Reader(where=where, noun="field", error=RequestError)
        if not isinstance(data, dict):
            raise reader.wrong("", "an object with 'upsert', 'delete' or both", data)
        return reader.build(ItemChanges, data)

    def to_json(self) -> dict[str, object]:
        """The changes as plain data."""
        return {"upsert": [plain(each) for each in self.upsert], "delete": list(self.delete)}

    def __len__(self) -> int:
        return len(self.upsert) + len(self.delete)


@dataclass(frozen=True, kw_only=True)
class ChangedItems:
    """The effects of a change.

    Args:
        added: items that are new, or are there again.
        changed: items that have other columns now.
        deleted: items that are gone.
        unknown: ids to delete of which there was no item; nothing was done for them.
        num_items: in the catalogue now.
        version: of the answers that know the change.
    """

    added: int
    changed: int
    deleted: int
    unknown: tuple[str, ...] = ()
    num_items: int = 0
    version: str = ""

    def to_json(self) -> dict[str, object]:
        """The outcome as plain data."""
        return {**dataclasses.asdict(self), "unknown": list(self.unknown)}


def folded(changes: Iterable[ItemChanges], *, id_column: str) -> tuple[ItemChanges, tuple[str, ...]]:
    """One change that does what these do one after the other, and which of its items are gone at the end.

    Items that came and went are in it, too: they have a number for ever, so that numbers are the same for whoever
    makes the changes one by one.

    Args:
        changes: the earliest first.
        id_column: of the catalogue.
    """
    puts: dict[str | None, dict[str, object]] = {}
    gone: dict[str, None] = {}
    went: dict[str, None] = {}
    for change in changes:
        for id in filter(None, map(canonical_id, change.delete)):
            gone[id] = None
            if id in puts:
                went[id] = None
        for row in change.upsert:
            id = canonical_id(row.get(id_column))
            # An item that went meanwhile begins anew; of others, columns that are left out stay as they were put.
            puts[id] = {**({} if id in went else puts.get(id, {})), **row}
            went.pop(id or "", None)
    return ItemChanges(upsert=tuple(puts.values()), delete=tuple(gone)), tuple(went)


def info_now(info: Info, chain: Chain, *, version: str) -> Info:
    """Return the facts of an export, with its items as they are now.

    Args:
        info: as it was loaded.
        chain: with the changes.
        version: of answers.
    """
    catalogue = chain.catalogue
    made = chain.changes
    if catalogue is None:
        return info
    merged = datetime.fromtimestamp(made.merged_at_s, UTC).isoformat(timespec="seconds") if made.num_merged else ""
    figures = {
        "live_items": catalogue.num_items(),
        "deleted_items": len(catalogue) - catalogue.num_items(),
        "unmerged_items": 0 if chain.index is None else chain.index.index.num_unmerged,
        "changes": made.num,
        "merged_changes": made.num_merged,
        "journal_bytes": made.journal_bytes,
        "last_merge": merged,
    }
    return dataclasses.replace(info, version=version, num_items=catalogue.num_items(), changes=figures)


def change_items(chain: Chain, changes: ItemChanges, *, went: Sequence[str] = ()) -> tuple[Chain, ChangedItems]:
    """The chain after a change, and what the change did; the chain that is given stays as it is.

    Args:
        chain: what answers.
        changes: rows to put, ids to delete.
        went: canonical ids of rows that get a number and are gone at once.

    Raises:
        RequestError: a row without an id or with a wrong column, an id twice.
        DataError: a row that the models cannot read.
    """
    catalogue = chain.needed_catalogue
    wanted = [canonical_id(each) or "" for each in changes.delete]
    found = catalogue.find(wanted)
    gone = {id: number for id, number in zip(wanted, found.tolist(), strict=True) if number >= 0}
    ids = _ids(catalogue, changes.upsert)
    # With deleted ones: an item that comes back gets its old number.
    numbers = catalogue.rows_ever(ids)
    is_there = (catalogue.find(ids) >= 0) & ~torch.isin(
        torch.from_numpy(numbers), torch.tensor([*gone.values()])
    ).numpy()
    known = {number: catalogue.row(number) for number in numbers[is_there].tolist()}
    merged = [{**known.get(number, {}), **row} for number, row in zip(numbers.tolist(), changes.upsert, strict=True)]
    order = sorted(range(len(ids)), key=lambda place: numbers[place] < 0)  # known numbers first, then new ones in order
    num_new = int((numbers < 0).sum())
    numbers[numbers < 0] = range(len(catalogue), len(catalogue) + num_new)
    rows = _frame(catalogue, [merged[place] for place in order], written=chain.settings.written_columns)
    if not ids and not gone:  # ids of no item, or nothing at all: answers stay as they are, and so does their version
        return chain, ChangedItems(
            added=0, changed=0, deleted=0, unknown=changes.delete, num_items=catalogue.num_items()
        )
    went_numbers = {number for id, number in zip(ids, numbers.tolist(), strict=True) if id in went}
    stays = set(numbers.tolist())
    chain = _with_rows(
        chain,
        torch.from_numpy(numbers[order]),
        rows=rows,
        gone=[number for number in gone.values() if number not in stays] + sorted(went_numbers),
    )
    chain = dataclasses.replace(chain, changes=dataclasses.replace(chain.changes, num=chain.changes.num + 1))
    outcome = ChangedItems(
        added=len(ids) - len(known),
        changed=len(known),
        deleted=len(gone),
        unknown=tuple(each for each, id in zip(changes.delete, wanted, strict=True) if id not in gone),
        num_items=chain.needed_catalogue.num_items(),
    )
    return chain, outcome


def _with_rows(chain: Chain, numbers: Int64[Tensor, "M"], *, rows: pl.DataFrame, gone: list[int]) -> Chain:
    """The chain whose catalogue has these rows, and these items no longer."""
    catalogue = chain.needed_catalogue.changed(numbers, rows=rows, gone=gone)
    index = chain.index
    ranker = chain.ranker
    rescorer = chain.rescorer
    if index is not None and chain.encoder is not None:
        vectors = chain.encoder.item_vectors(rows) if len(rows) else torch.empty(0, index.index.vectors.dim)
        stays = ~torch.isin(numbers, torch.tensor(gone, dtype=torch.int64))
        found = rows.filter(pl.Series(stays.numpy(), dtype=pl.Boolean))
        index = index.changed(numbers[stays], vectors=vectors[stays], items=found, gone=gone)
        if rescorer is not None and len(rows):
            rescorer = rescorer.changed(numbers, vectors=vectors)
    if ranker is not None and len(rows):
        ranker = ranker.with_items(numbers, frame=rows)
    columns = numbers_of(catalogue.frame, names=list(chain.numbers))
    parts = {"index": index, "ranker": ranker, "rescorer": rescorer}
    return dataclasses.replace(chain, catalogue=catalogue, numbers=columns, **parts)


def _ids(catalogue: ItemCatalogue, rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The canonical ids of rows, each there once."""
    name = catalogue.columns.id
    ids = []
    for row in rows:
        refuse_unknown(row, catalogue.frame.columns, what="item")
        id = canonical_id(row.get(name), column=name)
        if id is None:
            raise _wrong(f"the id of the item in column {name!r}", f"{row!r:.80}")
        ids.append(id)
    if len(set(ids)) < len(ids):
        raise _wrong("each item once", f"{Counter(ids).most_common(1)[0][0]!r:.80} several times")
    return ids


def _frame(catalogue: ItemCatalogue, rows: Sequence[Mapping[str, object]], *, written: WrittenColumns) -> pl.DataFrame:
    schema = catalogue.frame.schema
    columns = []
    for name in schema:
        columns.append(series_of(name, [row.get(name) for row in rows], dtype=schema[name], written=written.of(name)))
    return pl.DataFrame(columns)


def _wrong(expected: str, found: str) -> RequestError:
    return RequestError(
        expected=expected, found=found, where="request, field 'upsert'", ways_out=("correct the row", "leave it out")
    )
