"""NewRows: rows that have a new id, and its first vector: a function of (seed, table, id), and of nothing else.

    key   = first 64 bits of sha256("growing/<seed>/<table>")
    word  = mix(mix(id·G + key) + (2·column + part)·G)       part 0, and 1 where two are needed
    u     = (⌊word / 2^11⌋ + ½) / 2^53                       uniform in (0, 1)

Neither the row nor the rank nor the order of ids matters, and an id that lost its row and comes back begins alike. The
distributions are those of `EmbeddingConfig`; normal numbers by Box and Muller (1958). Cost: 30 ns a number of new ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt64
from torch import Tensor

from ziggurat.embeddings.config import EmbeddingConfig, TableInit
from ziggurat.features.hashing import GOLDEN, mix


@dataclass(frozen=True, kw_only=True)
class NewRows:
    """Rows of a table that have a new id.

    Args:
        table: its name.
        ids: the ids.
        rows: of the table, the reserved ones counted.
    """

    table: str
    ids: UInt64[np.ndarray, " N"]
    rows: Int64[Tensor, "N"]


def first_vectors(new: NewRows, *, shape: tuple[int, int], config: EmbeddingConfig, seed: int) -> Float[Tensor, "N D"]:
    """Draw the vectors of new ids.

    Args:
        new: the ids.
        shape: rows and columns of the whole table.
        config: distribution.
        seed: of the run.
    """
    digest = hashlib.sha256(f"growing/{seed}/{new.table}".encode()).digest()
    words = mix(new.ids * GOLDEN + np.array([int.from_bytes(digest[:8], "little")], dtype=np.uint64))
    if config.init is TableInit.UNIFORM:
        values = (2 * _uniform(words, shape[1], part=0) - 1) * shape[0] ** -0.5
    else:
        radius = np.sqrt(-2 * np.log(_uniform(words, shape[1], part=0)))
        values = config.init_std * radius * np.cos(2 * np.pi * _uniform(words, shape[1], part=1))
    return torch.from_numpy(values.astype(np.float32))


def _uniform(words: UInt64[np.ndarray, " N"], num_columns: int, *, part: int) -> np.ndarray:
    """(N, D) numbers in (0, 1)."""
    counters = np.arange(part, 2 * num_columns, 2, dtype=np.uint64) * GOLDEN
    return ((mix(words[:, None] + counters) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
