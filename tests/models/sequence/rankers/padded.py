"""The rankers of a history once more: padded batches, torch's own layers and plain loops, from the papers' equations.

Nothing of the package's layers, attention or recurrences is used but their weights; x₀ and the heads are the model's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.sequence.rankers.histories import MAX_LENGTH
from ziggurat.features.batch import Batch


def rows_of(model: Any, batch: Batch, name: str) -> list[Tensor]:
    """The vectors of a list feature, sample by sample."""
    names = [spec.name for spec in model.inputs.jagged]
    size, at = batch.batch_size, names.index(name)
    table = model.embeddings.table(model.inputs.jagged[at].table)
    offsets = batch.jagged.offsets.tolist()
    return [table[batch.jagged.values[offsets[at * size + b] : offsets[at * size + b + 1]]] for b in range(size)]


def events_and_candidates(model: Any, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Events (B, n, E) with padding behind, what is padding (B, n), and candidates as events (B, E)."""
    lists = [rows_of(model, batch, name) for name in ("items", "brands", "acts")]
    names = [spec.name for spec in model.inputs.single]
    single = {name: model.embeddings.table(name)[batch.single[names.index(name)]] for name in ("item", "brand")}
    candidates = torch.cat([single["item"], single["brand"], torch.zeros(batch.batch_size, 4)], dim=1)
    padded = torch.zeros(batch.batch_size, MAX_LENGTH, candidates.shape[1])
    absent = torch.ones(batch.batch_size, MAX_LENGTH, dtype=torch.bool)
    for b, parts in enumerate(zip(*lists, strict=True)):
        joined = torch.cat(parts, dim=1)
        padded[b, : len(joined)] = joined
        absent[b, : len(joined)] = False
    return padded, absent, candidates


def ages(batch: Batch) -> Tensor:
    """(B, n) how long ago events were; 0 for padding."""
    times, found = batch.sequences["seen_at"], torch.zeros(batch.batch_size, MAX_LENGTH, dtype=torch.int64)
    offsets = times.offsets.tolist()
    for b in range(batch.batch_size):
        own = times.values["time"][offsets[b] : offsets[b + 1]]
        found[b, : len(own)] = 60_000 - own
    return found


def buckets(durations: Tensor, number: int) -> Tensor:
    return (durations.clamp(min=1).double().log() / 0.301).floor().long().clamp(max=number - 1)


def fields_of(model: Any, batch: Batch) -> Tensor:
    """What is pooled, as one row a sample."""
    return model.embeddings(batch)


def head(model: Any, batch: Batch, extra: Tensor) -> Tensor:
    return model.heads(model.flat(batch.dense, torch.cat([fields_of(model, batch), extra], dim=1), batch.vectors))


def encoder_layer(block: Any, activation: Any, rows: Tensor, **masks: Tensor | None) -> Tensor:
    """Torch's own layer with the weights of a block, on rows."""
    config = block.config
    layer = nn.TransformerEncoderLayer(
        config.dim, config.num_heads, config.hidden_dim, dropout=0.0, activation=activation, batch_first=True
    )
    names = {
        "self_attn.in_proj_weight": torch.cat([block.query.weight, block.key.weight, block.value.weight]),
        "self_attn.in_proj_bias": torch.cat([block.query.bias, block.key.bias, block.value.bias]),
        "self_attn.out_proj.weight": block.output.weight,
        "self_attn.out_proj.bias": block.output.bias,
        "linear1.weight": block.feed_in.weight,
        "linear1.bias": block.feed_in.bias,
        "linear2.weight": block.feed_out.weight,
        "linear2.bias": block.feed_out.bias,
        "norm1.weight": block.norm_attention.weight,
        "norm1.bias": block.norm_attention.bias,
        "norm2.weight": block.norm_feed.weight,
        "norm2.bias": block.norm_feed.bias,
    }
    return torch.func.functional_call(layer, names, (rows,), masks)


def bst(model: Any, batch: Batch) -> Tensor:
    """Logits of BST."""
    events, absent, candidates = events_and_candidates(model, batch)
    lengths = (~absent).sum(1)
    config, size = model.config, len(candidates)
    if model.positions is not None:
        weight = model.positions.vectors.weight
        if model.positions.by_time:
            place = buckets(ages(batch), len(weight))
        else:
            place = (lengths[:, None] - torch.arange(MAX_LENGTH)).clamp(min=0)
        events = torch.cat([events, weight[place]], dim=2)
        candidates = torch.cat([candidates, weight[0].expand(size, -1)], dim=1)
    rows, hidden = torch.cat([events, candidates[:, None]], 1), torch.cat([absent, torch.zeros(size, 1).bool()], 1)
    mask = None
    if config.mask == "causal":
        mask = torch.ones(MAX_LENGTH + 1, MAX_LENGTH + 1, dtype=torch.bool).triu(1)
    for block in model.layers:
        rows = encoder_layer(block, F.leaky_relu, rows, src_mask=mask, src_key_padding_mask=hidden)
    if config.output == "target":
        return head(model, batch, rows[:, -1])
    rows = rows.masked_fill(hidden[:, :, None], 0.0)
    if config.output == "all":
        found = torch.zeros(size, MAX_LENGTH + 1, rows.shape[2])
        for b, length in enumerate(lengths.tolist()):
            found[b, 0] = rows[b, -1]
            found[b, 1 : length + 1] = rows[b, :length].flip(0)
        return head(model, batch, found.flatten(1))
    sums = rows.sum(1)
    return head(model, batch, sums if config.output == "sum" else sums / (lengths + 1)[:, None])


