"""The scale model: looks at a thumbnail, and picks the resolution at which a picture is worth computing.

Large pictures cost much (FLOPs grow with R², bytes with the scans that are read), and many are as good when small. The
backbone itself is the eye: its vector of the thumbnail, at the smallest resolution, goes through one linear map.

    thumbnail, r₁ ─► backbone ─► v₁ ─► linear map of v₁/|v₁| ─► scores s_1 … s_{R−1}
                                                                    │
                                                                    ▼
                              the smallest r_i with s_i ≥ t_i, else r_R       r₁: v₁ itself is the vector

What a score is depends on what a good vector is:

    ClassScale    the picture's class comes out right    s = the highest chance of a class, the same for all r_i
    NearScale     near the vector of the whole picture   s_i = the chance that cos(v_i, v_whole) ≥ τ

The thresholds are chosen on pictures that the map was not fitted on: the cheapest with which no more than a tolerated
share comes out worse than at r_R (`cheapest_thresholds`; `runs/images/fit_scale.py` makes the pictures' labels).

Cost: FLOPs(r₁) for every picture, and FLOPs(r_i) for those that go on to r_i. The linear map is nothing beside it.

Reference: Yan, Luo and Ceze, Characterizing and Taming Resolution in Convolutional Neural Networks, arXiv 2110.14819:
there a network of its own looks at a thumbnail of 112 pixels, trained with a multi-label loss as `NearScale` is here.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.errors import ConfigError, DataError
from ziggurat.files import Format
from ziggurat.models.images.scale_choice import ScaleChoice

SCALE_MODEL = Format(
    name="ziggurat.scale_model",
    what="a scale model",
    ways_out=("name a file that `ziggurat images scale` wrote", "fit it again: ziggurat images scale PICTURES"),
)
# On vectors whose numbers are about 1: they are often more than the pictures.
_DECAY = 0.05
_STEPS = 100
# Thresholds that are tried for each resolution: quantiles of its scores.
_QUANTILES = 15
# A threshold that no score reaches; JSON has no infinity.
NEVER = 2.0


class ScaleModel(nn.Module, ScaleChoice):
    """Picks a resolution for each picture from the vector of its thumbnail.

    Args:
        resolutions: ascending; the first is the thumbnail's.
        num_scans: of a progressive JPEG that each resolution needs; 0: all.
        dim: numbers of a vector.
        num_outputs: of the linear map.
        thresholds: of the scores, one for each resolution but the last.
        backbone: fingerprint of the backbone whose vectors it was fitted on.
    """

    kind: ClassVar[str]
    looks = True

    def __init__(
        self,
        *,
        resolutions: Sequence[int],
        num_scans: Sequence[int],
        dim: int,
        num_outputs: int,
        thresholds: Sequence[float] = (),
        backbone: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.resolutions = tuple(resolutions)
        self.num_scans = tuple(num_scans)
        # Until they are chosen, every picture goes to the largest resolution.
        self.thresholds = tuple(thresholds) or (NEVER,) * (len(self.resolutions) - 1)
        self.backbone = backbone or {}
        self.linear = nn.Linear(dim, num_outputs)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, vectors: Float[Tensor, "B D"]) -> Float[Tensor, "B K"]:
        """Return the linear map of vectors, whatever their lengths."""
        return self.linear(scaled(vectors))

    @abstractmethod
    def scores(self, vectors: Float[Tensor, "B D"]) -> Float[Tensor, "B R-1"]:
        """Return how sure it is that each resolution but the last is enough."""

    @abstractmethod
    def loss(self, vectors: Float[Tensor, "N D"], target: Shaped[Tensor, "N *_"]) -> Tensor:
        """Return the loss that it is fitted by, a mean over pictures."""

    @torch.no_grad()
    def choose(self, vectors: Float[Tensor, "B D"]) -> Int64[Tensor, "B"]:
        """Return the place of the chosen resolution of each picture."""
        return chosen(self.scores(vectors), self.thresholds)

    def fit(self, vectors: Float[Tensor, "N D"], target: Shaped[Tensor, "N *_"]) -> None:
        """Fit the linear map.

        Args:
            vectors: of thumbnails.
            target: of a `ClassScale` the number of each picture's class; of a `NearScale` (N, R − 1), whether the
                vector at each resolution is near.
        """
        fit_linear(self.linear, lambda: self.loss(vectors, target))

    def save(self, path: str | Path) -> Path:
        """Write it as one file with a checksum."""
        return SCALE_MODEL.write(path, self.to_json())

    def to_json(self) -> dict[str, object]:
        """Return all that its choices depend on, as plain data."""
        return {
            "kind": self.kind,
            "resolutions": list(self.resolutions),
            "num_scans": list(self.num_scans),
            "thresholds": list(self.thresholds),
            "backbone": self.backbone,
            "weight": self.linear.weight.tolist(),
            "bias": self.linear.bias.tolist(),
        }

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
            model = {each.kind: each for each in (ClassScale, NearScale)}[content["kind"]](
                resolutions=content["resolutions"],
                num_scans=content["num_scans"],
                dim=weight.shape[1],
                num_outputs=weight.shape[0],
                thresholds=content["thresholds"],
                backbone=content["backbone"],
            )
            model.linear.load_state_dict({"weight": weight, "bias": torch.tensor(content["bias"])})
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise DataError(
                expected="a scale model: kind, resolutions, scans, thresholds, weight and bias",
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


class ClassScale(ScaleModel):
    """Goes by how sure it is of the class, where pictures have one; one output a class."""

    kind = "class"

    def scores(self, vectors: Float[Tensor, "B D"]) -> Float[Tensor, "B R-1"]:
        """Return the highest chance of a class, for every resolution."""
        highest = torch.softmax(self(vectors), dim=1).amax(dim=1, keepdim=True)
        return highest.expand(-1, len(self.resolutions) - 1)

    def loss(self, vectors: Float[Tensor, "N D"], target: Int64[Tensor, "N"]) -> Tensor:
        """Return the cross entropy."""
        return F.cross_entropy(self(vectors), target)


class NearScale(ScaleModel):
    """Goes by whether a small picture's vector will be near that of the whole one; one output a resolution."""

    kind = "near"

    def scores(self, vectors: Float[Tensor, "B D"]) -> Float[Tensor, "B R-1"]:
        """Return the chance that the vector at each resolution is near."""
        return torch.sigmoid(self(vectors))

    def loss(self, vectors: Float[Tensor, "N D"], target: Bool[Tensor, "N R-1"]) -> Tensor:
        """Return the sum over resolutions of the binary cross entropies."""
        return F.binary_cross_entropy_with_logits(self(vectors), target.float()) * target.shape[1]


