"""Rescorer: the OverArch of an export, which scores thousands of found items anew before the ranker sees hundreds.

    user vectors ──► user parts ─┐
                                 ├─► φ of each user with its candidates, in one forward
    items/over_arch.safetensors ─┘   item parts of the whole catalogue, computed when the export was made

The file is mapped, so processes that serve one export share its memory. See `models/retrieval/over_arch.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float32, Int64
from safetensors import SafetensorError
from torch import Tensor

from ziggurat.models.retrieval.over_arch import OverArch
from ziggurat.serving.answering.stages import stage
from ziggurat.serving.export.aligned_tensors import load_aligned, save_aligned
from ziggurat.serving.export.export_folder import damaged

OVER_ARCH_FILE = "items/over_arch.safetensors"
_CHUNK_ITEMS = 65_536


class Rescorer:
    """Scores items of a catalogue for users, by an OverArch.

    Args:
        over_arch: the network.
        parts: of all items.
    """

    def __init__(self, over_arch: OverArch, *, parts: Float32[Tensor, "N X"]) -> None:
        self.over_arch = over_arch
        self.parts = parts
        # Once, since they are the same for all users and items.
        with torch.no_grad():
            self._weights = over_arch.pair_weights()

    @staticmethod
    def build(over_arch: OverArch, *, vectors: Float32[Tensor, "N D"]) -> Rescorer:
        """Compute the parts of items from their vectors."""
        with torch.no_grad():
            parts = [over_arch.item_parts(some) for some in vectors.split(_CHUNK_ITEMS)]
        return Rescorer(over_arch, parts=torch.cat(parts) if parts else vectors.new_empty(0, over_arch.item_width))

    def save(self, path: Path) -> None:
        """Write the parts into an export."""
        save_aligned({"parts": self.parts}, path)

    @staticmethod
    def load(path: Path, *, over_arch: OverArch, num_items: int) -> Rescorer:
        """Read the parts of a catalogue from an export; raises ExportError where they do not fit."""
        try:
            parts = load_aligned(path)["parts"]
        except (SafetensorError, KeyError, ValueError) as error:
            raise damaged(path, expected="parts of items in the format safetensors", found=str(error)[:200]) from error
        if parts.shape != (num_items, over_arch.item_width) or parts.dtype != torch.float32:
            expected = f"{num_items:,} items of {over_arch.item_width} numbers in FP32"
            raise damaged(path, expected=expected, found=f"{tuple(parts.shape)} of {parts.dtype}")
        return Rescorer(over_arch, parts=parts)

    @torch.no_grad()
    def changed(self, numbers: Int64[Tensor, "M"], *, vectors: Float32[Tensor, "M D"]) -> Rescorer:
        """The same with other vectors of some items; numbers behind the last one are new items. Copies the parts.

        Args:
            numbers: of the items.
            vectors: of the items, as they are now.
        """
        # Answers that are under way read the old parts, so that nothing is written into these.
        parts = self.parts.new_zeros(max(len(self.parts), int(numbers.max()) + 1), self.parts.shape[1])
        parts[: len(self.parts)] = self.parts
        parts[numbers] = self.over_arch.item_parts(vectors)
        return Rescorer(self.over_arch, parts=parts)

    @torch.no_grad()
    def scores(self, users: Float32[Tensor, "B D"], items: Sequence[Int64[Tensor, "_"]]) -> list[Float32[Tensor, "_"]]:
        """φ of each user with items of the catalogue.

        Args:
            users: their vectors.
            items: numbers of the items of each user.
        """
        return self.scores_of_parts(users, [self.parts[mine] for mine in items])

    @torch.no_grad()
    def scores_of_vectors(
        self, users: Float32[Tensor, "B D"], items: Sequence[Float32[Tensor, "_ D"]]
    ) -> list[Float32[Tensor, "_"]]:
        """φ of each user with items of these vectors, which need not be in the catalogue."""
        return self.scores_of_parts(users, [self.over_arch.item_parts(mine) for mine in items])

    @stage("over_arch")
    @torch.no_grad()
    def scores_of_parts(
        self, users: Float32[Tensor, "B D"], items: Sequence[Float32[Tensor, "_ X"]]
    ) -> list[Float32[Tensor, "_"]]:
        """φ of each user with items of these parts; each user by itself, so that none changes another's numbers."""
        return [
            self.over_arch.scores(
                self.over_arch.user_parts(user.unsqueeze(0)), mine.unsqueeze(0), weights=self._weights
            )[0]
            for user, mine in zip(users, items, strict=True)
        ]
