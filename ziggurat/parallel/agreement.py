"""Agreement: what ranks tell each other outside of the step, and one rank's error told by all.

    prepared = agreement.on_first(lambda: prepare(…))        rank 0 works, the others wait; its result goes to all
    agreement.everywhere(lambda: open(prepared))             all work; an error of one is raised by all

Reading and planning happen once, on one rank. If that rank fails, the others must not wait for it: they raise the same
error, with its four parts, and name the rank that it came from. Messages are JSON over a gloo group of its own, whose
patience is long (preparing data takes hours); a rank that dies is noticed at once, by its connection.

Without torch.distributed, and for one rank, everything is a plain call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ziggurat import errors
from ziggurat.config import JSON
from ziggurat.errors import TopologyError, ZigguratError
from ziggurat.parallel.collectives import communicating

_PATIENCE = timedelta(days=7)


class Agreement:
    """All ranks of the job, or this process alone; see the module's docstring. Constructing is collective.

    Attributes:
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(backend="gloo", timeout=_PATIENCE)
            assert isinstance(group, dist.ProcessGroup)
            self._group = group

    @property
    def is_first(self) -> bool:
        """True on the rank that writes logs and reports."""
        return self.rank == 0

    def on_first(self, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; its result (plain data), or its error, on every rank.

        Raises:
            ZigguratError: what rank 0 raised, on every rank.
            TopologyError: rank 0 ended, or raised something else.
        """
        return self.everywhere(lambda: action() if self.is_first else None)[0]

    def everywhere(self, action: Callable[[], Any]) -> list[Any]:
        """Run `action` on every rank; the results of all (plain data), in rank order.

        Raises:
            ZigguratError: what `action` raised on this rank, or on the first of the ranks where it failed.
            TopologyError: a rank ended, or raised something else.
        """
        if self._group is None:
            return [action()]
        failure: BaseException | None = None
        message: dict[str, Any] = {}
        try:
            message["value"] = action()
        except BaseException as error:
            failure, message["error"] = error, _error_to_json(error)
        try:
            replies = self.gather(message)
        finally:
            if failure is not None:  # also where the others cannot be reached any more
                raise failure
        for rank, reply in enumerate(replies):
            if "error" in reply:
                raise _error_from_json(reply["error"], rank=rank)
        return [reply["value"] for reply in replies]

    def gather(self, value: JSON) -> list[Any]:
        """What every rank says, in rank order; collective."""
        if self._group is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        with communicating("agreement of all ranks"):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            dist.all_gather(lengths, torch.tensor([text.numel()]), group=self._group)
            padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
            padded[: text.numel()] = text
            texts = [torch.zeros_like(padded) for _ in range(self.world_size)]
            dist.all_gather(texts, padded, group=self._group)
        pairs = zip(texts, lengths, strict=True)
        return [json.loads(text[: int(length)].numpy().tobytes()) for text, length in pairs]


def _error_to_json(error: BaseException) -> dict[str, Any]:
    if isinstance(error, ZigguratError):
        parts = {"expected": error.expected, "found": error.found, "where": error.where}
        return {"kind": type(error).__name__, **parts, "ways_out": list(error.ways_out)}
    return {
        "kind": TopologyError.__name__,
        "expected": "every rank to do its part",
        "found": f"{type(error).__name__}: {error}",
        "where": f"process {os.getpid()}",
        "ways_out": ["see the traceback of that rank"],
    }


def _error_from_json(parts: dict[str, Any], *, rank: int) -> ZigguratError:
    kind = getattr(errors, parts["kind"], TopologyError)
    if not (isinstance(kind, type) and issubclass(kind, ZigguratError)):
        kind = TopologyError
    return kind(
        expected=parts["expected"],
        found=parts["found"],
        where=f"rank {rank}: {parts['where']}",
        ways_out=parts["ways_out"],
    )