def scaled(vectors: Float[Tensor, "B D"]) -> Float[Tensor, "B D"]:
    """Return vectors of one length, √D, so that their numbers are about 1."""
    return F.normalize(vectors, dim=1) * vectors.shape[1] ** 0.5


def fit_linear(linear: nn.Linear, loss: Callable[[], Tensor]) -> None:
    """Fit a linear map to the least of a convex loss, with weight decay.

    Args:
        linear: the map.
        loss: a mean over pictures, computed anew at each call.
    """
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        total = loss() + _DECAY / 2 * linear.weight.square().sum()
        total.backward()
        return total

    optimizer.step(closure)


def chosen(scores: Float[Tensor, "B R-1"], thresholds: Sequence[float]) -> Int64[Tensor, "B"]:
    """Return the place of the smallest resolution whose score reaches its threshold, else of the last."""
    is_enough = scores >= torch.tensor(thresholds, dtype=scores.dtype)
    is_enough = torch.cat([is_enough, torch.ones(len(scores), 1, dtype=torch.bool)], dim=1)
    # argmax gives the first of equal ones.
    return is_enough.to(torch.uint8).argmax(dim=1)


def cheapest_thresholds(
    scores: Float[Tensor, "N R-1"], is_good: Bool[Tensor, "N R"], costs: Sequence[float], *, tolerance: float
) -> tuple[float, ...]:
    """Return the thresholds of least cost with which few pictures come out worse than at the last resolution.

    All combinations of some quantiles of the scores are tried, and of never. Pictures that come out better are not set
    against those that come out worse: among thousands of combinations one is always lucky with them.

    Args:
        scores: of pictures that the scale model was not fitted on.
        is_good: whether their vectors at each resolution are good.
        costs: of a picture that ends at each resolution.
        tolerance: share of the pictures that may be bad where they end, and good at the last resolution.
    """
    quantiles = torch.linspace(0, 1, _QUANTILES + 1)
    grids = [[*torch.quantile(column, quantiles).tolist(), NEVER] for column in scores.T]
    rows = torch.arange(len(scores))
    price = torch.tensor(costs, dtype=torch.float64)
    best = (NEVER,) * len(grids)
    best_cost = price[-1].item()
    for thresholds in itertools.product(*grids):
        places = chosen(scores, thresholds)
        cost = price[places].mean().item()
        num_worse = (is_good[:, -1] & ~is_good[rows, places]).sum().item()
        if cost < best_cost and num_worse <= tolerance * len(scores):
            best = thresholds
            best_cost = cost
    return best
