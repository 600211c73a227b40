"""EncodedPart: one file of an encoded split, and what its rows held; a unit of work of `build.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ziggurat.config import JSON, from_json
from ziggurat.data.encoded.part_files import Part
from ziggurat.data.preprocess.preprocessing import FeatureCounters
from ziggurat.errors import DataError
from ziggurat.plain import as_group, as_text


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """One file of an encoded split.

    Args:
        part: the file, as the manifest knows it.
        counters: by feature, what its rows held.
    """

    part: Part
    counters: dict[str, FeatureCounters]

    def to_json(self) -> dict[str, JSON]:
        """The part as plain data."""
        part: dict[str, JSON] = {
            **asdict(self.part),
            "group_rows": list(self.part.group_rows),
            "row_sum": f"{self.part.row_sum:x}",
            "digests": list(self.part.digests),
        }
        return {"part": part, "counters": {name: asdict(each) for name, each in self.counters.items()}}

    @staticmethod
    def from_json(data: dict[str, JSON]) -> EncodedPart:
        """Read what `to_json` made."""
        part = as_group(data["part"])
        # In hex in the note, since other readers of JSON hold no whole number of 64 bits.
        part = {**part, "row_sum": int(as_text(part["row_sum"]), 16)}
        return from_json(EncodedPart, {**data, "part": part}, where="note of an encoded part", error=DataError)