def transact(model: Any, batch: Batch, *, hidden: Tensor | None = None) -> Tensor:
    """Logits of TransAct; `hidden` latest events of each sample are left out of everything."""
    events, absent, candidates = events_and_candidates(model, batch)
    lengths = (~absent).sum(1)
    if hidden is not None:
        lengths = lengths - hidden
        absent = torch.arange(MAX_LENGTH) >= lengths[:, None]
    rows = events
    if model.config.fusion == "early":
        rows = torch.cat([events, candidates[:, None, :8].expand(-1, MAX_LENGTH, -1)], dim=2)
    outputs = []
    for b, length in enumerate(lengths.tolist()):
        own = rows[b : b + 1, :length]
        for block in model.layers:
            own = encoder_layer(block, F.relu, own) if length else own
        parts, width = [], rows.shape[2]
        if model.pooled is not None:
            parts.append(model.pooled(own[0].amax(0) if length else torch.zeros(width)))
        latest = torch.zeros(model.config.latest, width)
        for place in range(min(model.config.latest, length)):
            latest[place] = own[0, length - 1 - place]
        outputs.append(torch.cat([*parts, latest.flatten()]))
    x0 = model.flat(batch.dense, torch.cat([fields_of(model, batch), torch.stack(outputs)], 1), batch.vectors)
    crossed = x0
    for layer in model.cross.layers:
        crossed = x0 * (crossed @ layer.weight.t() + layer.bias) + crossed
    return model.heads(crossed)


def gru_cell(x: Tensor, h: Tensor, weight: Tensor, bias: Tensor, attention: Tensor, gate: str) -> Tensor:
    x_u, x_r, x_c = x.chunk(3)
    h_u, h_r, h_c = (weight @ h + bias).chunk(3)
    update = torch.sigmoid(x_u + h_u)
    share = {"gru": update, "augru": attention * update, "agru": attention.expand_as(update)}[gate]
    return (1 - share) * h + share * torch.tanh(x_c + torch.sigmoid(x_r + h_r) * h_c)


def recurrence(module: Any, rows: Tensor, attention: Tensor, gate: str) -> Tensor:
    states, state = [], torch.zeros(rows.shape[1])
    for row, weight in zip(rows, attention, strict=True):
        state = gru_cell(module.of_event(row), state, module.of_state.weight, module.of_state.bias, weight, gate)
        states.append(state)
    return torch.stack(states) if states else rows


