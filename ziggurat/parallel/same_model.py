"""Every rank brings the same model, plan and settings to `parallelize`, or all of them say what differs.

A rank with another width waits for bytes that nobody sends; one with another seed trains in silence, and its part of
the tables comes from other numbers. So the following is compared before anything is built:

    plan, ParallelConfig, seed        as settings
    inputs, embedding settings        as settings
    modules                           kind and plain attributes: sizes, dropout, activation
    dense weights                     shape and a hash of the values; of tables that are drawn, the first rows

Cost: one pass over the dense weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ziggurat.config import flattened
from ziggurat.errors import PlanError
from ziggurat.models import Model
from ziggurat.parallel.agreement import require_equal
from ziggurat.plan import Plan

_TABLE_ROWS = 4
_PLAIN = (bool, int, float, str, tuple)


def require_same_model(model: Model, plan: Plan, *, settings: dict[str, Any], seed: int | None) -> None:
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
    facts = flattened({"parallel": settings, "tables": {"seed": seed}})
    require_equal(facts | model_facts(model), where="model and settings, in parallelize")


def model_facts(model: Model) -> dict[str, str]:
    """What a model is, as text by name: equal for two models that compute the same numbers."""
    facts = flattened(model.inputs, prefix="inputs") | flattened(model.embeddings.config, prefix="embedding")
    for name, module in model.named_modules():
        path = f"module {name}".rstrip()
        plain = ", ".join(f"{key}={value}" for key, value in vars(module).items() if isinstance(value, _PLAIN))
        facts[path] = f"{type(module).__name__}({plain})"
        for key, value in vars(module).items():
            if dataclasses.is_dataclass(value) and type(value).__name__.endswith("Config"):
                facts |= flattened(value, prefix=f"{path} {key}")
    for name, value in chain(model.named_parameters(), model.named_buffers()):
        if not name.startswith("embeddings."):
            facts[f"weight {name}"] = _described(value)
    tables = model.embeddings.tables
    if not tables.is_open:
        for name in tables.places:
            rows = tables.rows(name)
            facts[f"table {name}, first rows"] = _described(rows.read(0, min(_TABLE_ROWS, rows.num_rows)))
    return facts


def _described(value: Tensor) -> str:
    content = ""
    if not value.is_meta:
        flat = value.detach().cpu().contiguous().reshape(-1)
        content = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:12] if flat.numel() else ""
    return f"{tuple(value.shape)} {value.dtype} {content}".rstrip()
