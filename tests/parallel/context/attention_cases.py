"""Random attention over ranks, held against one device: forward, backward, two layers, every mask, both ways."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

from ziggurat.features.jagged import offsets_of
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.problem import AttentionBias, AttentionForm, AttentionMask, JaggedLayout, Spans
from ziggurat.parallel.context.attention import ContextAttention
from ziggurat.parallel.context.choice import Passing
from ziggurat.parallel.context.pieces import head_and_tail
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Topology

_LENGTHS = (0, 1, 2, 3, 7, 16, 33, 64, 65, 130)


def _case(seed: int) -> dict[str, Any]:
    """A random batch of histories and two layers of attention, the same on every rank."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = torch.tensor([draw.choice(_LENGTHS) for _ in range(draw.choice([1, 1, 2, 5]))], dtype=torch.int64)
    targets = torch.tensor([draw.randint(0, int(length)) for length in lengths], dtype=torch.int64)
    total, heads, dim = int(lengths.sum()), draw.choice([1, 2]), draw.choice([4, 8])
    form = draw.choice(list(AttentionForm))
    reach = max(1, int(lengths.max()))
    times = torch.randint(0, 10**6, (total,), generator=generator)
    return {
        "lengths": lengths,
        "targets": targets if draw.random() < 0.5 else None,
        "mask": AttentionMask(context=draw.choice([0, 0, 1, 3]), max_attention_length=draw.choice([0, 0, 1, 9, 40])),
        "form": form,
        "divisor": 1.0 if form is AttentionForm.SOFTMAX else float(reach),
        "events": torch.randn(total, heads, dim, generator=generator),
        "weights": torch.randn(2, 3, dim, dim, generator=generator) / dim,
        "grad": torch.randn(total, heads, dim, generator=generator),
        "w_pos": torch.randn(2 * reach - 1, generator=generator) if draw.random() < 0.6 else None,
        "w_time": torch.randn(20, generator=generator) if draw.random() < 0.6 else None,
        "times": times.sort().values if draw.random() < 0.5 else times,
    }


def _two_layers(case: dict[str, Any], attention: Any, layout: JaggedLayout, rows: Tensor) -> list[Tensor]:
    """The result, and the gradients of the events, the weights and the biases."""
    events, weights = case["events"][rows].requires_grad_(), case["weights"].clone().requires_grad_()
    biases = [None if each is None else each.clone().requires_grad_() for each in (case["w_pos"], case["w_time"])]
    times = case["times"][rows]
    state = events
    for layer in weights:
        q, k, v = (torch.einsum("nhd,de->nhe", state, each) for each in layer)
        bias = AttentionBias(w_pos=biases[0], w_time=biases[1], query_times=times + 5, key_times=times)
        options = {"form": case["form"], "scale": 0.5, "divisor": case["divisor"], "bias": bias}
        state = state + attention(q, k, v, layout=layout, **options)
    leaves = [events, weights, *(each for each in biases if each is not None)]
    found = torch.autograd.grad(state, leaves, case["grad"][rows], allow_unused=True)
    pairs = zip(found, leaves, strict=True)
    return [state.detach(), *(torch.zeros_like(leaf) if each is None else each for each, leaf in pairs)]


def differences(rank: int, seeds: list[int], size: int = 0) -> list[tuple[int, str, float, float]]:
    """How far each case is from one device, on so many ranks (0: all) of the job: forward and backward."""
    del rank
    topology = Topology.create(context_size=size or torch.distributed.get_world_size())
    group = topology.context
    attentions = {passing: ContextAttention(group, traffic=Traffic(topology), passing=passing) for passing in Passing}
    found = []
    for seed in seeds:
        case = _case(seed)
        lengths, targets = case["lengths"], case["targets"]
        begins = offsets_of(lengths)
        whole = JaggedLayout(offsets=begins, num_targets=targets, mask=case["mask"])
        wanted = _two_layers(case, jagged_attention, whole, torch.arange(int(begins[-1])))
        mine = head_and_tail(lengths, rank=group.position, num_ranks=group.size)
        places = (mine.starts + begins[:-1]).reshape(-1).tolist()
        parts = [torch.arange(a, a + n) for a, n in zip(places, mine.counts.reshape(-1).tolist(), strict=True)]
        rows, twice = torch.cat(parts), lengths.repeat(2)
        starts = mine.starts.reshape(-1)
        layout = JaggedLayout(
            offsets=mine.offsets,
            num_targets=None if targets is None else targets.repeat(2),
            mask=case["mask"],
            spans=Spans(query_starts=starts, key_starts=starts, lengths=twice),
        )
        for passing, attention in list(attentions.items())[seed % 3 != 0 :]:  # the measured choice: now and then
            ours = _two_layers(case, attention, layout, rows)
            sums = torch.cat([each.reshape(-1) for each in ours[2:]])
            torch.distributed.all_reduce(sums, group=group.process_group)
            ours[2:] = [
                each.view_as(like)
                for each, like in zip(sums.split([each.numel() for each in ours[2:]]), ours[2:], strict=True)
            ]
            worst = [_worst(ours[0], wanted[0][rows]), _worst(ours[1], wanted[1][rows])]
            worst[1] = max([worst[1], *(_worst(a, b) for a, b in zip(ours[2:], wanted[2:], strict=True))])
            found.append((seed, passing.value, *worst))
    return found


def _worst(found: Tensor, wanted: Tensor) -> float:
    scale = max(1.0, float(wanted.abs().max())) if wanted.numel() else 1.0
    return float((found - wanted).abs().max()) / scale if found.numel() else 0.0
