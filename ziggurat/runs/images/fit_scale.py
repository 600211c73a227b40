"""Fit a scale model: which resolution is good enough for which picture, learned from pictures of the same kind.

    pictures ─► vectors at every resolution, each from as many scans as it will be read of ─┐
            └─► vectors of the whole files at the largest resolution                        │
                                                                                            ▼
    shard 1 │ 2 │ 3 │ 4     fit on three, look at the fourth: scores, and which resolutions are good   (each in turn)
                                     │
                                     ├─► thresholds, from all held-out scores
                                     ├─► what is printed: each shard by thresholds from the scores of the three others
                                     └─► the map itself is fitted again on all

*Good* is a vector whose cosine to that of the whole file is at least τ; or, where classes are given, one that a linear
classifier takes for the right class. That classifier, too, has never seen the pictures that it judges: else it would be
right at every resolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ziggurat.data.pictures.found import FoundPicture
from ziggurat.data.pictures.picture_file import PictureFile, PictureLimits, RefusedPictureError
from ziggurat.errors import ConfigError, DataError
from ziggurat.models.images.backbone import Backbone
from ziggurat.models.images.scale_model import (
    ClassScale,
    NearScale,
    ScaleModel,
    cheapest_thresholds,
    chosen,
    fit_linear,
    scaled,
)
from ziggurat.training.report.progress import NoProgress, Progress
from ziggurat.typed import Count, Range, checked

_BATCH = 32
LEAST_PICTURES = 40
# All combinations of thresholds are tried: 17 for each resolution but the last.
_MOST_RESOLUTIONS = 5


@dataclass(frozen=True, kw_only=True)
@checked
class ScaleConfig:
    """Settings of a scale model's fit.

    Args:
        resolutions: to choose among, ascending; the first is the thumbnail's.
        num_scans: of a progressive JPEG that each resolution is read of; 0: all.
        tau: cosine to the vector of the whole file from which on a vector is good; not asked where classes are given.
        tolerance: share of the pictures that may come out bad and would be good at the largest resolution.
        shards: that take turns in being held out.
        seed: of the division into shards.
    """

    resolutions: tuple[int, ...] = (128, 224, 288)
    num_scans: tuple[int, ...] = (4, 6, 6)
    tau: Annotated[float, Range(0.0, 1.0, "a cosine")] = 0.9
    tolerance: Annotated[float, Range(0.0, 1.0, "a share")] = 0.01
    shards: Count = 4
    seed: int = 0

    def __post_init__(self) -> None:
        ascending = tuple(sorted(set(self.resolutions)))
        is_ladder = 2 <= len(ascending) <= _MOST_RESOLUTIONS and ascending == self.resolutions
        if not is_ladder or len(self.num_scans) != len(self.resolutions) or min(self.num_scans) < 0:
            usable = ascending if 2 <= len(ascending) <= _MOST_RESOLUTIONS else (128, 224, 288)
            scans = (4, *(6 for _ in usable[1:]))
            raise ConfigError(
                expected=f"two to {_MOST_RESOLUTIONS} resolutions, ascending, and for each a number of scans, 0: all",
                found=f"resolutions {self.resolutions}, scans {self.num_scans}",
                where="the scale model",
                ways_out=f"--resolutions {','.join(map(str, usable))} --scans {','.join(map(str, scans))}",
            )


@dataclass(frozen=True, kw_only=True)
class ScaleFit:
    """A fitted scale model, and what it does to the pictures that were held out from it.

    Args:
        model: to be saved, and given to `embed_pictures`.
        num_pictures: that it was fitted on.
        shares: of the held-out pictures that end at each resolution, by thresholds that were chosen without them.
        good: share of them whose vector is good at each resolution, if all were taken there.
        good_chosen: the same at the resolutions where they end.
        flops: of a picture at the resolution where it ends, the thumbnail included; a mean.
        flops_fixed: of a picture at each resolution.
        held_scores: of the pictures while they were held out, for thresholds of another tolerance.
        held_good: whether their vectors were good at each resolution.
    """

    model: ScaleModel
    num_pictures: int
    shares: tuple[float, ...]
    good: tuple[float, ...]
    good_chosen: float
    flops: float
    flops_fixed: tuple[int, ...]
    held_scores: Float[Tensor, "N R-1"]
    held_good: Bool[Tensor, "N R"]


def vectors_for_scale(
    pictures: Sequence[FoundPicture],
    *,
    backbone: Backbone,
    config: ScaleConfig,
    limits: PictureLimits | None = None,
    progress: Progress | None = None,
) -> tuple[list[FoundPicture], list[Float[Tensor, "N D"]]]:
    """Return the pictures that can be read, and their vectors: at each resolution, and last of the whole files.

    Args:
        pictures: to learn from.
        backbone: computes the vectors.
        config: resolutions and scans.
        limits: above which a picture is left out.
        progress: shows pictures.
    """
    progress = progress or NoProgress()
    looks = [*zip(config.resolutions, config.num_scans, strict=True), (config.resolutions[-1], 0)]
    kept: list[FoundPicture] = []
    found: list[list[Tensor]] = [[] for _ in looks]
    progress.begin("vectors at every resolution", total=len(pictures))
    for start in range(0, len(pictures), _BATCH):
        squares: list[list[np.ndarray]] = []
        for picture in pictures[start : start + _BATCH]:
            file = PictureFile(picture.path, limits=limits)
            try:
                squares.append([file.pixels(resolution, num_scans=scans) for resolution, scans in looks])
            except RefusedPictureError as error:
                progress.say(f"left out: {picture.name}, {error}")
            else:
                kept.append(picture)
        for place, batch in enumerate(zip(*squares, strict=True)):
            found[place].append(backbone(torch.from_numpy(np.stack(batch))))
        progress.update(min(start + _BATCH, len(pictures)))
    progress.end()
    return kept, [torch.cat(each) if each else torch.empty(0, backbone.dim) for each in found]


def fit_scale_model(
    vectors: Sequence[Float[Tensor, "N D"]],
    *,
    flops: Sequence[int],
    backbone: Mapping[str, str],
    classes: Sequence[str] | None = None,
    config: ScaleConfig | None = None,
) -> ScaleFit:
    """Fit a scale model on the vectors of pictures, and measure it on pictures that were held out.

    Args:
        vectors: at each resolution, and last of the whole files.
        flops: of a picture at each resolution.
        backbone: fingerprint of what made the vectors.
        classes: of the pictures; None: a vector is good where it is near that of the whole file.
        config: resolutions, what is good, what is tolerated.

    Raises:
        DataError: there are too few pictures to hold some out.
    """
    config = config or ScaleConfig()
    num = len(vectors[0])
    if num < LEAST_PICTURES:
        raise DataError(
            expected=f"at least {LEAST_PICTURES} pictures to learn from",
            found=f"{num}",
            where="the scale model",
            ways_out=("name more pictures", "leave the scale model out: ziggurat images embed --resolution R"),
        )
    if classes is not None and len(set(classes)) < 2:
        raise DataError(
            expected="pictures of at least two classes: the names of the folders that they lie in",
            found=f"one class, {next(iter(classes))!r}: every vector would be good",
            where="the scale model, --by-class",
            ways_out=(
                "name the folder above those of the classes",
                "leave --by-class out: --tau says which vectors are good",
            ),
        )
    costs = [flops[0], *(flops[0] + each for each in flops[1:])]
    by_resolution = vectors[:-1]
    scores = torch.zeros(num, len(by_resolution) - 1)
    is_good = torch.zeros(num, len(by_resolution), dtype=torch.bool)
    shard = torch.arange(num)[torch.randperm(num, generator=torch.Generator().manual_seed(config.seed))] % config.shards
    for number in range(config.shards):
        held = shard == number
        fitting, good = _fitted(vectors, ~held, classes=classes, config=config)
        is_good[held] = good[held]
        with torch.no_grad():
            scores[held] = fitting.scores(vectors[0][held])
    thresholds = cheapest_thresholds(scores, is_good, costs, tolerance=config.tolerance)
    model, _ = _fitted(vectors, torch.ones(num, dtype=torch.bool), classes=classes, config=config)
    model.thresholds = thresholds
    model.backbone = dict(backbone)
    places = torch.zeros(num, dtype=torch.int64)
    for number in range(config.shards):
        # Thresholds flatter the pictures that they were chosen on: of few pictures, by several of a hundred.
        held = shard == number
        others = cheapest_thresholds(scores[~held], is_good[~held], costs, tolerance=config.tolerance)
        places[held] = chosen(scores[held], others)
    return ScaleFit(
        model=model,
        num_pictures=num,
        shares=tuple((places == place).float().mean().item() for place in range(len(by_resolution))),
        good=tuple(is_good.float().mean(dim=0).tolist()),
        good_chosen=is_good[torch.arange(num), places].float().mean().item(),
        flops=torch.tensor(costs, dtype=torch.float64)[places].mean().item(),
        flops_fixed=tuple(flops),
        held_scores=scores,
        held_good=is_good,
    )


def _fitted(
    vectors: Sequence[Float[Tensor, "N D"]],
    is_seen: Bool[Tensor, "N"],
    *,
    classes: Sequence[str] | None,
    config: ScaleConfig,
) -> tuple[ScaleModel, Bool[Tensor, "N R"]]:
    """Return a scale model that has seen some pictures, and of all pictures which resolutions are good.

    Where classes are given, these are judged by a classifier that has seen the same pictures alone.
    """
    by_resolution = vectors[:-1]
    dim = by_resolution[0].shape[1]
    if classes is None:
        whole = F.normalize(vectors[-1], dim=1)
        cosines = torch.stack([(F.normalize(each, dim=1) * whole).sum(dim=1) for each in by_resolution], dim=1)
        is_good = cosines >= config.tau
        near = NearScale(
            resolutions=config.resolutions,
            num_scans=config.num_scans,
            dim=dim,
            num_outputs=len(by_resolution) - 1,
        )
        near.fit(by_resolution[0][is_seen], is_good[is_seen, :-1])
        return near, is_good
    names = sorted(set(classes))
    target = torch.tensor([names.index(each) for each in classes])
    seen = torch.cat([each[is_seen] for each in by_resolution])
    classify = classifier(seen, target[is_seen].repeat(len(by_resolution)), num_classes=len(names))
    is_good = torch.stack([classify(each) == target for each in by_resolution], dim=1)
    by_class = ClassScale(resolutions=config.resolutions, num_scans=config.num_scans, dim=dim, num_outputs=len(names))
    by_class.fit(by_resolution[0][is_seen], target[is_seen])
    return by_class, is_good


def classifier(
    vectors: Float[Tensor, "N D"], target: Int64[Tensor, "N"], *, num_classes: int
) -> Callable[[Float[Tensor, "M D"]], Int64[Tensor, "M"]]:
    """Return a linear classifier of vectors, as a function from vectors to numbers of classes.

    Args:
        vectors: of pictures at one resolution, or at several one after the other.
        target: their classes by number.
        num_classes: how many there are.
    """
    linear = nn.Linear(vectors.shape[1], num_classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    inputs = scaled(vectors)
    fit_linear(linear, lambda: F.cross_entropy(linear(inputs), target))

    def classify(others: Float[Tensor, "M D"]) -> Int64[Tensor, "M"]:
        with torch.no_grad():
            return linear(scaled(others)).argmax(dim=1)

    return classify
