"""TeacherHistory: the vectors that a teacher has logged of earlier rows of the same user, as one more input.

    rows of a user      │ e1   e2   e3   e4 │ this row            in a batch, (W,) int32
    logged vectors      │ v1   v2   –    v4 │  ?          ──►     [ 3 │ v4 │ v2 │ v1 │ 0 … ]      latest first

No raw file has the column: `data/teachers/history.py` joins it, and a request of a server may bring it, a list of lists
of numbers with the latest first. Vectors stay in the bytes in which they were logged, BF16 or INT8, from the side table
to the device: 4 + length · row bytes a row, which is 2,052 for 16 vectors of 64 numbers in BF16. A model pools them
(`models/blocks/vector_histories.py`).

Reference: LoopFM, "Learning frOm HistOrical RePresentations of Foundation Model", arXiv 2605.29280.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from ziggurat.config import JSON
from ziggurat.errors import SchemaError
from ziggurat.features.inputs import LARGEST_OF_VECTORS, HistoryPooling, VectorHistory, VectorSpec
from ziggurat.features.kinds.feature import Cells, ColumnType, Feature, Parsed, RequestReader
from ziggurat.typed import Dim, Length, checked


@dataclass(frozen=True, kw_only=True)
@functools.partial(checked, error=SchemaError)
class TeacherHistory(Feature):
    """The last vectors that a teacher has logged of a user; see the module's docstring.

    `ziggurat train --teacher FOLDER --teacher-history COLUMN` writes it into the schema of a run.

    Args:
        key: the raw column of the user.
        length: most vectors of a row.
        dim: numbers of a vector.
        format: row format of the vectors.
        row_words: 4 bytes each, of a vector in this format.
        pooling: what a model makes of them.
    """

    kind: Literal["teacher_history"] = "teacher_history"
    key: str = ""
    length: Length = 16
    dim: Dim = 1
    format: str = "bf16"
    row_words: Dim = 1
    pooling: HistoryPooling = HistoryPooling.ATTENTION

    json_schema: ClassVar[dict[str, JSON]] = {
        "type": ["array", "null"],
        "items": {"type": "array", "items": {"type": "number"}},
    }

    @property
    def history(self) -> VectorHistory:
        """Return the form in which a sample has it."""
        return VectorHistory(
            length=self.length, dim=self.dim, format=self.format, row_words=self.row_words, pooling=self.pooling
        )

    @property
    def about(self) -> str:
        """The column of the user."""
        return self.key

    def spec(self) -> VectorSpec:
        """Return what the dense network reads, and the packed history that a batch holds."""
        return VectorSpec(name=self.name, dim=self.history.pooled_dim, history=self.history)

    def parse(self, cells: Cells) -> Parsed:
        """Return the packed history of each row; that of no vector where it is missing."""
        return cells.vector_histories(self.history)

    def of_request(self, value: object, read: RequestReader) -> list[list[float | None]]:
        """Return the vectors, latest first; those beyond the length are left out."""
        if not isinstance(value, list | tuple):
            raise read.refused(value, expected=f"a list of vectors of {self.dim} numbers each, the latest first")
        vectors = [read.numbers(each) for each in value[: self.length]]
        for each in vectors:
            # NaN, which a text may say, is in no range either.
            if len(each) != self.dim or not all(
                number is not None and abs(number) <= LARGEST_OF_VECTORS for number in each
            ):
                expected = f"vectors of {self.dim} numbers each, of at most {LARGEST_OF_VECTORS:g}"
                raise read.refused(value, expected=expected)
        return vectors

    def request_type(self) -> ColumnType:
        """Return lists of lists of 32-bit floats."""
        import polars as pl

        return pl.List(pl.List(pl.Float32))
