"""What an export needs to find items: the index of their vectors, and the parts of them that its OverArch reads.

Both are computed by the encoder as it was written into the export, so that users and items come from the same tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.models.build import ModelConfig
from ziggurat.serving.answering.item_catalogue import USERS_FILE, ItemCatalogue, read_parquet, sample_numbers
from ziggurat.serving.answering.item_search import INDEX_FILE, ItemSearch
from ziggurat.serving.answering.rescorer import OVER_ARCH_FILE, Rescorer
from ziggurat.serving.answering.sides import encode_frame
from ziggurat.serving.answering.vector_encoder import VectorEncoder
from ziggurat.serving.export.export_folder import open_export
from ziggurat.serving.export.packed_model import load_model
from ziggurat.serving.load_parts import ENCODER

_TUNED_USERS = 256


@dataclass(frozen=True, kw_only=True)
class Found:
    """The requirements on what the index finds.

    Args:
        num_candidates: items for a ranker.
        num_over_arch: items for the OverArch.
        recall: share of the exact candidates, for known users.
    """

    num_candidates: int
    num_over_arch: int
    recall: float


def write_index(
    folder: Path, *, catalogue: ItemCatalogue, wanted: Found, models: Sequence[type[ModelConfig]]
) -> dict[str, object]:
    """Write index and parts into an export that has its encoder; returns facts for its manifest.

    Args:
        folder: of the export.
        catalogue: its items.
        wanted: what the index is to find.
        models: config classes of the user's own.
    """
    export = open_export(folder)
    encoder = VectorEncoder(load_model(export, ENCODER, models=models), item_columns=catalogue.columns.features)
    vectors = encoder.item_vectors(catalogue.frame)
    index = ItemSearch.build(vectors, items=catalogue.frame)
    facts: dict[str, object] = {"clusters": index.index.vectors.num_clusters}
    most = wanted.num_candidates
    if encoder.over_arch is not None:
        Rescorer.build(encoder.over_arch, vectors=vectors).save(folder / OVER_ARCH_FILE)
        facts["over_arch"] = encoder.over_arch.config.kind.value
        # The index has to find enough for whichever of its readers takes more.
        most = max(most, wanted.num_over_arch)
    if export.has(USERS_FILE):
        users = read_parquet(export.file(USERS_FILE))
        users = users[sample_numbers(users.height, _TUNED_USERS).tolist()]
        queries = encoder.task_vectors(encode_frame(encoder.users, users), torch.arange(users.height)).flatten(0, 1)
        facts["probes"] = index.tune(queries, k=most, recall=wanted.recall)
    index.save(folder / INDEX_FILE)
    return facts
