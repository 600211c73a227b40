"""Add a choice of resolutions: by the size of a file alone, without a look at the picture.

    bytes of the file    < limits[0]     < limits[1]     …     others
    resolution           resolutions[0]  resolutions[1]        the last one

A JPEG of a plain shape on a white ground has few bytes, one full of detail has many: what its encoder could leave out,
a small picture lacks little of. That costs nothing, no thumbnail is computed first, and says less than a scale model,
which looks: compare both with fixed resolutions on pictures of your own. Files of other formats and other qualities
have other sizes, so it fits shops whose pictures come from one place.

    backbone = BackboneConfig(weights="efficientnet-lite0.pth").build()
    by_bytes = ResolutionByBytes((128, 224), limits=(20_000,))
    embed_pictures(find_pictures(["shop"]), backbone=backbone, out="vectors.parquet", scale=by_bytes)
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ziggurat.errors import ConfigError
from ziggurat.models.images import ScaleChoice


class ResolutionByBytes(ScaleChoice):
    """Chooses a resolution by the size of a picture's file.

    Args:
        resolutions: ascending.
        limits: bytes from which on a file goes to the next resolution, ascending, one fewer than resolutions.
    """

    def __init__(self, resolutions: Sequence[int], *, limits: Sequence[int]) -> None:
        if len(limits) != len(resolutions) - 1 or list(limits) != sorted(limits):
            raise ConfigError(
                expected="limits of bytes in ascending order, one fewer than resolutions",
                found=f"{len(resolutions)} resolutions, limits {tuple(limits)}",
                where="ResolutionByBytes",
                ways_out="ResolutionByBytes((128, 224), limits=(20_000,))",
            )
        self.resolutions = tuple(resolutions)
        # The bytes of a file are known before it is read; which scans a resolution needs, they do not say.
        self.num_scans = (0,) * len(self.resolutions)
        self.limits = tuple(limits)

    def place_of(self, *, num_bytes: int) -> int:
        """Return how many limits the file reaches."""
        return bisect.bisect_right(self.limits, num_bytes)

    def to_json(self) -> dict[str, object]:
        """Return the resolutions and the limits."""
        return {"resolutions": list(self.resolutions), "limits": list(self.limits)}
