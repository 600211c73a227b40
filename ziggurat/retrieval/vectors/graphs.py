"""SearchGraphs: a search of a few queries as one CUDA graph, started by the host with one call.

A search launches some twenty kernels of a few microseconds each. Started one by one, the host takes ten times as long
as the GPU. None of them needs a number from the host that depends on the queries (`ops/scan/triton.py`), so all of them
are captured together and replayed:

    queries ─► copied into the graph's own ─► replay ─► copies of scores and positions ─► finite? (the only wait)

A graph is of one *form* of question: k, clusters, candidates, kind of masks, and the number of queries rounded up to a
power of two; places that are left over hold earlier queries, whose answers nobody reads. The second question of a form
is captured, so that a form that comes once costs nothing; the forms used last are kept. Answers are those of the
kernels, which are the same ones: the same bits.

Memory: what the largest form needs, since graphs that run one after the other share it. Threads take turns.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ziggurat.ops.bitmask import full_mask
from ziggurat.ops.kernel_choice import power_of_two
from ziggurat.ops.scan import Found, Masks
from ziggurat.ops.scan.triton import refuse_not_finite

_MAX_FORMS = 32

# From queries and masks to what was found, and which queries are finite.
Answer = Callable[[Tensor, Masks], tuple[Found, Bool[Tensor, "Q"]]]


class Form(NamedTuple):
    """The properties common to searches that share a graph, beside the number of queries and the kind of masks.

    Args:
        k: positions wanted.
        probes: clusters to look into.
        least: rows that have to pass.
        candidates: rows that the upper bits choose.
        rerank: positions that are scored again.
    """

    k: int
    probes: int
    least: int
    candidates: int
    rerank: int


class Captured(NamedTuple):
    """A search that is ready to be replayed.

    Args:
        replay: computes `found` and `are_finite` from `queries` and `masks`.
        queries: what is searched for.
        masks: one for all queries, or one each; None without.
        found: what the last replay found.
        are_finite: which of its queries are finite.
    """

    replay: Callable[[], object]
    queries: Tensor
    masks: Tensor | None
    found: Found
    are_finite: Tensor


class SearchGraphs:
    """Captures searches of an index, and answers by replaying them.

    Args:
        num_rows: of the index.
        capture: makes a search ready; by CUDA unless given.
    """

    def __init__(
        self, num_rows: int, *, capture: Callable[[Answer, Tensor, Tensor | None], Captured] | None = None
    ) -> None:
        self._num_rows = num_rows
        self._capture = capture or self._captured
        self._forms: OrderedDict[tuple[Hashable, ...], Captured | None] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = None
        self._full: Tensor | None = None

    # Copies begin without graphs: these read the buffers of the index that they were captured for.
    def __deepcopy__(self, memo: dict[int, object]) -> SearchGraphs:
        return SearchGraphs(self._num_rows)

    def __reduce__(self) -> tuple[object, ...]:
        return SearchGraphs, (self._num_rows,)

    def search(self, answer: Answer, queries: Float[Tensor, "Q D"], *, masks: Masks, form: Form) -> Found:
        """Answer queries, by a graph where their form has been asked for before.

        Args:
            answer: what is captured: it depends on queries, masks and the form alone.
            queries: `MAX_QUERIES` at most.
            masks: as for `VectorIndex.search`.
            form: of the question.

        Raises:
            DataError: a query is not finite.
        """
        num = len(queries)
        together = self._together(masks, queries.device)
        is_shared = together is not None and together.dim() == 1
        size = power_of_two(num, least=1)
        key = (form, size, queries.dtype, None if together is None else is_shared)
        with self._lock:
            if key not in self._forms:
                # A form is captured when it comes again: for a single search that would not pay.
                self._forms[key] = None
                if len(self._forms) > _MAX_FORMS:
                    self._forms.popitem(last=False)
                found, are_finite = answer(queries, masks)
                refuse_not_finite(queries, are_finite)
                return found
            self._forms.move_to_end(key)
            captured = self._forms[key]
            if captured is None:
                captured = self._forms[key] = self._made(answer, queries, together, size=size)
            captured.queries[:num].copy_(queries.detach())
            if together is not None:
                assert captured.masks is not None
                (captured.masks if is_shared else captured.masks[:num]).copy_(together)
            captured.replay()
            # Copies: the next replay writes to the same memory.
            found = Found(captured.found.scores[:num].clone(), captured.found.positions[:num].clone())
            refuse_not_finite(queries, captured.are_finite[:num])
            return found

    def _made(self, answer: Answer, queries: Tensor, masks: Tensor | None, *, size: int) -> Captured:
        own = torch.zeros(size, queries.shape[1], dtype=queries.dtype, device=queries.device)
        own_masks = masks
        if masks is not None:
            own_masks = masks.clone() if masks.dim() == 1 else masks[:1].repeat(size, 1)
        with torch.no_grad():
            return self._capture(answer, own, own_masks)

    def _captured(self, answer: Answer, queries: Tensor, masks: Tensor | None) -> Captured:
        computing = torch.cuda.current_stream(queries.device)
        side = torch.cuda.Stream(queries.device)
        side.wait_stream(computing)
        with torch.cuda.stream(side):
            answer(queries, masks)  # compiles kernels, and asks the device what is asked once
        computing.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads do on the device meanwhile does not break the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            found, are_finite = answer(queries, masks)
        self._pool = graph.pool()
        return Captured(replay=graph.replay, queries=queries, masks=masks, found=found, are_finite=are_finite)

    def _together(self, masks: Masks, device: torch.device) -> Tensor | None:
        """Return masks as one tensor, (W,) or (Q, W); a query without one has all bits set, which finds the same."""
        if masks is None or isinstance(masks, Tensor):
            return masks
        if all(mask is None for mask in masks):
            return None
        if self._full is None:
            self._full = full_mask(self._num_rows, device=device)
        each: Sequence[Tensor] = [self._full if mask is None else mask for mask in masks]
        return torch.stack(list(each))
