"""One save from plan to publication; the life of a checkpoint before it has a name.

plan()     every rank: check, plan; coordinator: lock the folder, make the partial one, link earlier rows    collective
copy()     every rank: copy its chunks, so that training may go on (not where rows lie on a disk)    collective
write()    every rank: write its file; coordinator: manifest, rename                       collective, any thread
close()    however it ended: nothing partial stays, and the folder is free
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypedDict

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from ziggurat.config import JSON, from_json, to_json
from ziggurat.errors import CheckpointError
from ziggurat.parallel.tables.table_shard import as_shard
from ziggurat.training.checkpoint import retention
from ziggurat.training.checkpoint.manifest import Manifest, read_manifest
from ziggurat.training.checkpoint.planning import (
    PlannedTensor,
    global_plan,
    plan_to_json,
    results_from_json,
    results_to_json,
)
from ziggurat.training.checkpoint.rank_group import CheckpointRanks
from ziggurat.training.checkpoint.rows.earlier import (
    Earlier,
    Offer,
    RowsOfRank,
    SavedRows,
    choose,
    name_of,
    taken,
    with_earlier,
)
from ziggurat.training.checkpoint.rows.sparse import merged, split
from ziggurat.training.checkpoint.snapshot import SnapshotPlanner, check_tensors, encode_state
from ziggurat.training.checkpoint.storage import CheckpointReader, CheckpointWriter


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """Parts of a save that a rank makes on its own."""

    writer: CheckpointWriter
    rows: RowsOfRank


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """Parts of a save that all ranks have agreed on."""

    own: SavePlan
    metadata: Metadata


class _Said(TypedDict):
    """Facts that a rank says of a save before anybody plans it, as JSON."""

    step: int
    state: str
    offer: Offer


class _OwnPlan(TypedDict):
    """Plan of what a rank could write, as JSON."""

    plan: list[PlannedTensor]
    rows: dict[str, object]


class Saving:
    """A save in progress. See the module's docstring.

    Args:
        folder: of all checkpoints.
        step: of this one.
        ranks: that save together.
        pinned: mark the checkpoint so that it is never pruned.
        saved_rows: which rows of tables on a disk are written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        ranks: CheckpointRanks,
        pinned: bool,
        saved_rows: SavedRows = SavedRows.CHANGED,
    ) -> None:
        self.step = step
        self._saved_rows = saved_rows
        self._folder = folder
        self._ranks = ranks
        self._pinned = pinned
        self._final = retention.step_folder(folder, step)
        self._lock = retention.FolderLock(folder)
        self._planner = SnapshotPlanner()
        self._prepared: _Prepared | None = None
        self._planned: _Planned | None = None
        self.has_rows = False
        self._before: Manifest | None = None  # on the coordinator: of the checkpoint whose files are linked

    def plan(self, tensors: Mapping[str, Tensor], state: Mapping[str, JSON], *, guard: Callable[[], None]) -> None:
        """Agree on who writes what; `guard` runs on the coordinator, and may refuse the step."""
        replies = self._ranks.agree(lambda: self._prepare(tensors, state, guard))
        self._require_equal(replies)
        offers = [reply["offer"] for reply in replies if reply["offer"]["entries"]]
        self.has_rows = bool(offers)
        earlier = Earlier()
        if offers:
            chosen = partial(choose, self._folder, offers, step=self.step, rows=self._saved_rows)
            earlier = from_json(Earlier, self._ranks.agree_on_coordinator(lambda: to_json(chosen())), where="rows")
        planned = self._ranks.agree(lambda: self._plan_own(tensors, earlier))
        plans, metadata = global_plan(self._planner, [reply["plan"] for reply in planned])
        writer = self._parts.writer
        writer.sparse = merged([reply["rows"] for reply in planned])
        if self._before is not None:
            writer.sparse = with_earlier(writer.sparse, self._before, earlier.kept)
            writer.taken = taken(self._before, earlier.kept)
        own = writer.prepare_global_plan(plans)[self._ranks.rank]
        self._planned = _Planned(own=own, metadata=metadata)

    def copy(self) -> None:
        """Copy what this rank writes."""
        plan = self._agreed.own
        self._ranks.agree(lambda: self._planner.copy_plan(plan))

    def write(self) -> None:
        """Write, make durable, publish."""
        writer = self._parts.writer
        plan = self._agreed.own
        metadata = self._agreed.metadata
        written = self._ranks.agree(lambda: results_to_json(writer.write_data(plan, self._planner).value()))

        def publish() -> str | None:
            if self._pinned:
                # Before the checkpoint has its name: a kill in between must not leave it without its pin.
                retention.set_pin(self._folder, self.step)
            writer.finish(metadata, [results_from_json(results) for results in written])
            return name_of(CheckpointReader(self._final, step=self.step)) if self.has_rows else None

        name = self._ranks.agree_on_coordinator(publish)
        if name:
            self._parts.rows.saved(name)

    def close(self) -> None:
        """Remove what was not published, and unlock the folder. Harmless to repeat."""
        if self._lock.is_held:
            retention.remove_quietly(retention.partial_folder(self._final))
            if self._pinned and not self._final.exists():
                with suppress(CheckpointError):  # else it goes at the next start
                    retention.remove_pin(self._folder, self.step)
            self._lock.release()

    def _prepare(self, tensors: Mapping[str, Tensor], state: Mapping[str, JSON], guard: Callable[[], None]) -> _Said:
        check_tensors(tensors)
        writer = CheckpointWriter(self._final, step=self.step, state=state)
        _, on_disk = split(tensors)
        rows = RowsOfRank(on_disk, step=self.step, rank=self._ranks.rank)
        self._prepared = _Prepared(writer=writer, rows=rows)
        if self._ranks.is_coordinator:
            guard()
            retention.make_folder(self._folder)
            self._lock.acquire()
            writer.set_up_storage_writer(True)
        return {"step": self.step, "state": sha256(encode_state(state)).hexdigest(), "offer": rows.offer()}

    def _plan_own(self, tensors: Mapping[str, Tensor], earlier: Earlier) -> _OwnPlan:
        parts = self._parts
        whole, _ = split(tensors)
        if earlier.kept and self._ranks.is_coordinator:
            self._before = read_manifest(retention.step_folder(self._folder, earlier.step), step=earlier.step)
        rows = parts.rows.to_save(earlier, folder=self._folder)
        shards = {name: as_shard(tensor) for name, tensor in (whole | rows.tensors).items()}
        self._planner.set_up_planner(shards, is_coordinator=self._ranks.is_coordinator)
        plan = parts.writer.prepare_local_plan(self._planner.create_local_plan())
        return {"plan": plan_to_json(plan), "rows": rows.to_json()}

    @property
    def _parts(self) -> _Prepared:
        """Return what `plan` begins with, also where a later part of it failed."""
        assert self._prepared is not None, "plan() comes first"
        return self._prepared

    @property
    def _agreed(self) -> _Planned:
        """Return what `plan` ends with."""
        assert self._planned is not None, "plan() comes first"
        return self._planned

    def _require_equal(self, replies: list[_Said]) -> None:
        for what in ("step", "state"):
            values = [reply[what] for reply in replies]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise CheckpointError(
                    expected=f"the same {what} on every rank",
                    found=f"rank {other} differs from rank 0",
                    where=str(self._final),
                    ways_out=(
                        "gather what differs from rank to rank before saving",
                        "save it as tensors with the rank in their names",
                    ),
                )
