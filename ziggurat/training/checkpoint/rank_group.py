"""What ranks tell each other about a checkpoint: small JSON messages, and one rank's error told by all.

A checkpoint of several ranks needs two agreements: who writes what (before), and whether all of it reached the disk
(after). Both are an all-gather of JSON over a gloo group of its own, because the second runs on a background thread
while training uses the default group, and because torch's object collectives send pickles.

If an action fails on one rank, every rank raises: nobody waits for a message that will not come. A rank that died is
noticed at once, by its connection; for one that stands still the others wait `timeout_s`, and then name it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Generic, TypedDict, TypeVar

import torch.distributed as dist

from ziggurat.config import JSON
from ziggurat.errors import CheckpointError, error_from_json
from ziggurat.parallel.agreement import all_gather_bytes
from ziggurat.parallel.lost_ranks import communicating, silent_ranks
from ziggurat.parallel.process_groups import end_group, meeting_group
from ziggurat.training.checkpoint.errors import DamagedCheckpointError

T = TypeVar("T")
M = TypeVar("M")

TIMEOUT_S = 1800.0


class _Reply(TypedDict, Generic[T], total=False):
    """Message of one rank: a result or an error; neither where it had nothing to do."""

    value: T
    error: dict[str, JSON]


class CheckpointRanks:
    """The ranks that share a checkpoint. Without torch.distributed it is this process alone.

    Args:
        process_group: whose ranks take part; None for all. Constructing is collective over these ranks.
        timeout_s: how long a rank waits for one that still writes.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.rank = 0
        self.world_size = 1
        self._group: dist.ProcessGroup | None = None
        self._is_of_some = process_group is not None
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank(process_group)
            self.world_size = dist.get_world_size(process_group)
        if self.world_size > 1:
            ranks = dist.get_process_group_ranks(process_group) if process_group is not None else None
            with communicating("meeting of the ranks that share a checkpoint"):
                self._group = meeting_group(ranks, timeout_s=timeout_s)

    def close(self) -> None:
        """End the group that ranks agree over, after the last agreement; all ranks do.

        One of some ranks of the job stays until the job ends. torch calls it by a hash of its ranks, and a second group
        of that name would wait for the addresses that the first has left in the job's store.
        """
        if self._group is not None and not self._is_of_some:
            end_group(self._group)

    @property
    def is_coordinator(self) -> bool:
        """True on the rank that makes folders, writes the manifest and publishes."""
        return self.rank == 0

    def agree(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; the results of all, in rank order.

        Raises:
            CheckpointError: on every rank, if it was raised on any; names the rank.
            Exception: whatever else `action` raised here; the other ranks get a CheckpointError.
        """
        return self._replies(action)

    def _replies(self, action: Callable[[], T] | None) -> list[T]:
        """Return the results of all ranks that had something to do, in rank order; None: this one has not."""
        failure: BaseException | None = None
        reply: _Reply[T] = {}
        try:
            if action is not None:
                reply["value"] = action()
        except BaseException as error:
            failure = error
            reply["error"] = (error if isinstance(error, CheckpointError) else _unexpected(error)).to_json()
        try:
            replies = [reply] if self._group is None else self._all_gather(reply, self._group)
        finally:
            if failure is not None:  # also where the other ranks cannot be reached any more
                raise failure
        for rank, other in enumerate(replies):
            if "error" in other:
                told = error_from_json(other["error"], more=(DamagedCheckpointError,))
                # The paths in it may be those of another host.
                told.where = f"{told.where} (rank {rank})"
                raise told
        return [other["value"] for other in replies if "value" in other]

    def agree_on_coordinator(self, action: Callable[[], T]) -> T:
        """Run `action` on the coordinator alone; its result, or its error, on every rank."""
        return self._replies(action if self.is_coordinator else None)[0]

    def _all_gather(self, message: M, group: dist.ProcessGroup) -> list[M]:
        try:
            return list(map(json.loads, all_gather_bytes(json.dumps(message).encode(), group=group)))
        except RuntimeError as error:
            silent = silent_ranks()
            found = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(
                expected=f"an answer from all {self.world_size} ranks",
                found=f"no answer from rank {', '.join(map(str, silent))}: {found}" if silent else found,
                where=f"rank {self.rank}, agreement on a checkpoint",
                ways_out=(
                    "look for the rank that ended first in the logs of the others, and restart the run",
                    "if it only takes long to write: --training.checkpoint.timeout-s 7200",
                ),
            ) from error


def _unexpected(error: BaseException) -> CheckpointError:
    return CheckpointError(
        expected="every rank to do its part of the checkpoint",
        found=f"{type(error).__name__}: {error}",
        where="checkpoint",
        ways_out="see the traceback of that rank",
    )
