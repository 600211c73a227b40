"""Record the collectives of every rank, and prove that no order of theirs can stop a job.

    with recorded_collectives() as mine:          on each rank
        step(batch)
    check_order([… what each rank recorded …])    where all records are

Under NCCL a collective is a kernel that waits on the GPU until the same one runs on the other ranks, and a GPU computes
the kernels of several communicators in whatever order the host has issued them. Two ranks that issue two communicators'
collectives in opposite orders may wait for each other for ever; gloo, whose threads wait, never shows it. So:

    in each communicator     all its ranks issue the same kinds, of the same types, and bytes that fit
    between communicators    "was issued before", over all ranks together, has no cycle

Collectives of the host are ordered within the thread that waits for them: what a thread beside the step issues on a
communicator of its own may come before or after. Those of GPUs are ordered whatever thread has issued them.

A process group has a communicator for tensors of the host and one for those of GPUs. Recording takes memory that ranks
of a host share out of the way, as it is on GPUs.
"""

from __future__ import annotations

import contextlib
import graphlib
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ziggurat.testing.pretend_cuda import PretendCuda

_KINDS = (
    "all_reduce",
    "all_gather",
    "all_gather_single",
    "all_gather_into_tensor",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
_HELD = {"_ALL_GATHER": "all_gather_into_tensor", "_REDUCE_SCATTER": "reduce_scatter_tensor"}
_OF_ONE_SIZE = ("all_reduce", "broadcast")


T = TypeVar("T")


@dataclass(frozen=True)
class Collective:
    """One collective that a rank has issued.

    Args:
        communicator: name of the process group, and the kind of device.
        ranks: of the group, by the launcher's numbers.
        kind: name of torch's function.
        dtype: of what travels.
        numel: numbers of the tensor that this rank gives.
        sent: numbers for each rank of the group; () where all get the same.
        received: numbers from each.
        where: file and line that issued it.
        thread: that issued it.
    """

    communicator: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str
    numel: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    where: str
    thread: str = ""

    @property
    def on_gpus(self) -> bool:
        """True if tensors of GPUs travel."""
        return self.communicator.endswith("/cuda")

    def __str__(self) -> str:
        return f"{self.kind} of {self.dtype} on {self.communicator} {list(self.ranks)} ({self.where})"


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[Collective]]:
    """Record the collectives that this rank issues inside, in order; pretended tensors of GPUs travel too."""
    from ziggurat.parallel.exchange import collectives

    found: list[Collective] = []
    with contextlib.ExitStack() as changed:
        for kind in _KINDS:
            if hasattr(dist, kind):
                changed.enter_context(mock.patch.object(dist, kind, _recording(kind, getattr(dist, kind), found)))
        for name, kind in _HELD.items():
            recording = _recording(kind, getattr(collectives, name), found)
            changed.enter_context(mock.patch.object(collectives, name, recording))
        nothing = mock.patch("ziggurat.parallel.topology.open_host_memory", return_value=(None, "recorded"))
        changed.enter_context(nothing)
        yield found


def _recording(kind: str, function: Callable[..., T], found: list[Collective]) -> Callable[..., T]:
    def recorded(*args: Any, **kwargs: Any) -> T:
        group = kwargs.get("group") or next((each for each in args if isinstance(each, dist.ProcessGroup)), None)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        kinds = {each.device.type for each in tensors}
        assert len(kinds) == 1, f"{kind}: tensors of {kinds}"
        is_exchange = kind == "all_to_all_single"
        given = tensors[1] if is_exchange else tensors[0] if kind in _OF_ONE_SIZE else tensors[-1]
        sizes = [tuple(each) for each in (args[2:4] if is_exchange else ()) if each is not None]
        group = group or dist.distributed_c10d._get_default_group()
        found.append(
            Collective(
                communicator=f"{group.group_name}/{kinds.pop()}",
                ranks=tuple(dist.get_process_group_ranks(group)),
                kind=kind,
                dtype=str(given.dtype).removeprefix("torch."),
                numel=given.numel(),
                sent=sizes[1] if sizes else (),
                received=sizes[0] if sizes else (),
                where=_caller(),
                thread=threading.current_thread().name,
            )
        )
        args, kwargs = tree_map_only(PretendCuda, lambda each: each.host, (args, kwargs))
        with _disable_current_modes():  # inside what travels are tensors of the host
            return function(*args, **kwargs)

    return recorded


def _caller() -> str:
    """The nearest place in the package, below what all exchanges share."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "ziggurat" in path.parts and path.name not in ("collectives.py", "replicated.py"):
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


def check_order(by_rank: Sequence[Sequence[Collective]]) -> None:
    """Raise AssertionError unless the collectives of all ranks meet, in one order; see the module's docstring.

    Args:
        by_rank: what each rank recorded, in the order of the launcher's ranks.
    """
    issued: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    order: graphlib.TopologicalSorter[tuple[str, int]] = graphlib.TopologicalSorter()
    for rank, collectives in enumerate(by_rank):
        latest: dict[str, tuple[str, int]] = {}  # of each thread, and of the GPU
        for each in collectives:
            own = issued[each.communicator][rank]
            node = (each.communicator, len(own))
            own.append(each)
            queues = (f"thread {each.thread}", *(("GPU",) if each.on_gpus else ()))
            order.add(node, *(latest[queue] for queue in queues if queue in latest))
            latest |= dict.fromkeys(queues, node)
    for communicator, found in issued.items():
        _check_communicator(communicator, found)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        lines = [str(next(iter(issued[name].values()))[number]) for name, number in error.args[1]]
        raise AssertionError("ranks issue these in opposite orders:\n" + "\n".join(lines)) from None


def _check_communicator(communicator: str, found: dict[int, list[Collective]]) -> None:
    members = next(iter(found.values()))[0].ranks
    assert set(found) == set(members), f"{communicator}: of ranks {members} only {sorted(found)} take part"
    rounds = zip(*(found[rank] for rank in members), strict=False)
    for number, together in enumerate(rounds):
        same = {(each.kind, each.dtype, each.ranks, each.where) for each in together}
        assert len(same) == 1, f"{communicator}, number {number}:\n" + "\n".join(map(str, together))
        if together[0].kind in _OF_ONE_SIZE:
            assert len({each.numel for each in together}) == 1, f"{together[0]}: {[each.numel for each in together]}"
        for place, each in enumerate(together):
            came = tuple(other.sent[place] for other in together) if each.sent else ()
            assert each.received == came, f"{each}: waits for {each.received}, and {came} are sent"
    counts = {rank: len(found[rank]) for rank in members}
    assert len(set(counts.values())) == 1, f"{communicator}: {counts} collectives by rank"


def on_gpus() -> contextlib.AbstractContextManager[object]:
    """Let a job of gloo make the communicators of one of NCCL."""
    return mock.patch.multiple("ziggurat.parallel.topology", has_nccl=lambda: True)
