"""Every rank brings the same model, plan and settings to `parallelize`, or all of them say what differs.

A rank with another width waits for bytes that nobody sends; one with another seed trains in silence, and its part of
the tables comes from other numbers. So the following is compared before anything is built:

    plan, ParallelConfig, seed        as settings
    inputs, embedding settings        as settings
    modules                           kind and plain attributes: sizes, dropout, activation
    dense weights                     shape, and four sums of the values with random signs
    tables that are drawn             the same of the first rows

Weights are drawn by the processor's own instructions: one without AVX2 draws the same numbers to other last bits. So
sums are compared within 1e-4 of what those of another seed would differ by, and where they are not equal all ranks take
the weights of rank 0: copies must hold the same bits.

Cost: one pass over the dense weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.config import flattened
from ziggurat.errors import PlanError
from ziggurat.models import Model
from ziggurat.parallel.agreement import require_equal
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.plan import Plan

_TABLE_ROWS = 4
_NUM_SUMS, _SIGNS_PER_ROW, _BLOCK = 4, 4096, 1 << 20
_CLOSE = 1e-4  # of the length of a weight; last bits move a sum by 1e-7 of it, another seed by all of it
_PLAIN = (bool, int, float, str, tuple)


def require_same_model(model: Model, plan: Plan, *, settings: Mapping[str, object], seed: int | None) -> None:
    """Compare over all ranks; collective. Without other ranks nothing happens.

    Args:
        model: not parallel yet.
        plan: for it.
        settings: plain data: how it is to be spread.
        seed: of tables that are not drawn yet.

    Raises:
        PlanError: the plans differ, on every rank.
        ConfigError: something else differs, on every rank.
    """
    require_equal(flattened(plan), where="plan, in parallelize", kind=PlanError)
    facts = flattened({"parallel": dict(settings), "tables": {"seed": seed}})
    require_equal(facts | model_facts(model), where="model and settings, in parallelize")
    _require_close_weights(model)


def _require_close_weights(model: Model) -> None:
    """Compare the values of weights, whose names and shapes are equal, and let all ranks have those of rank 0.

    Raises:
        ConfigError: weights differ by more than last bits, on every rank.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    values = _floating_values(model)
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor([_sums_of(value) for value in values.values()], dtype=torch.float64).view(-1, _NUM_SUMS + 1)
    first = mine.clone().to(device)
    with communicating("comparison of weights of all ranks"):
        dist.broadcast(first, src=0)
    theirs = first.cpu()
    length = theirs[:, -1:].clamp(min=1e-30)
    is_close = ((mine - theirs).abs() <= _CLOSE * length).all(dim=1) | (mine.isnan() & theirs.isnan()).all(dim=1)
    facts: dict[str, str] = {}
    for index, name in enumerate(values):
        # What is close is shown as rank 0 has it, so that last bits do not make ranks differ.
        shown = theirs[index] if is_close[index] else mine[index]
        facts[name] = f"length {shown[-1]:.6g}, sums {', '.join(f'{each:.4g}' for each in shown[:-1].tolist())}"
    require_equal(facts, where="weights, in parallelize")
    is_other = torch.tensor(int(not torch.equal(mine, theirs)), device=device)
    with communicating("comparison of weights of all ranks"):
        dist.all_reduce(is_other, op=dist.ReduceOp.MAX)
        if not int(is_other):
            return
        with torch.no_grad():
            for _, value in _dense_values(model):
                if not value.is_meta:
                    sent = value.detach().to(device).contiguous()
                    dist.broadcast(sent, src=0)
                    value.copy_(sent)


def model_facts(model: Model) -> dict[str, str]:
    """Describe a model as text by name: equal for two models that compute the same numbers."""
    facts = flattened(model.inputs, prefix="inputs") | flattened(model.embeddings.config, prefix="embedding")
    for name, module in model.named_modules():
        path = f"module {name}".rstrip()
        plain = ", ".join(f"{key}={value}" for key, value in vars(module).items() if isinstance(value, _PLAIN))
        facts[path] = f"{type(module).__name__}({plain})"
        for key, value in vars(module).items():
            if dataclasses.is_dataclass(value) and type(value).__name__.endswith("Config"):
                facts |= flattened(value, prefix=f"{path} {key}")
    for name, value in _dense_values(model):
        facts[f"weight {name}"] = _described(value)
    tables = model.embeddings.tables
    if not tables.is_open:
        for name in tables.places:
            facts[f"table {name}"] = str(tuple(tables.rows(name).shape))
    return facts


def _dense_values(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers outside of the tables."""
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if not name.startswith("embeddings."):
            yield name, value


def _floating_values(model: Model) -> dict[str, Tensor]:
    """Return what is drawn: weights, and the first rows of tables, by name."""
    found = {f"weight {name}": value for name, value in _dense_values(model) if value.is_floating_point()}
    tables = model.embeddings.tables
    if not tables.is_open:
        for name in tables.places:
            rows = tables.rows(name)
            found[f"table {name}, first rows"] = rows.read(0, min(_TABLE_ROWS, rows.num_rows))
    return {name: value for name, value in found.items() if not value.is_meta and value.numel()}


def _sums_of(value: Tensor) -> list[float]:
    """Return sums of the numbers with random signs, the same signs everywhere, and the length of the whole."""
    signs = torch.from_numpy(np.random.default_rng(0).integers(0, 2, (_SIGNS_PER_ROW, _NUM_SUMS)) * 2.0 - 1.0)
    flat = value.detach().reshape(-1)
    sums = torch.zeros(_NUM_SUMS, dtype=torch.float64)
    square = 0.0
    for number, first in enumerate(range(0, len(flat), _BLOCK)):
        # A block at a time, since FP64 takes twice the memory of the weight.
        block = flat[first : first + _BLOCK].cpu().double()
        square += float(block.square().sum())
        rows = torch.nn.functional.pad(block, (0, -len(block) % _SIGNS_PER_ROW)).view(-1, _SIGNS_PER_ROW)
        turned = torch.from_numpy(np.random.default_rng(number).integers(0, 2, len(rows)) * 2.0 - 1.0)
        sums += turned @ (rows @ signs)
    return [*sums.tolist(), square**0.5]


def _described(value: Tensor) -> str:
    """Shape and dtype, and of whole numbers a hash of the values."""
    content = ""
    if not value.is_meta and not value.is_floating_point():
        flat = value.detach().cpu().contiguous().reshape(-1)
        content = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12] if flat.numel() else ""
    return f"{tuple(value.shape)} {value.dtype} {content}".rstrip()
