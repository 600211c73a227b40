"""Agreement: what ranks tell each other outside of the step, and one rank's error told by all.

    prepared = agreement.on_first(lambda: prepare(…))        rank 0 works, the others wait; its result goes to all
    agreement.everywhere(lambda: open(prepared))             all work; an error of one is raised by all
    require_equal({"training.seed": "3", …}, where=…)        all have the same, or all raise what differs and where

Reading and planning happen once, on one rank. If that rank fails, the others must not wait for it: they raise the same
error, with its four parts, and name the rank that it came from. Messages are JSON over a gloo group of its own, whose
patience is long (preparing data takes hours); a rank that dies is noticed at once, by its connection.

Ranks that differ in a setting train to the end in silence, with a result that belongs to nobody's settings, or wait for
each other for ever. So everything that must be equal is compared before it is used. 32 bytes a rank travel where all is
equal; only where it is not, the names and values of what differs, at most a few.

Without torch.distributed, and for one rank, everything is a plain call.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from typing import Generic, TypedDict, TypeVar

import torch
import torch.distributed as dist

from ziggurat.config import JSON
from ziggurat.errors import ConfigError, TopologyError, ZigguratError, error_from_json
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.process_groups import end_group, meeting_group

T = TypeVar("T")

PATIENCE_S = 4 * 3600.0
_MAX_DIFFERENCES = 12
_MAX_VALUE = 160


class _Reply(TypedDict, Generic[T], total=False):
    """Message of one rank: a result or an error; neither where it had nothing to do."""

    value: T
    error: dict[str, JSON]


class Agreement:
    """All ranks of the job, or this process alone; see the module's docstring. Constructing is collective.

    Args:
        patience_s: how long a rank waits for one that still works.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self.rank = 0
        self.world_size = 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.world_size = dist.get_world_size()
            with communicating("meeting of all ranks"):
                self._group = meeting_group(timeout_s=patience_s)

    def close(self) -> None:
        """End the group that ranks agree over, after the last agreement; all ranks do."""
        if self._group is not None:
            end_group(self._group)

    @property
    def is_first(self) -> bool:
        """True on the rank that writes logs and reports."""
        return self.rank == 0

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0; its result (plain data), or its error, on every rank.

        Raises:
            ZigguratError: what rank 0 raised, on every rank.
            TopologyError: rank 0 ended, or raised something else.
        """
        return self._replies(action if self.is_first else None)[0]

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; the results of all (plain data), in rank order.

        Raises:
            ZigguratError: what `action` raised on this rank, or on the first of the ranks where it failed.
            TopologyError: a rank ended, or raised something else.
        """
        return self._replies(action)

    def _replies(self, action: Callable[[], T] | None) -> list[T]:
        """Return the results of all ranks that had something to do, in rank order; None: this one has not."""
        if self._group is None:
            return [] if action is None else [action()]
        failure: BaseException | None = None
        message: _Reply[T] = {}
        try:
            if action is not None:
                message["value"] = action()
        except BaseException as error:
            failure = error
            # Errors of ours travel with their four parts; others are named, since their classes may not be known
            # there.
            message["error"] = (error if isinstance(error, ZigguratError) else _unexpected(error)).to_json()
        try:
            # A rank that failed answers too: otherwise the others would wait for it.
            replies = self.gather(message)
        finally:
            if failure is not None:  # also where the others cannot be reached any more
                raise failure
        for rank, reply in enumerate(replies):
            if "error" in reply:
                error = error_from_json(reply["error"])
                # The rank in front: many ranks print the same error, and only one has its traceback.
                error.where = f"rank {rank}: {error.where}"
                raise error
        return [reply["value"] for reply in replies if "value" in reply]

    def gather(self, value: T, *, what: str = "an exchange of its own") -> list[T]:
        """Gather the value of every rank, in rank order; collective.

        Args:
            value: of this rank.
            what: the call in which this rank is, the same on every rank. Ranks in different ones would wait for each
                other for hours in the next exchange, each for something else.

        Raises:
            ConfigError: the ranks are in different calls; on every rank.
        """
        if self._group is None:
            return [value]
        replies = list(map(json.loads, self.gather_bytes(json.dumps([what, value]).encode())))
        calls = [call for call, _ in replies]
        if len(set(calls)) > 1:
            raise _in_different_calls(calls)
        return [given for _, given in replies]

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order; collective."""
        if self._group is None:
            return [mine]
        with communicating("agreement of all ranks"):
            return all_gather_bytes(mine, group=self._group)


def all_gather_bytes(mine: bytes, *, group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of every rank of a gloo group, in rank order; collective. They travel padded to the longest."""
    # `frombuffer` refuses an empty buffer.
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
    # Lengths first: nobody knows how much the others have to say.
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([sent.numel()]), group=group)
    # `all_gather` wants equal lengths.
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: sent.numel()] = sent
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def require_equal(facts: Mapping[str, str], *, where: str, kind: type[ZigguratError] = ConfigError) -> None:
    """Compare `facts` over all ranks; collective. Without other ranks nothing happens.

    Args:
        facts: name to value, as `ziggurat.config.flattened` makes them of a config.
        where: what compares, for the message.
        kind: what to raise.

    Raises:
        ConfigError: (or `kind`) they are not equal, on every rank; names what differs, the ranks and their values.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    # Sorted, so that the order in which facts were found makes no other hash.
    text = json.dumps(dict(facts), sort_keys=True).encode()
    digest = torch.frombuffer(bytearray(hashlib.sha256(text).digest()), dtype=torch.uint8)
    # NCCL sends what lies on a GPU alone.
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    gathered = [torch.empty_like(digest, device=device) for _ in range(dist.get_world_size())]
    with communicating(f"comparison of all ranks, {where}"):
        dist.all_gather(gathered, digest.to(device))
    if all(torch.equal(other, gathered[0]) for other in gathered):
        return
    # All ranks come here at once, from one comparison: who takes a minute more is lost.
    agreement = Agreement(patience_s=60.0)
    first = agreement.on_first(lambda: {name: value[:_MAX_VALUE] for name, value in facts.items()})
    mine = {name: value[:_MAX_VALUE] for name, value in facts.items()}
    # Rank 0's in front, so that ranks name the same facts first.
    names = [name for name in dict.fromkeys([*first, *mine]) if first.get(name) != mine.get(name)]
    replies = agreement.gather((len(names), {name: mine.get(name) for name in names[:_MAX_DIFFERENCES]}))
    agreement.close()
    raise _differing(first, replies, where=where, kind=kind)


def _differing(
    first: dict[str, str], replies: list[tuple[int, dict[str, str | None]]], *, where: str, kind: type[ZigguratError]
) -> ZigguratError:
    """The error for what ranks said of how they differ from rank 0."""
    named = dict.fromkeys(name for _, values in replies for name in values)
    lines: list[str] = []
    for name in list(named)[:_MAX_DIFFERENCES]:
        ranks: dict[str | None, list[int]] = {}
        for rank, (_, values) in enumerate(replies):
            ranks.setdefault(values.get(name, first.get(name)), []).append(rank)
        shown = [f"{'absent' if value is None else value} on {ranks_text(those)}" for value, those in ranks.items()]
        lines.append(f"{name}: {'; '.join(shown)}")
    most = max(number for number, _ in replies)
    if most > len(lines):
        lines.append(f"and {most - len(lines)} more")
    odd = [rank for rank, (number, _) in enumerate(replies) if number]
    return kind(
        expected="the same settings, inputs, data and versions on every rank",
        found="\n          ".join(lines) or "values that differ after their first characters",
        where=f"{ranks_text(odd)} of {len(replies)}, unlike rank 0: {where}",
        ways_out=(
            "start every rank with the same command, on the same files",
            "install the same versions on every host",
        ),
    )


def _in_different_calls(calls: list[str]) -> ConfigError:
    """Return the error for ranks that met in calls of which each waits for the same call on all others."""
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call, []).append(rank)
    return ConfigError(
        expected="every rank in the same call: what all ranks do together would wait for the others for ever",
        found="\n          ".join(f"{ranks_text(those)}: {call}" for call, those in ranks.items()),
        where="meeting of all ranks",
        ways_out=(
            "call it on every rank, at the same step: not under a condition that holds on some ranks only, nor in a "
            "hook with on_every_rank = False",
            "leave the call out: the settings say when a run is evaluated and saved",
        ),
    )


def ranks_text(ranks: list[int]) -> str:
    """Ranks by number for a message, the first eight."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _unexpected(error: BaseException) -> TopologyError:
    return TopologyError(
        expected="every rank to do its part",
        found=f"{type(error).__name__}: {error}",
        where=f"process {os.getpid()}",
        ways_out="see the traceback of that rank",
    )