def dien(model: Any, batch: Batch, negatives: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Logits of DIEN, and the auxiliary loss of each sample; `negatives` (n, E) of each sample."""
    events, absent, candidates = events_and_candidates(model, batch)
    config, finals, losses = model.config, [], []
    for b, length in enumerate((~absent).sum(1).tolist()):
        own, candidate = events[b, :length], candidates[b]
        states = recurrence(model.interest, own, torch.ones(length), "gru")
        if config.attention == "bilinear":
            scores = states @ model.attention.bilinear.weight @ candidate
        elif config.attention == "dot":
            scores = states @ candidate
        else:
            q = candidate.expand(length, -1)
            hidden = torch.cat([q, states, q - states, q * states], dim=1)
            for layer in model.attention.mlp.layers:
                hidden = F.relu(layer(hidden))
            scores = model.attention.mlp.output(hidden).squeeze(1)
        weights = scores.softmax(0) if config.weights == "softmax" else scores
        kind = config.evolution.value
        rows = states * weights[:, None] if kind == "aigru" else states
        evolved = recurrence(model.evolution, rows, weights, "gru" if kind == "aigru" else kind)
        parts = [evolved[-1] if length else torch.zeros(own.shape[1])]
        if config.sums == "added":
            parts += [own.sum(0), candidate * own.sum(0)]
        finals.append(torch.cat(parts))
        terms = [torch.zeros(())]
        for t in range(length - 1):
            follows = torch.cat([own[t + 1, :8], torch.zeros(4)])
            other = follows if negatives is None else torch.cat([negatives[b][t + 1], torch.zeros(4)])
            pairs = [torch.cat([states[t], each]) for each in (follows, other)]
            good, bad = (
                model.auxiliary(each[None])[0, 0] if model.auxiliary else each[:12] @ each[12:] for each in pairs
            )
            terms.append(-torch.log(torch.sigmoid(good)) - torch.log(1 - torch.sigmoid(bad)))
        total = torch.stack(terms).sum()
        losses.append(total if config.auxiliary_over == "sum" else total / max(1, length - 1))
    return head(model, batch, torch.stack(finals)), torch.stack(losses)


def rankmixer(model: Any, batch: Batch) -> Tensor:
    """Logits of RankMixer, token by token."""
    events, absent, candidates = events_and_candidates(model, batch)
    config, logits = model.config, []
    tokens_T, dim = config.num_tokens, config.token_dim
    for b, length in enumerate((~absent).sum(1).tolist()):
        q = candidates[b].expand(length, -1)
        own = events[b, :length]
        hidden = torch.cat([q, own, q - own, q * own], dim=1)
        for layer in model.attention.layers:
            hidden = F.relu(layer(hidden))
        pooled = (model.attention.output(hidden) * own).sum(0)
        fields = torch.cat([fields_of(model, batch)[b], pooled])[None]
        x0 = model.flat(batch.dense[b : b + 1], fields, {})[0]
        x0 = torch.cat([x0, torch.zeros(-len(x0) % tokens_T)])
        piece = len(x0) // tokens_T
        tokens = [
            x0[t * piece : (t + 1) * piece] @ model.tokens.maps.weight[t] + model.tokens.bias[t]
            for t in range(tokens_T)
        ]
        for layer in model.layers:
            size = dim // tokens_T
            mixed = [
                torch.cat([token[h * size : (h + 1) * size] for token in tokens]) + tokens[h] for h in range(tokens_T)
            ]
            mixed = [layer.norm_mixed(each) for each in mixed]
            tokens = []
            for t, token in enumerate(mixed):
                networks, out = layer.networks, torch.zeros(dim)
                for e in range(config.num_experts):
                    units = slice(e * config.expansion * dim, (e + 1) * config.expansion * dim)
                    inner = F.gelu(token @ networks.wide.maps.weight[t, :, units] + networks.wide.bias[t, units])
                    found = inner @ networks.narrow.weight[t, units] + networks.bias[t, e]
                    if networks.router is not None:
                        router = networks.router
                        found = found * F.relu(token @ router.maps.weight[t, :, e] + router.bias[t, e])
                    out = out + found
                tokens.append(layer.norm_out(out + token))
        logits.append(model.heads(torch.stack(tokens).mean(0)[None])[0])
    return torch.stack(logits)


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm.weight


def onetrans(model: Any, batch: Batch) -> Tensor:
    """Logits of OneTrans, sample by sample: all events in every layer's keys that the pyramid leaves."""
    events, absent, _ = events_and_candidates(model, batch)
    config, logits = model.config, []
    tokens_T, heads = config.num_tokens, config.num_heads

    def mixed(maps: Any, x: Tensor, num_events: int) -> Tensor:
        rows = [maps.shared(x[i]) for i in range(num_events)]
        rows += [x[num_events + t] @ maps.own.maps.weight[t] + maps.own.bias[t] for t in range(tokens_T)]
        return torch.stack(rows)

    for b, length in enumerate((~absent).sum(1).tolist()):
        own = model.events(events[b, :length])
        if model.positions is not None:
            weight = model.positions.vectors.weight
            by_time = model.positions.by_time
            place = buckets(ages(batch)[b, :length], len(weight)) if by_time else length - torch.arange(length)
            own = own + weight[place]
        x0 = model.flat(batch.dense[b : b + 1], fields_of(model, batch)[b : b + 1], {})[0]
        if model.auto is not None:
            fields = model.auto(x0[None]).view(tokens_T, -1)
        else:
            x0 = torch.cat([x0, torch.zeros(-len(x0) % tokens_T)]).view(tokens_T, -1)
            fields = torch.stack([x0[t] @ model.pieces.maps.weight[t] + model.pieces.bias[t] for t in range(tokens_T)])
        x, num_events = torch.cat([own, fields]), length
        for number, layer in enumerate(model.layers, start=1):
            share = (config.num_layers - number) / config.num_layers if config.pyramid == "linear" else 1.0
            kept = 0 if number == config.num_layers else min(num_events, math.ceil(MAX_LENGTH * share))
            going = x[num_events - kept :]
            normed = rms(x, layer.norm_attention)
            asked = normed[num_events - kept :]
            q = mixed(layer.query, asked, kept).view(len(asked), heads, -1)
            k, v = (mixed(each, normed, num_events).view(len(x), heads, -1) for each in (layer.key, layer.value))
            scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
            place_i, place_j = torch.arange(len(x))[num_events - kept :], torch.arange(len(x))
            scores = scores.masked_fill(place_j[None] > place_i[:, None], -torch.inf)
            z = going + layer.output(torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1))
            x = z + mixed(layer.narrow, F.gelu(mixed(layer.wide, rms(z, layer.norm_feed), kept)), kept)
            num_events = kept
        logits.append(model.heads(rms(x, model.norm).flatten()[None])[0])
    return torch.stack(logits)
