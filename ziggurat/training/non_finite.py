"""Keep the batch that gave NaN or infinity, so that a person can find out why."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from ziggurat.config import to_json
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec


def dump_batch(batch: Batch, path: Path, inputs: InputSpec) -> Path:
    """Write a batch as safetensors; the names of its columns stand in the file's metadata. Returns the path."""
    tensors = {
        "dense": batch.dense,
        "single": batch.single,
        "jagged.values": batch.jagged.values,
        "jagged.offsets": batch.jagged.offsets,
        "labels": batch.labels,
        "row_ids": batch.row_ids,
        **{f"vector.{name}": value for name, value in batch.vectors.items()},
    }
    if batch.weights is not None:
        tensors["weights"] = batch.weights
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(plain, str(path), metadata={"inputs": json.dumps(to_json(inputs))})
    return path
