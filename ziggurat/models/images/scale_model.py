"""The scale model: looks at a thumbnail, and picks the resolution at which a picture is worth computing.

Large pictures cost much (FLOPs grow with R², bytes with the scans that are read), and most are as good when small. The
backbone itself is the eye: its vector of the thumbnail, at the smallest resolution, goes through one linear map.

    thumbnail, r₁ ─► backbone ─► v₁ ─► σ(W v₁/|v₁| + b) = p₁ … p_R     p_i: the chance that the vector at r_i is good
                                        │
                                        ▼
               the smallest r_i with p_i ≥ max(p) − margin             r₁: v₁ itself is the vector, nothing is added

*Good* means what the labels say that it was fitted on (`runs/images/fit_scale.py`): near enough to the vector at the
largest resolution, or the class of the picture right. By the rule of the margin a picture that is hopeless at every
resolution costs as little as one that is good at every resolution.

Cost: FLOPs(r₁) for every picture, and FLOPs(r_i) for those that go on to r_i. The linear map is nothing beside it.

Reference: Yan, Luo and Ceze, Characterizing and Taming Resolution in Convolutional Neural Networks, arXiv 2110.14819:
there a network of its own looks at a thumbnail of 112 pixels, trained with the same multi-label loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.errors import ConfigError, DataError
from ziggurat.files import Format

SCALE_MODEL = Format(
    name="ziggurat.scale_model",
    what="a scale model",
    ways_out=("name a file that `ziggurat images scale` wrote", "fit it again: ziggurat images scale PICTURES"),
)
# Weight decay of the fit: vectors of a thousand numbers, and often fewer pictures than that.
_DECAY = 1e-3
_STEPS = 200


class ScaleModel(nn.Module):
    """Picks a resolution for each picture from the vector of its thumbnail.

    Args:
        resolutions: ascending; the first is the thumbnail's.
        num_scans: of a progressive JPEG that each resolution needs; 0: all.
        dim: numbers of a vector.
        margin: how much smaller the chance of a good vector may be than at the best resolution.
        backbone: fingerprint of the backbone whose vectors it was fitted on.
    """

    def __init__(
        self,
        *,
        resolutions: Sequence[int],
        num_scans: Sequence[int],
        dim: int,
        margin: float = 0.0,
        backbone: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.resolutions = tuple(resolutions)
        self.num_scans = tuple(num_scans)
        self.margin = margin
        self.backbone = backbone or {}
        self.linear = nn.Linear(dim, len(self.resolutions))

    def forward(self, vectors: Float[Tensor, "B D"]) -> Float[Tensor, "B R"]:
        """Return the chance that the vector at each resolution is good."""
        return torch.sigmoid(self.linear(F.normalize(vectors, dim=1) * vectors.shape[1] ** 0.5))

    @torch.no_grad()
    def choose(self, vectors: Float[Tensor, "B D"]) -> Int64[Tensor, "B"]:
        """Return the place of the chosen resolution of each picture."""
        return chosen(self(vectors), margin=self.margin)

    def fit(self, vectors: Float[Tensor, "N D"], is_good: Bool[Tensor, "N R"]) -> None:
        """Fit the linear map: the sum of the binary cross entropies of all resolutions.

        Args:
            vectors: of thumbnails.
            is_good: whether the vector at each resolution is good.
        """
        scaled = F.normalize(vectors, dim=1) * vectors.shape[1] ** 0.5
        target = is_good.float()
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        optimizer = torch.optim.LBFGS(self.linear.parameters(), max_iter=_STEPS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(self.linear(scaled), target) * target.shape[1]
            loss = loss + _DECAY / 2 * self.linear.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    def save(self, path: str | Path) -> Path:
        """Write it as one file with a checksum."""
        return SCALE_MODEL.write(
            path,
            {
                "resolutions": list(self.resolutions),
                "num_scans": list(self.num_scans),
                "margin": self.margin,
                "backbone": self.backbone,
                "weight": self.linear.weight.tolist(),
                "bias": self.linear.bias.tolist(),
            },
        )

    @staticmethod
    def load(path: str | Path) -> ScaleModel:
        """Read what `save` wrote.

        Raises:
            MissingFileError: there is no such file.
            DataError: it is damaged, or no scale model.
        """
        content = SCALE_MODEL.read(path)
        try:
            weight = torch.tensor(content["weight"])
            model = ScaleModel(
                resolutions=content["resolutions"],
                num_scans=content["num_scans"],
                dim=weight.shape[1],
                margin=content["margin"],
                backbone=content["backbone"],
            )
            model.linear.load_state_dict({"weight": weight, "bias": torch.tensor(content["bias"])})
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise DataError(
                expected="a scale model: resolutions, scans, margin, weight and bias",
                found=f"{type(error).__name__}: {error}"[:200],
                where=str(path),
                ways_out=SCALE_MODEL.ways_out,
            ) from error
        return model

    def check_backbone(self, fingerprint: dict[str, str], *, where: str) -> None:
        """Refuse a backbone whose vectors it has never seen.

        Raises:
            ConfigError: it was fitted with another network, or other weights.
        """
        if self.backbone != fingerprint:
            named = self.backbone.get("name", "none")
            raise ConfigError(
                expected=f"the backbone that the scale model was fitted with: {named}, and its weights",
                found=fingerprint["name"] + (", with other weights" if named == fingerprint["name"] else ""),
                where=where,
                ways_out=(
                    "name that backbone and its weights: --backbone NAME --weights FILE",
                    "fit one for this backbone: ziggurat images scale PICTURES --weights FILE --out scale.json",
                ),
            )


def chosen(chances: Float[Tensor, "B R"], *, margin: float) -> Int64[Tensor, "B"]:
    """Return the smallest resolution whose chance is within a margin of the best one's."""
    is_enough = chances >= chances.amax(dim=1, keepdim=True) - margin
    # argmax of bytes gives the first of equal ones.
    return is_enough.to(torch.uint8).argmax(dim=1)
