"""Two small tables on a disk, of which few rows are held, and what each of their rows has to be: a plain dict."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ziggurat.embeddings.config import EmbeddingConfig, InitialDraw
from ziggurat.embeddings.initial_rows import InitialRows
from ziggurat.embeddings.storage import StoredRows, TablePart
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.training.checkpoint.manifest import Manifest, read_manifest

SIZES, DIM, WIDTH = {"users": 70, "items": 130}, 2, 3
NUM_ROWS = sum(SIZES.values())
_CONFIG = EmbeddingConfig(dim=DIM, init_draw=InitialDraw.ROWS)


class Tables:
    """Tables on a disk, beside an oracle.

    Args:
        folder: for the file of rows.
        places: rows that are held.

    Attributes:
        rows: row → weights and state, of all rows that were ever changed.
        unsaved: rows that were changed since the last checkpoint.
    """

    def __init__(self, folder: Path, *, places: int = 9) -> None:
        storage = TablesConfig(disk=str(folder), memory="50%").make_storage(seed=0)(NUM_ROWS, DIM)
        assert isinstance(storage, DiskStorage)
        storage.num_places = places
        storage.add_state(TableOptimizerKind.ROWWISE_ADAGRAD)
        first = 0
        for name, size in SIZES.items():
            initial = InitialRows(table=name, shape=(size, DIM), config=_CONFIG, seed=3)
            storage.draw(first, size, initial=initial)
            first += size
        self.storage, self.rows, self.unsaved = storage, dict[int, bytes](), set[int]()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint saves and fills."""
        found, first = dict[str, Tensor](), 0
        for name, size in SIZES.items():
            for key in ("weight", "sum"):
                rows = StoredRows(storage=self.storage, first_row=first, num_rows=size, key=key)
                found[f"{name}.{key}"] = TablePart.of(rows)
            first += size
        return found

    def update(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        """Replace sorted distinct rows."""
        self.storage.hold(rows, numbers.copy())
        self.rows |= {int(row): one.tobytes() for row, one in zip(rows, numbers, strict=True)}
        self.unsaved |= set(rows.tolist())


def expected(rows: dict[int, bytes], fresh: Tables) -> dict[str, Tensor]:
    """Whole tensors of an oracle; rows that nobody changed are those of fresh tables."""
    numbers = fresh.storage.look(np.arange(NUM_ROWS))
    for row, one in rows.items():
        numbers[row] = np.frombuffer(one, dtype=np.float32)
    found, first = dict[str, Tensor](), 0
    for name, size in SIZES.items():
        some = torch.from_numpy(numbers[first : first + size])
        found |= {f"{name}.weight": some[:, :DIM].clone(), f"{name}.sum": some[:, DIM].clone()}
        first += size
    return found


def manifest_of(folder: Path, step: int) -> Manifest:
    """Of a checkpoint."""
    return read_manifest(folder / f"step-{step:012d}", step=step)


def generations(manifest: Manifest) -> list[int]:
    """The steps whose rows a checkpoint has in files of their own."""
    return sorted(int(name.split("-")[1]) for name in manifest.files if name.startswith("rows-"))


def delete(folder: Path, step: int) -> None:
    """Delete a checkpoint, as a person would."""
    shutil.rmtree(folder / f"step-{step:012d}")
