"""The index of an export: built from vectors and catalogue, written, read, and asked by numbers of catalogue rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float32
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ziggurat.errors import RequestError
from ziggurat.serving.export_folder import damaged
from ziggurat.serving.item_catalogue import ItemCatalogue

INDEX_FILE = "items/index.safetensors"


@dataclass(frozen=True, kw_only=True)
class Hits:
    """What a search found; see `retriever.Found`."""

    scores: Tensor
    items: Tensor
    plans: tuple[str, ...] = ()


class ExactSearch:
    """All items by their inner products, without an index: exact, and linear in their number.

    Args:
        vectors: of all items of a catalogue.
    """

    def __init__(self, vectors: Float32[Tensor, "N D"]) -> None:
        self.vectors = vectors

    @property
    def attributes(self) -> dict[str, str]:
        """No filters: none."""
        return {}

    def parse(self, text: str) -> Any:
        """Refuse filters; raises RequestError."""
        raise RequestError(
            expected="no filter: this export has no attributes of items",
            found=text[:80],
            where="request, filter",
            ways_out="leave it out",
        )

    def explain(self, filter: Any, item: int) -> str:
        """Nothing filters here."""
        del filter, item
        return ""

    def passing(self, *, filters: Sequence[Any], exclude: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Masks of the items that are not excluded."""
        del filters
        masks = torch.ones(len(exclude), len(self.vectors), dtype=torch.bool)
        for mask, items in zip(masks, exclude, strict=True):
            if items is not None:
                mask[items] = False
        return list(masks)

    def search(
        self,
        queries: Float32[Tensor, "Q D"],
        *,
        k: int,
        filters: Sequence[Any],
        exclude: Sequence[Tensor | None],
        fewer_probes: bool = False,
        explain: bool = False,
    ) -> Hits:
        """The best k items of each query; of equal products the earlier one."""
        del fewer_probes
        products = queries @ self.vectors.T
        for row, mask in zip(products, self.passing(filters=filters, exclude=exclude), strict=True):
            row[~mask] = -torch.inf
        order = products.argsort(dim=1, descending=True, stable=True)[:, :k]
        scores = products.gather(1, order)
        items = torch.where(scores.isneginf(), -1, order)
        return Hits(scores=scores, items=items, plans=("exact scan",) * len(queries) if explain else ())


def save_index(vectors: Float32[Tensor, "N D"], path: Path, *, catalogue: ItemCatalogue) -> None:
    """Build the index of a catalogue and write it."""
    del catalogue
    save_file({"vectors": vectors.contiguous()}, str(path))


def load_index(path: Path, *, catalogue: ItemCatalogue) -> ExactSearch:
    """Read the index of a catalogue; raises ExportError."""
    try:
        vectors = load_file(str(path))["vectors"]
    except (SafetensorError, KeyError) as error:
        raise damaged(path, expected="an index in the format safetensors", found=str(error)[:200]) from error
    if vectors.shape[0] != len(catalogue):
        raise damaged(path, expected=f"vectors of {len(catalogue):,} items", found=f"{len(vectors):,}")
    return ExactSearch(vectors)
