"""Attention over histories whose events lie on several ranks: keys travel, or queries do.

    pass-KV   keys and values of the others come, a rank's at a time: what queries gather from them is added up
    pass-Q    queries go to the others, and what they gather there comes back

    round 1 … N − 1      rank r   ──►  rank r + round        what that one needs, and nothing else
                         rank r   ◄──  rank r − round
    pass-KV, backward    keys and values come once more, and their gradients go home in the opposite direction
    pass-Q, backward     queries and the gradients of their results go; the gradients of the queries come back

Pointwise attention (HSTU) has no softmax, so what parts of the history add is simply added; softmax layers merge by
the logarithms of their sums (`ops/attention/partial.py`). Only one message of a neighbour is there at a time, so memory
falls with the number of ranks: no rank gathers a history, but for 16 bytes an event where a bias asks for times.

Rounds overlap: the next message is on its way while the present one is computed with, where messages travel through a
process group. In the memory that ranks of one host share it would only lie there.

Bytes of a rank and round, T rows and K keys of the other that are needed, e bytes a number, heads side by side:

    forward     pass-KV  K (d + d_v) e              pass-Q  T (d + d_v) e          (softmax: T more numbers a head)
    backward    pass-KV  2 K (d + d_v) e            pass-Q  T (2 d + d_v) e        (softmax: T (d_v + 1) more)

Sources: ring pass-KV and pass-Q: Yang et al., arXiv 2411.01783, algorithms 2 to 4; context parallelism for HSTU by
all-to-all of jagged chunks: arXiv 2508.04711 (its abstract; no code is public).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.ops.attention.partial import Gathered, merge
from ziggurat.ops.attention.problem import AttentionForm
from ziggurat.ops.function_ctx import SavedCtx
from ziggurat.parallel.context.pieces import Pieces
from ziggurat.parallel.context.spread import Coming, Shape, Spread
from ziggurat.parallel.context.work import Arriving, Gradients, Travelling, Work


def spread_attention(
    q: Float[Tensor, "M H d"], k: Float[Tensor, "N H d"], v: Float[Tensor, "N H dv"], *, work: Work
) -> Float[Tensor, "M H dv"]:
    """Compute the attention of this rank's queries over the keys of all ranks; collective, and so is the backward pass.

    Args:
        q: queries of this rank's pieces.
        k: keys of its pieces.
        v: values of its pieces.
        work: who has what, and how scores become weights.
    """
    return _SpreadAttention.apply(q, k, v, work.w_pos, work.w_time, work)


class _SpreadCtx(SavedCtx, Protocol):
    work: Work


class _SpreadAttention(torch.autograd.Function):
    """The forward pass of one of the two ways, and its backward pass."""

    @staticmethod
    def forward(
        ctx: _SpreadCtx, q: Tensor, k: Tensor, v: Tensor, w_pos: Tensor | None, w_time: Tensor | None, work: Work
    ) -> Tensor:
        # Biases are inputs of the function, so their gradients come from `backward`; what it keeps is out of the
        # graph.
        work = replace(work, w_pos=_detached(w_pos), w_time=_detached(w_time))
        # Parts are added in FP32: rounded to BF16 at each part, the error would grow with the number of ranks.
        exact = _exact(q)
        is_softmax = work.settings.form is AttentionForm.SOFTMAX
        out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=exact, device=q.device)
        # The logarithm of a sum of nothing: what is merged first is taken as it is.
        lse = torch.full(q.shape[:2], -torch.inf, dtype=exact, device=q.device) if is_softmax else None
        whole = Gathered(out, lse)
        (_keys_travel if work.travelling is Travelling.KEYS else _queries_travel)(q, k, v, work=work, whole=whole)
        result = out.to(v.dtype)
        ctx.work = work
        # Pointwise forms need neither result nor sums for their gradient.
        ctx.save_for_backward(q, k, v, *((result, lse) if is_softmax else ()))
        return result

    @staticmethod
    def backward(ctx: _SpreadCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        work = ctx.work
        q, k, v, *rest = ctx.saved_tensors
        grad = grad.to(q.dtype)
        biases = (None if each is None else torch.zeros_like(each) for each in (work.w_pos, work.w_time))
        found = Gradients(*(_zeros(each) for each in (q, k, v)), *biases)
        of_queries = (q, grad, *rest)
        if work.travelling is Travelling.KEYS:
            _gradients_of_keys_travel(of_queries, (k, v), work=work, found=found)
        else:
            _gradients_of_queries_travel(of_queries, (k, v), work=work, found=found)
        dq, dk, dv = (each.to(like.dtype) for each, like in ((found.dq, q), (found.dk, k), (found.dv, v)))
        return dq, dk, dv, found.d_pos, found.d_time, None


def _keys_travel(q: Tensor, k: Tensor, v: Tensor, *, work: Work, whole: Gathered) -> None:
    spread = work.spread
    me = work.spread.group.position
    size = work.spread.group.size
    queries = work.side_of_queries(me, spread.queries[me], (q,))

    def start(shift: int) -> Arriving:
        return _send_keys(k, v, work=work, shift=shift)

    for shift, received in work.rounds(start):
        # In round `shift` what comes is from the rank that many places before.
        other = (me - shift) % size
        pieces = spread.keys[me] if received is None else _needed_keys(spread, other, by=me)
        work.gather(queries, work.side_of_keys(other, pieces, received or (k, v)), whole)


def _gradients_of_keys_travel(
    of_queries: Sequence[Tensor], of_keys: tuple[Tensor, Tensor], *, work: Work, found: Gradients
) -> None:
    spread = work.spread
    me = work.spread.group.position
    size = work.spread.group.size
    queries, (k, v) = work.side_of_queries(me, spread.queries[me], of_queries), of_keys

    def start(shift: int) -> Arriving:
        return _send_keys(k, v, work=work, shift=shift)

    for shift, received in work.rounds(start):
        other = (me - shift) % size
        if received is None:
            work.differentiate(queries, work.side_of_keys(me, spread.keys[me], of_keys), found)
            continue
        pieces = _needed_keys(spread, other, by=me)
        # Gradients of the other's keys apart, as they go home; those of queries and biases add up here.
        theirs = replace(found, dk=_zeros(received[0]), dv=_zeros(received[1]))
        work.differentiate(queries, work.side_of_keys(other, pieces, received), theirs)
        mine = _needed_keys(spread, me, by=(me + shift) % size)
        wanted = [Shape((mine.num_rows, *each.shape[1:]), _exact(each)) for each in (k, v)]
        home = spread.exchange((theirs.dk, theirs.dv), wanted, shift=-shift, purpose="gradients of keys").wait()
        rows = mine.rows_within(spread.keys[me]).to(k.device)
        found.dk.index_add_(0, rows, home[0])
        found.dv.index_add_(0, rows, home[1])


def _send_keys(k: Tensor, v: Tensor, *, work: Work, shift: int) -> Coming:
    spread = work.spread
    me = work.spread.group.position
    size = work.spread.group.size
    # Only keys that some query of the other sees: masks hide the rest.
    rows = _needed_keys(spread, me, by=(me + shift) % size).rows_within(spread.keys[me])
    count = _needed_keys(spread, (me - shift) % size, by=me).num_rows
    # The receiver knows the sizes by the same rule as the sender, so none travels.
    wanted = [Shape((count, *each.shape[1:]), each.dtype) for each in (k, v)]
    return spread.exchange((k[rows], v[rows]), wanted, shift=shift, purpose="keys")


def _queries_travel(q: Tensor, k: Tensor, v: Tensor, *, work: Work, whole: Gathered) -> None:
    spread = work.spread
    me = work.spread.group.position
    size = work.spread.group.size
    keys = work.side_of_keys(me, spread.keys[me], (k, v))

    def start(shift: int) -> Arriving:
        return _send_queries((q,), work=work, shift=shift)

    for shift, received in work.rounds(start):
        if received is None:
            work.gather(work.side_of_queries(me, spread.queries[me], (q,)), keys, whole)
            continue
        other = (me - shift) % size
        holder = (me + shift) % size
        pieces = _asking_rows(spread, other, of=me)
        shape = (pieces.num_rows, q.shape[1])
        like = {"dtype": whole.out.dtype, "device": q.device}
        lse = None if whole.lse is None else torch.full(shape, -torch.inf, **like)
        theirs = Gathered(torch.zeros(*shape, v.shape[2], **like), lse)
        work.gather(work.side_of_queries(other, pieces, received), keys, theirs)
        mine = _asking_rows(spread, me, of=holder)
        wanted = [Shape((mine.num_rows, *each.shape[1:]), each.dtype) for each in theirs if each is not None]
        letters = [each for each in theirs if each is not None]
        home = spread.exchange(letters, wanted, shift=-shift, purpose="results of queries").wait()
        part = Gathered(home[0], home[1] if len(home) > 1 else None)
        merge(whole, part, rows=mine.rows_within(spread.queries[me]).to(q.device))


def _gradients_of_queries_travel(
    of_queries: Sequence[Tensor], of_keys: tuple[Tensor, Tensor], *, work: Work, found: Gradients
) -> None:
    spread = work.spread
    me = work.spread.group.position
    size = work.spread.group.size
    keys = work.side_of_keys(me, spread.keys[me], of_keys)

    def start(shift: int) -> Arriving:
        return _send_queries(of_queries, work=work, shift=shift)

    for shift, received in work.rounds(start):
        if received is None:
            work.differentiate(work.side_of_queries(me, spread.queries[me], of_queries), keys, found)
            continue
        other = (me - shift) % size
        holder = (me + shift) % size
        # Gradients of the other's queries apart, as they go home; those of keys and biases add up here.
        theirs = replace(found, dq=_zeros(received[0]))
        work.differentiate(work.side_of_queries(other, _asking_rows(spread, other, of=me), received), keys, theirs)
        mine = _asking_rows(spread, me, of=holder)
        wanted = [Shape((mine.num_rows, *found.dq.shape[1:]), found.dq.dtype)]
        (home,) = spread.exchange((theirs.dq,), wanted, shift=-shift, purpose="gradients of queries").wait()
        found.dq.index_add_(0, mine.rows_within(spread.queries[me]).to(home.device), home)


def _send_queries(tensors: Sequence[Tensor], *, work: Work, shift: int) -> Arriving:
    """Queries and whatever goes with them; the widest numbers first, so that all lie at whole numbers."""
    spread = work.spread
    me = work.spread.group.position
    size = work.spread.group.size
    rows = _asking_rows(spread, me, of=(me + shift) % size).rows_within(spread.queries[me])
    count = _asking_rows(spread, (me - shift) % size, of=me).num_rows
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    wanted = [Shape((count, *tensors[index].shape[1:]), tensors[index].dtype) for index in order]
    coming = spread.exchange([tensors[index][rows] for index in order], wanted, shift=shift, purpose="queries")
    return _Ordered(coming, order)


class _Ordered(NamedTuple):
    """Tensors that are on their way in another order."""

    coming: Coming
    order: Sequence[int]

    def wait(self) -> list[Tensor]:
        found = dict(zip(self.order, self.coming.wait(), strict=True))
        return [found[index] for index in range(len(found))]


def _needed_keys(spread: Spread, owner: int, *, by: int) -> Pieces:
    return spread.histories.keys_needed(spread.keys[owner], by=spread.queries[by])


def _asking_rows(spread: Spread, asker: int, *, of: int) -> Pieces:
    return spread.histories.rows_that_see(spread.queries[asker], spread.keys[of])


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=_exact(like), device=like.device)


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
