"""How a vector index is built: clusters, what a search reads first, what is kept to score again."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated

from ziggurat.typed import Range, checked


class Kept(enum.StrEnum):
    """Vectors that an index keeps beside its INT8 rows, to score the best again."""

    NONE = "none"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


class FirstPass(enum.StrEnum):
    """The bits of a row that a search reads first."""

    AUTO = "auto"  # the upper four bits, if the best rows are found so
    OFF = "off"  # all bits


@dataclass(frozen=True, kw_only=True)
@checked
class VectorIndexConfig:
    """Settings for building a vector index.

    Args:
        num_clusters: at most; 0: four times the square root of the number of vectors.
        probes: clusters that a search looks into unless it says; 0: as many as hold about 16,384 rows.
        kept: what is kept to score the best candidates again: 0, 2 or 4 bytes a number.
        first_pass: what a search reads of a row first.
        seed: of the clustering.
    """

    num_clusters: Annotated[int, Range(0, 2**24)] = 0
    probes: Annotated[int, Range(0, 2**24)] = 0
    kept: Kept = Kept.NONE
    first_pass: FirstPass = FirstPass.AUTO
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
