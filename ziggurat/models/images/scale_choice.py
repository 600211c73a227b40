"""ScaleChoice: decides at which resolution each picture is embedded, from its file or from a look at its thumbnail.

    size of the file ─► place_of ─┬─► r_1: a thumbnail ─► backbone ─► choose, where `looks` ─┬─► r_1: that vector
                                  │                                                          └─► r_i: read on, again
                                  └─► r_i: computed at once

`embed_pictures` asks the choice, and never which one it is. `OneResolution` takes all pictures at one, a `ScaleModel`
looks at each; a choice of your own derives from `ScaleChoice` (docs/guides/extending.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.errors import ConfigError


class ScaleChoice(ABC):
    """Chooses the resolution of each picture. See the module's docstring.

    Attributes:
        resolutions: to choose among, ascending.
        num_scans: of a progressive JPEG that each resolution is read of; 0: all.
        looks: whether it chooses by the vector at the first resolution, which is then computed of a picture first.
    """

    resolutions: tuple[int, ...]
    num_scans: tuple[int, ...]
    looks: ClassVar[bool] = False

    def place_of(self, *, num_bytes: int) -> int:
        """Return the place of the resolution at which a picture is computed first.

        Args:
            num_bytes: of its file.
        """
        del num_bytes
        return 0

    def choose(self, vectors: Float[Tensor, "B D"]) -> Int64[Tensor, "B"]:
        """Return the place of the resolution of pictures that were computed at the first; asked where it `looks`."""
        return vectors.new_zeros(len(vectors)).long()

    @abstractmethod
    def to_json(self) -> dict[str, object]:
        """Return all that its choices depend on, as plain data: vectors of another choice are not gone on with."""

    def check_backbone(self, fingerprint: dict[str, str], *, where: str) -> None:  # noqa: B027  most take any
        """Refuse a backbone whose vectors it cannot judge.

        Raises:
            ConfigError: it cannot.
        """

    def check(self) -> None:
        """Refuse resolutions out of order, or without a number of scans each.

        Raises:
            ConfigError: they are.
        """
        resolutions = tuple(self.resolutions)
        if not resolutions or resolutions != tuple(sorted(set(resolutions))) or len(self.num_scans) != len(resolutions):
            raise ConfigError(
                expected="resolutions in ascending order, and a number of scans for each, 0 for all",
                found=f"resolutions {resolutions}, scans {tuple(self.num_scans)}",
                where=f"the choice {type(self).__name__}",
                ways_out="resolutions = (128, 224, 288) and num_scans = (4, 6, 0)",
            )


class OneResolution(ScaleChoice):
    """Takes all pictures at one resolution.

    Args:
        resolution: of all.
        num_scans: of a progressive JPEG that are read; 0: all.
    """

    def __init__(self, resolution: int, *, num_scans: int = 0) -> None:
        self.resolutions = (resolution,)
        self.num_scans = (num_scans,)

    def to_json(self) -> dict[str, object]:
        """Return the resolution and the scans."""
        return {"resolution": self.resolutions[0], "num_scans": self.num_scans[0]}
