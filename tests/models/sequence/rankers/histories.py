"""Samples with one history: items, brands and actions side by side, their times, and what did not happen."""

from __future__ import annotations

import dataclasses

import torch

from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, MomentsSpec, SingleSpec, TableSpec
from ziggurat.features.jagged import moments_group, offsets_of
from ziggurat.models import (
    BSTConfig,
    DIENConfig,
    HistoryInput,
    HistoryPooling,
    MLPConfig,
    ModelConfig,
    OneTransConfig,
    RankMixerConfig,
    TransActConfig,
)
from ziggurat.ops.lookup import KernelChoice
from ziggurat.testing.batches import random_batch

MAX_LENGTH = 6
LISTS = ("items", "brands", "acts", "others", "other_brands")
ROWS = {"user": 9, "item": 14, "brand": 7, "act": 6, "tag": 8}
INPUTS = InputSpec(
    dense=("price",),
    single=tuple(SingleSpec(name=name, table=name) for name in ("user", "item", "brand")),
    jagged=(
        JaggedSpec(name="items", table="item", ordered=True, max_length=MAX_LENGTH),
        JaggedSpec(name="brands", table="brand", ordered=True, max_length=MAX_LENGTH),
        JaggedSpec(name="acts", table="act", ordered=True, max_length=MAX_LENGTH),
        JaggedSpec(name="others", table="item", max_length=MAX_LENGTH),
        JaggedSpec(name="other_brands", table="brand", max_length=MAX_LENGTH),
        JaggedSpec(name="tags", table="tag"),
    ),
    tables=tuple(TableSpec(name=name, num_rows=rows) for name, rows in ROWS.items()),
    labels=(LabelSpec(name="click"), LabelSpec(name="buy")),
    moments=(MomentsSpec(name="seen_at", max_length=MAX_LENGTH), MomentsSpec(name="now", max_length=1)),
    has_weights=True,
)
HISTORY = HistoryInput(
    lists=("items", "brands"), targets=("item", "brand"), actions=("acts",), times="seen_at", asked_at="now"
)
MLP = MLPConfig(hidden_dims=(6,))
TABLES = EmbeddingConfig(kernel=KernelChoice.TORCH, init="normal", init_std=0.4)  # type: ignore[arg-type]
BST = BSTConfig(embedding_dim=4, history=HISTORY, num_heads=4, num_layers=2, deep=MLP, embedding=TABLES)
DIEN = DIENConfig(embedding_dim=4, history=HISTORY, deep=MLP, embedding=TABLES)
TRANSACT = TransActConfig(embedding_dim=4, history=HISTORY, deep=MLP, latest=3, dropout=0.0, embedding=TABLES)
RANKMIXER = RankMixerConfig(
    embedding_dim=4,
    history=HISTORY,
    pooling=HistoryPooling.ATTENTION,
    attention_dims=(5,),
    num_tokens=3,
    token_dim=6,
    expansion=2,
    embedding=TABLES,
)
ONETRANS = OneTransConfig(
    embedding_dim=4, history=HISTORY, num_tokens=3, token_dim=8, num_heads=2, num_layers=3, embedding=TABLES
)
MODELS: tuple[ModelConfig, ...] = (BST, DIEN, TRANSACT, RANKMIXER, ONETRANS)


def histories(lengths: list[int], *, seed: int = 0) -> Batch:
    """Samples with histories of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.tensor(lengths, dtype=torch.int64)
    size, num_events = len(lengths), sum(lengths)
    tags = torch.randint(0, 4, (size,), generator=generator)
    parts = []
    for spec in INPUTS.jagged:
        counts = tags if spec.name == "tags" else own
        rows = torch.randint(3, ROWS[spec.table], (int(counts.sum()),), generator=generator)
        parts.append(JaggedRows(rows, offsets_of(counts)))
    offsets = offsets_of(own)
    times = torch.randint(0, 50_000, (num_events,), generator=generator)
    samples = torch.arange(size).repeat_interleave(own)
    times = times[torch.argsort(samples * 100_000 + times)]  # rising in each history
    sequences = {
        "seen_at": moments_group(times, offsets),
        "now": moments_group(torch.full((size,), 60_000), torch.arange(size + 1)),
    }
    plain = random_batch(dataclasses.replace(INPUTS, jagged=(), moments=()), size, seed=seed)
    return dataclasses.replace(plain, jagged=JaggedRows.joined(parts), sequences=sequences)
