"""A backbone whose kernels are compiled for each resolution.

    n ≤ B pictures of R pixels ─► padded to B ─► kernels for (B, R, R) ─► the first n vectors

Convolutions stay those of torch's library; what is compiled is what stands between them (normalisation, activation,
padding), which is then one pass over memory instead of several. Kernels fit one shape, and to compile them takes half a
minute, so that a batch that is not full is padded rather than compiled for: it costs what a full one costs, at the end
of a part. The code is kept for the next process (`ziggurat.cache`).

It pays from some thousand pictures on (docs/guides/pictures.md); the last bits of vectors differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from ziggurat.cache import keep_compiled_code
from ziggurat.errors import ConfigError
from ziggurat.models.images.backbone import Backbone


class CompiledBackbone:
    """Computes the vectors of a backbone by kernels of its own for each resolution.

    Args:
        backbone: defines the vectors.
        batch_size: the largest batch; smaller ones are padded to it.
    """

    def __init__(self, backbone: Backbone, *, batch_size: int) -> None:
        self._backbone = backbone
        self._batch_size = batch_size
        self._kernels: dict[int, Callable[[Tensor], Tensor]] = {}

    @torch.inference_mode()
    def __call__(self, pixels: UInt8[Tensor, "B R R 3"]) -> Float[Tensor, "B D"]:
        """Return the vectors of pictures of one resolution.

        Raises:
            ConfigError: torch cannot compile the network here.
        """
        num, resolution = pixels.shape[:2]
        full = F.pad(pixels, (0, 0, 0, 0, 0, 0, 0, self._batch_size - num))
        if resolution in self._kernels:
            return self._kernels[resolution](full)[:num]
        keep_compiled_code()
        kernels = torch.compile(self._backbone.vectors, dynamic=False)
        try:
            # Compiles.
            vectors = kernels(full)[:num]
        except Exception as error:  # the compiler's, the linker's, or torch's over this network
            raise ConfigError(
                expected="a network that torch can compile on this machine, which needs a C++ compiler",
                found=f"{type(error).__name__}: {error}"[:400],
                where="--compile",
                ways_out=("leave --compile out", "install g++"),
            ) from error
        self._kernels[resolution] = kernels
        return vectors
