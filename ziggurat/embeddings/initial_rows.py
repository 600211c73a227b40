"""Initial weights as a function of (seed, table, block of rows): whoever holds a row draws it, and nobody else must.

    block 0          rows     0 … 4,095     generator seeded by sha256("seed/table")
    block b          rows 4,096·b … + 4,095 generator seeded by sha256("seed/table" + NUL + b)

So a rank that holds a quarter of a table draws a quarter of it (and the rest of the two blocks at its ends), any
placement has the same weights as one device, and adding, removing or reordering tables changes no other table's.
All columns of a block are drawn; a rank with some columns keeps those. Memory beyond the table itself: one block.

The numbers come from the CPU's generator whatever the device of the table, so that they are the same everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.embeddings.config import EmbeddingConfig, TableInit
from ziggurat.features.schema import PADDING_ROW

BLOCK_ROWS = 4096


def initial_rows(
    table: str,
    *,
    shape: tuple[int, int],
    config: EmbeddingConfig,
    seed: int,
    rows: range | None = None,
    columns: slice = slice(None),
) -> Iterator[tuple[int, Float[Tensor, "N D"]]]:
    """Draw rows of one table, block after block; the padding row is zero.

    Args:
        table: its name.
        shape: rows and columns of the whole table.
        config: distribution.
        seed: of the run.
        rows: which rows; all by default.
        columns: which columns.

    Yields:
        The first row, and the weights of it and the following ones. The memory is used again for the next block.
    """
    rows = range(shape[0]) if rows is None else rows
    if len(rows) == 0:
        return
    buffer = torch.empty(min(BLOCK_ROWS, shape[0]), shape[1])
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        first, last = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, shape[0])
        weight = buffer[: last - first]
        generator = _generator(seed, table, block)
        if config.init is TableInit.UNIFORM:
            bound = shape[0] ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
        else:
            weight.normal_(0.0, config.init_std, generator=generator)
        if block == 0:
            weight[PADDING_ROW] = 0.0
        begin, end = max(first, rows.start), min(last, rows.stop)
        yield begin, weight[begin - first : end - first, columns]


def _generator(seed: int, table: str, block: int) -> torch.Generator:
    name = f"{seed}/{table}" if block == 0 else f"{seed}/{table}\0{block}"
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
