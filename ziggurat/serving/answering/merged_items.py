"""Changes merged into the items of an export: a folder like the export's own `items/`, of the catalogue as it is now.

    merged-00000123/
      export.json                 the manifest: size and SHA-256 of every file, and after which change
      items/catalogue.parquet     all rows by number; those of deleted items are marked
      items/index.safetensors     everything that is there, in clusters; nothing in a fresh segment
      items/over_arch.safetensors parts of all items, where there is an OverArch

Numbers of items are the same in every process that has made the same changes, so whoever has made them already takes
the index alone, and keeps the rest (`with_index`); whoever has not takes everything (`with_items`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from ziggurat.errors import ExportError
from ziggurat.files import replacing_folder
from ziggurat.serving.answering.chain import Chain, ChangesMade, numbers_of
from ziggurat.serving.answering.item_catalogue import ItemCatalogue
from ziggurat.serving.answering.item_search import INDEX_FILE, ItemSearch
from ziggurat.serving.answering.live_items import ItemChanges
from ziggurat.serving.answering.ranker import Ranker
from ziggurat.serving.answering.rescorer import OVER_ARCH_FILE, Rescorer
from ziggurat.serving.export.export_folder import MANIFEST_NAME, ExportFolder, damaged, open_export, seal_export
from ziggurat.serving.request_rows import canonical_id
from ziggurat.typed import CountOrNone, Reader, checked

_MAX_ENCODED = 1.5  # rows that a ranker keeps for an item


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Merge:
    """The facts of merged items that their manifest gives.

    Args:
        num_changes: that are in it.
        num_items: rows of the catalogue.
        num_gone: those of them that are deleted.
        at_s: when it was made, in seconds since 1970.
        export: version of the export that the changes belong to.
    """

    num_changes: CountOrNone
    num_items: CountOrNone
    num_gone: CountOrNone
    at_s: float
    export: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergedItems:
    """Merged items on disk, checked.

    Args:
        folder: with a file for each part.
        about: what they are.
    """

    folder: ExportFolder
    about: Merge

    @staticmethod
    def write(chain: Chain, path: Path, *, export: str) -> None:
        """Merge the items of a chain and write them, whole or not at all.

        Args:
            chain: with a catalogue; it stays as it is.
            path: of the folder.
            export: version of the export.

        Raises:
            FileError: the system refuses.
        """
        catalogue = chain.needed_catalogue
        num_items = len(catalogue)
        num_gone = len(catalogue) - catalogue.num_items()
        about = Merge(
            num_changes=chain.changes.num, num_items=num_items, num_gone=num_gone, at_s=time.time(), export=export
        )
        with replacing_folder(path) as temporary:
            catalogue.save(temporary)
            if chain.index is not None:
                # A new index, with clusters of the items as they are now; the chain keeps searching the old one.
                chain.index.merged(catalogue.frame).save(temporary / INDEX_FILE)
            if chain.rescorer is not None:
                chain.rescorer.save(temporary / OVER_ARCH_FILE)
            seal_export(temporary, sources=(), facts=dataclasses.asdict(about), made_with={})

    @staticmethod
    def open(path: Path, *, export: str) -> MergedItems:
        """Check every byte of merged items.

        Raises:
            ExportError: a file is damaged or missing, or they belong to another export; names it.
        """
        folder = open_export(path)
        where = str(path / MANIFEST_NAME)
        about = Reader(where=where, noun="field", error=ExportError).build(Merge, folder.manifest.facts)
        if about.export != export:
            raise damaged(where, expected=f"items of export {export}", found=f"of export {about.export:.80}")
        return MergedItems(folder=folder, about=about)

    def with_items(self, chain: Chain) -> Chain:
        """The chain that has these items, whatever it had before; raises ExportError."""
        catalogue = ItemCatalogue.load(self.folder)
        if (len(catalogue), catalogue.num_items()) != (
            self.about.num_items,
            self.about.num_items - self.about.num_gone,
        ):
            raise damaged(self.folder.path, expected=f"{self.about.num_items:,} items", found=f"{len(catalogue):,}")
        ranker = chain.ranker
        rescorer = chain.rescorer
        if ranker is not None:
            ranker = Ranker(ranker.packed, item_columns=catalogue.columns.features)
            ranker.encode_items(catalogue.frame)
        if rescorer is not None:
            path = self.folder.file(OVER_ARCH_FILE)
            rescorer = Rescorer.load(path, over_arch=rescorer.over_arch, num_items=len(catalogue))
        return dataclasses.replace(
            chain,
            catalogue=catalogue,
            ranker=ranker,
            rescorer=rescorer,
            index=None if chain.index is None else self._index_of(chain.index, chain.catalogue, catalogue),
            numbers=numbers_of(catalogue.frame, names=list(chain.numbers)),
            changes=dataclasses.replace(self._changes(chain), num=self.about.num_changes),
        )

    def with_index(self, chain: Chain, *, later: Iterable[ItemChanges]) -> Chain:
        """The chain with this index, in which items that changed later are as they are in the chain.

        Args:
            chain: that has made all changes of the index, and those that came later.
            later: changes that are not in the index.

        Raises:
            ExportError: the index is damaged.
        """
        catalogue = chain.needed_catalogue
        index = chain.index
        if index is not None:
            name = catalogue.columns.id
            ids = {canonical_id(each) for change in later for each in change.delete}
            ids |= {canonical_id(row.get(name)) for change in later for row in change.upsert}
            # Deleted items count, too: the index still has those that went after it was made.
            numbers = np.unique(catalogue.rows_ever([id for id in ids if id]))
            numbers = numbers[numbers >= 0]
            is_gone = catalogue.gone[numbers]
            there = torch.from_numpy(numbers[~is_gone])
            own = self._index().changed(
                there,
                vectors=index.vectors_of(there),
                items=catalogue.frame[there.numpy()],
                gone=numbers[is_gone].tolist(),
            )
            index = ItemSearch(own.index, shards=index.shards)  # they know all changes already
        ranker = chain.ranker
        if ranker is not None and ranker.num_encoded > _MAX_ENCODED * len(catalogue):  # each change adds its rows
            ranker = Ranker(ranker.packed, item_columns=catalogue.columns.features)
            ranker.encode_items(catalogue.frame)
        return dataclasses.replace(chain, index=index, ranker=ranker, changes=self._changes(chain))

    def _changes(self, chain: Chain) -> ChangesMade:
        return dataclasses.replace(chain.changes, num_merged=self.about.num_changes, merged_at_s=self.about.at_s)

    def _index_of(self, before: ItemSearch, old: ItemCatalogue | None, new: ItemCatalogue) -> ItemSearch:
        """The index; shards are told how these items differ from those that they were told of."""
        index = self._index()
        shards = before.shards
        if shards is not None and old is not None:
            same = np.zeros(len(new), dtype=bool)
            # Numbers are never given twice, so that the first items are the old ones, changed or not.
            same[: len(old)] = (old.frame.hash_rows() == new.frame[: len(old)].hash_rows()).to_numpy() & ~old.gone
            there = torch.from_numpy(np.flatnonzero(~same & ~new.gone))
            vectors = index.vectors_of(there)
            rows = new.frame[there.numpy()]
            shards = shards.changed(there, vectors=vectors, items=rows, gone=np.flatnonzero(new.gone).tolist())
        return ItemSearch(index.index, shards=shards)

    def _index(self) -> ItemSearch:
        path = self.folder.file(INDEX_FILE)
        return ItemSearch.load(path, num_items=self.about.num_items, num_gone=self.about.num_gone)
