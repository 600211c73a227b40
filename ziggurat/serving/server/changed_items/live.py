"""Items that change while a server runs: a journal beside the export, which every worker follows.

    POST /admin/items ─► worker: try, write exports/films.changes/VERSION/00000003.json, apply ─► {"version": "…+3", …}
                                         │
    other workers, spares, later ones ◄──┘  read what is new twice a second, and when they load

    many changes ─► one worker, in the background: merge them into clusters, write merged-00000123/, delete 1 … 123
                                         │
    all workers, and later ones ◄────────┘  take its index, in which what changed meanwhile is as it is

A change is whole in the journal before anybody applies it, and its number is taken by one worker alone, so every
process has the same changes in the same order, and items have the same numbers, after any crash. For up to half a
second two workers may answer from two states; each answer says from which, by the numbers behind its version. A new
version of the export begins with a journal of its own, which is empty. `journal.py` says which files there are.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.errors import ExportError, FileError, MissingFileError, ZigguratError
from ziggurat.serving.answering.chain import Chain
from ziggurat.serving.answering.live_items import ChangedItems, ItemChanges, change_items, folded
from ziggurat.serving.answering.merged_items import MergedItems
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.server.changed_items.journal import Journal
from ziggurat.serving.server.processes.control import in_lines
from ziggurat.serving.server.reading import refused, refused_as

FOLLOW_S = 0.5
_MAX_CHANGES = 10_000
_LOWER = 10  # nice: merging leaves the processor to answers
_log = logging.getLogger("ziggurat.server")


@dataclass(frozen=True, kw_only=True)
class MergePolicy:
    """The policy of when changes are merged into the clusters of the index.

    Args:
        share: of the items that changed since the last merge, and
        least_items: changed items that are worth it.
        most_changes: or as many changes, whatever they changed.
        again_s: seconds until the next attempt after one that failed.
    """

    share: float = 0.1
    least_items: int = 1000
    most_changes: int = 1000
    again_s: float = 60.0

    def wants(self, chain: Chain) -> bool:
        """Return True if it is time to merge."""
        applied = chain.changes
        if _has_shards(chain):
            return False
        if applied.num - applied.num_merged >= self.most_changes:
            return True
        if chain.index is None:
            return False
        changed = chain.index.index.num_unmerged
        return changed >= max(self.least_items, self.share * len(chain.index.index))


class LiveItems:
    """A recommender whose items follow a journal.

    Args:
        recommender: whose chain is replaced.
        folder: of the journal; created when the first change comes.
        policy: when to merge.
    """

    def __init__(self, recommender: Recommender, *, folder: Path, policy: MergePolicy | None = None) -> None:
        self.recommender = recommender
        self.journal = Journal(folder)
        self.policy = policy or MergePolicy()
        self._lock = threading.Lock()
        self._merging: threading.Thread | None = None
        self._not_before = 0.0
        self._last_problem = ""

    @staticmethod
    def of(answerer: object, *, beside: Path | None = None) -> LiveItems | None:
        """Return the live items of an answerer that can change them; None for another one.

        Args:
            answerer: what was loaded.
            beside: folder of the export that the journal lies beside; None: the folder that was loaded.
        """
        if not isinstance(answerer, Recommender) or answerer.chain.catalogue is None:
            return None
        path = beside or answerer.export.path
        return LiveItems(answerer, folder=path.with_name(f"{path.name}.changes") / answerer.export.version)

    def follow(self) -> int:
        """Apply the new changes of the journal, and start a merge if it is time; return the number of all changes.

        Raises:
            ExportError: a file of the journal is damaged or missing; names it.
        """
        with self._lock:
            number = self._follow()
        is_merging = self._merging is not None and self._merging.is_alive()
        if not is_merging and time.monotonic() >= self._not_before and self.policy.wants(self.recommender.chain):
            self._merging = threading.Thread(target=self._merge_in_background, daemon=True, name="merge")
            self._merging.start()
        return number

    def keep_up(self) -> None:
        """Follow the journal; where that cannot be done, keep the items as they are and log it, once."""
        try:
            self.follow()
        except (ZigguratError, OSError) as problem:
            if self._last_problem != str(problem):
                _log.error("the journal of items cannot be followed; the items stay as they are\n%s", in_lines(problem))
            self._last_problem = str(problem)
        else:
            self._last_problem = ""

    def change(self, changes: ItemChanges) -> ChangedItems:
        """Write a change into the journal and apply it.

        Raises:
            RequestError: it cannot be done; nothing is then.
            RefusedRequestError: the journal is full or damaged, or cannot be written.
        """
        # First this lock, then that of the journal, as in `merge`: in two orders, two threads could wait for each
        # other.
        with self._lock:
            try:
                with self.journal.locked():
                    return self._change(changes)
            except OSError as problem:
                if isinstance(problem, ZigguratError) and not isinstance(problem, FileError):
                    raise refused_as(409, problem) from problem
                found = problem.found if isinstance(problem, FileError) else problem.strerror or str(problem)
                if _is_full(problem):
                    raise _full(self.journal.folder, found) from problem
                raise _unwritable(self.journal.folder, found, "let the server write there") from problem

    def merge(self) -> bool:
        """Merge all changes into the clusters of the index; False where there are none, or another worker does it.

        An index in shards is not merged: the shards hold what differs from the export.

        Raises:
            FileError: there is no room, or no permission.
            ExportError: a file of the journal is damaged; names it.
        """
        if not self.journal.folder.is_dir():
            return False
        with self.journal.alone() as is_locked:
            if not is_locked:
                return False
            with self._lock:
                number = self._follow()
                chain: Chain = self.recommender.chain
            if number == chain.changes.num_merged or _has_shards(chain):
                return False
            # Without the lock: it takes long, and items go on changing behind `number`.
            MergedItems.write(chain, self.journal.merged_path(number), export=self._export)
            # This process applies them first: the changes that they were merged from are deleted next.
            with self._lock:
                self._follow()
                with self.journal.locked():
                    self.journal.forget(number)
                self._count_bytes()
        return True

    @property
    def _export(self) -> str:
        return str(self.recommender.export.version)

    def _merge_in_background(self) -> None:
        with suppress(OSError, AttributeError):  # where threads have no priority of their own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWER)
        torch.set_num_threads(1)  # of this thread
        try:
            begin = time.monotonic()
            if self.merge():
                applied = self.recommender.chain.changes
                _log.info("merged %s changes of items in %.1f s", f"{applied.num_merged:,}", time.monotonic() - begin)
        except (ZigguratError, OSError) as problem:
            self._not_before = time.monotonic() + self.policy.again_s
            _log.error("changes of items cannot be merged; the next attempt is in a minute\n%s", in_lines(problem))

    def _change(self, changes: ItemChanges) -> ChangedItems:
        """Write a change and apply it; the journal is locked."""
        number = self._follow() + 1
        chain, outcome = change_items(self.recommender.chain, changes)  # what cannot be applied must not be written
        # Nothing would change, so no number is used up.
        if chain is self.recommender.chain:
            return dataclasses.replace(outcome, version=self.recommender.version)
        if number - self.recommender.chain.changes.num_merged > _MAX_CHANGES:
            raise _unwritable(self.journal.folder, f"{_MAX_CHANGES:,} changes that are not merged", "wait for a merge")
        # On the disk before it is applied: a change that was answered outlives this process.
        if not self.journal.write(changes, number):
            raise _unwritable(self.journal.folder, f"change {number:,} already", "stop the older server")
        self.recommender.become(lambda _: (chain, None))
        self._count_bytes()
        return dataclasses.replace(outcome, version=self.recommender.version)

    def _follow(self) -> int:
        """Take merged items, then the changes behind them."""
        merged = self.journal.merged()
        applied = self.recommender.chain.changes
        if merged > applied.num_merged:
            try:
                self._apply_merged(MergedItems.open(self.journal.merged_path(merged), export=self._export))
            except (ExportError, MissingFileError):
                if self.journal.merged() > merged:  # and these were deleted
                    return self._follow()
                raise
        there = self.recommender.num_changes
        if new := self.journal.after(there):
            self._apply(new, number=there + len(new))
        if new or merged > applied.num_merged:
            self._count_bytes()
        return there + len(new)

    def _apply_merged(self, merged: MergedItems) -> None:
        number = merged.about.num_changes
        if number > self.recommender.num_changes:
            self.recommender.become(lambda chain: (merged.with_items(chain), None))
        else:
            later = self.journal.after(number)
            self.recommender.become(lambda chain: (merged.with_index(chain, later=later), None))

    def _apply(self, new: list[ItemChanges], *, number: int) -> None:
        changes, went = folded(new, id_column=self.recommender.chain.needed_catalogue.columns.id)

        def changed(chain: Chain) -> tuple[Chain, None]:
            chain, _ = change_items(chain, changes, went=went)
            return dataclasses.replace(chain, changes=dataclasses.replace(chain.changes, num=number)), None

        self.recommender.become(changed)

    def _count_bytes(self) -> None:
        size = self.journal.num_bytes()
        self.recommender.become(
            lambda chain: (
                dataclasses.replace(chain, changes=dataclasses.replace(chain.changes, journal_bytes=size)),
                None,
            )
        )


def _has_shards(chain: Chain) -> bool:
    return chain.index is not None and chain.index.shards is not None


def _is_full(problem: BaseException | None) -> bool:
    """Return whether an error comes from a disk, or a quota, without room."""
    while problem is not None:
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def _full(folder: Path, found: str) -> Exception:
    return refused(
        507,
        expected="room for a change of items on the disk of the journal",
        found=found,
        where=str(folder),
        ways_out=("free space on that disk, and ask again", "raise the quota of the server's user"),
    )


def _unwritable(folder: Path, found: str, way: str) -> Exception:
    return refused(
        409, expected="a journal that takes a change", found=found, where=str(folder), ways_out=(way, "export again")
    )
