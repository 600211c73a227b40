"""HSTU, STU, SASRec and LiGR once more: dense, padded, one batch of equal lengths, from the papers' equations.

Nothing of the package's layers or attention is used but their weights.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def dense_mask(lengths: list[int], targets: list[int], *, context: int, reach: int) -> Tensor:
    """(B, L, L): who sees whom, rule by rule."""
    most = max(lengths)
    mask = torch.zeros(len(lengths), most, most, dtype=torch.bool)
    for b, (length, num) in enumerate(zip(lengths, targets, strict=True)):
        history = length - num
        for i in range(length):
            for j in range(length):
                place_i, place_j = (max(0, min(each, history) - max(0, min(context, history) - 1)) for each in (i, j))
                behind = 0 < place_i - place_j <= (reach or length)
                mask[b, i, j] = i == j or (behind and j < history) or (i < min(context, history) and j < history)
    return mask


def dense_bias(weights: dict[str, Tensor], times: Tensor, asked: Tensor, positions: Tensor) -> Tensor:
    """(B, 1, L, L): w_pos and w_time of every pair."""
    bias = torch.zeros(times.shape[0], 1, times.shape[1], times.shape[1], dtype=torch.float64)
    if "w_pos" in weights:
        reach = (len(weights["w_pos"]) + 1) // 2
        distance = positions[:, None, :] - positions[:, :, None]
        bias = bias + weights["w_pos"][(distance + reach - 1).clamp(0, 2 * reach - 2)][:, None]
    if "w_time" in weights:
        apart = (asked[:, :, None] - times[:, None, :]).abs().clamp(min=1).double()
        bucket = (apart.log() / 0.301).floor().long().clamp(max=len(weights["w_time"]) - 1)
        bias = bias + weights["w_time"][bucket][:, None]
    return bias


def norm(x: Tensor, weights: dict[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return normal * weights.get(f"{name}.weight", 1.0) + weights.get(f"{name}.bias", 0.0)


def linear(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", 0.0)


def silu(t: Tensor) -> Tensor:
    return t / (1 + torch.exp(-t))


def dense_hstu(
    x: Tensor,
    weights: dict[str, Tensor],
    *,
    variant: str,
    heads: int,
    sizes: tuple[int, int],
    n: int,
    mask: Tensor,
    bias: Tensor,
) -> Tensor:
    """One layer on (B, L, D); `variant` is research, stu or nvidia; sizes are d and d_v."""
    qk, value = sizes
    batch, length, _ = x.shape
    mixed = linear(norm(x, weights, "norm_in", 1e-6), weights, "projection")
    if variant == "nvidia":
        per_head = mixed.view(batch, length, heads, 2 * value + 2 * qk)
        u, v = per_head[..., :value], per_head[..., value : 2 * value]
        q, k = per_head[..., 2 * value : 2 * value + qk], per_head[..., 2 * value + qk :]
    else:
        cuts = [0, heads * value, 2 * heads * value, 2 * heads * value + heads * qk, mixed.shape[-1]]
        u, v, q, k = (mixed[..., a:b].reshape(batch, length, heads, -1) for a, b in itertools.pairwise(cuts))
    u = silu(u)
    if variant != "stu":
        v, q, k = silu(v), silu(q), silu(k)
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * (1.0 if variant == "research" else 1 / math.sqrt(qk)) + bias
    a = ((silu(scores) / n * mask[:, None]) @ v.transpose(1, 2)).transpose(1, 2).reshape(batch, length, -1)
    u, normal = u.reshape(batch, length, -1), norm(a, weights, "norm_gathered", 1e-6)
    read = torch.cat([u, a, u * normal], -1) if variant == "stu" else u * normal
    return x + linear(read, weights, "output")


def dense_softmax(x: Tensor, weights: dict[str, Tensor], *, variant: str, heads: int, mask: Tensor) -> Tensor:
    """One block on (B, L, D); `variant` is sasrec, relu, silu (with n = 16) or ligr."""
    eps = 1e-5 if variant == "ligr" else 1e-8
    normal = norm(x, weights, "norm_attention", eps)
    source = normal if variant == "ligr" else x
    q, k, v = (
        linear(rows, weights, name).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name, rows in (("query", normal), ("key", source), ("value", source))
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    exponentials = torch.exp(scores) * mask[:, None]
    weighted = exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-300)
    if variant in ("relu", "silu"):
        gate = (scores > 0).double() if variant == "relu" else 1 / (1 + torch.exp(-scores))
        weighted = scores * gate * mask[:, None] / 16
    found = linear((weighted @ v).transpose(1, 2).flatten(2), weights, "output")
    if variant != "ligr":
        y = norm(normal + found, weights, "norm_feed", eps)
        return y + linear(torch.relu(linear(y, weights, "feed_in")), weights, "feed_out")
    y = x + torch.sigmoid(linear(x, weights, "gate_attention")) * found
    inner = linear(norm(y, weights, "norm_feed", eps), weights, "feed_in")
    half = inner.shape[-1] // 2
    fed = linear(inner[..., :half] * torch.sigmoid(inner[..., :half]) * inner[..., half:], weights, "feed_out")
    return y + torch.sigmoid(linear(y, weights, "gate_feed")) * fed
