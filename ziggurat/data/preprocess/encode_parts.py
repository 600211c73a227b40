"""EncodedPart: one file of an encoded split, and what its rows held; a unit of work of `build.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ziggurat.config import JSON
from ziggurat.data.encoded.part_files import Part
from ziggurat.data.preprocess.preprocessing import FeatureCounters


@dataclass(frozen=True, kw_only=True)
class EncodedPart:
    """One file of an encoded split.

    Args:
        part: the file, as the manifest knows it.
        counters: by feature, what its rows held.
    """

    part: Part
    counters: Mapping[str, FeatureCounters]

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
    def from_json(data: Any) -> EncodedPart:
        """Read what `to_json` made."""
        part = {
            **data["part"],
            "group_rows": tuple(data["part"]["group_rows"]),
            "row_sum": int(data["part"]["row_sum"], 16),
            "digests": tuple(data["part"]["digests"]),
        }
        counters = {name: FeatureCounters(**each) for name, each in data["counters"].items()}
        return EncodedPart(part=Part(**part), counters=counters)
