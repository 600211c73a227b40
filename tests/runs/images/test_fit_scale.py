"""Fitting a scale model: what is good is judged by pictures that were held out, in both senses of good."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.data.pictures.made import animated, encoded, photo
from tests.models.images.tiny import TinyBackbone
from ziggurat.data.pictures.found import find_pictures
from ziggurat.errors import ConfigError, DataError
from ziggurat.models.images.scale_model import chosen
from ziggurat.runs.images.fit_scale import ScaleConfig, fit_scale_model, vectors_for_scale

CONFIG = ScaleConfig(resolutions=(32, 64), num_scans=(1, 0), tolerance=0.02)


def made(*, num: int = 400, dim: int = 24) -> tuple[list[torch.Tensor], list[str], torch.Tensor]:
    """Vectors of three classes; of a third of the pictures the class is only to be seen at the larger resolution."""
    torch.manual_seed(0)
    target = torch.randint(0, 3, (num,))
    is_hard = torch.rand(num) < 1 / 3
    shown = 5 * torch.nn.functional.one_hot(target, dim)
    small = torch.randn(num, dim) + shown * ~is_hard[:, None]
    large = torch.randn(num, dim) + shown
    return [small, large, large], [f"class {each}" for each in target.tolist()], is_hard


def test_by_class_the_hard_pictures_go_on_and_the_cost_falls() -> None:
    vectors, classes, is_hard = made()
    fit = fit_scale_model(vectors, flops=(10, 40), backbone={"name": "tiny"}, classes=classes, config=CONFIG)
    assert fit.good[0] < 0.85
    assert fit.good[1] > 0.95
    # Thresholds that were chosen on others may overstep what is tolerated, by a picture or two of 400.
    assert fit.good_chosen >= fit.good[1] - CONFIG.tolerance - 2.5 / 400
    assert fit.flops < 40
    assert fit.shares[0] * 10 + fit.shares[1] * 50 == pytest.approx(fit.flops)
    places = fit.model.choose(vectors[0])
    assert places[is_hard].float().mean() > places[~is_hard].float().mean() + 0.4
    assert fit.model.backbone == {"name": "tiny"}


def test_by_cosine_the_pictures_that_change_go_on() -> None:
    torch.manual_seed(0)
    large = torch.randn(400, 24)
    changes = large[:, 0] > 0.3
    small = torch.where(changes[:, None], torch.randn(400, 24), large + 0.1 * torch.randn(400, 24))
    small[:, 0] = large[:, 0].abs() * torch.where(changes, 3, -3)  # to be seen in the thumbnail
    fit = fit_scale_model([small, large, large], flops=(10, 40), backbone={}, config=CONFIG)
    assert fit.model.kind == "near"
    assert fit.good[1] == 1
    assert fit.good_chosen >= 1 - CONFIG.tolerance - 2.5 / 400


def test_pictures_that_do_not_differ_by_what_is_seen_all_go_on() -> None:
    torch.manual_seed(0)
    large = torch.randn(200, 24)
    fit = fit_scale_model(
        [torch.randn(200, 24), large, large],
        flops=(10, 40),
        backbone={},
        config=ScaleConfig(resolutions=(32, 64), num_scans=(0, 0), tolerance=0.0),
    )
    assert fit.shares == (0, 1)
    assert fit.flops == 50


def test_vectors_are_of_the_scans_that_will_be_read_and_refused_pictures_are_named(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.jpg").write_bytes(encoded(photo(200, 200, seed=number), "JPEG", progressive=True))
    (tmp_path / "moves.gif").write_bytes(animated("GIF"))
    said: list[str] = []

    class Saying:
        def __getattr__(self, name: str) -> object:
            return said.append if name == "say" else lambda *_, **__: None

    backbone = TinyBackbone()
    kept, vectors = vectors_for_scale(
        find_pictures([tmp_path]),
        backbone=backbone,
        config=CONFIG,
        progress=Saying(),  # type: ignore[arg-type]
    )
    assert [each.name for each in kept] == [f"{number}.jpg" for number in range(5)]
    assert [tuple(each.shape) for each in vectors] == [(5, 16)] * 3
    assert said == ["left out: moves.gif, animated: 2 frames"]
    assert torch.equal(vectors[1], vectors[2])  # 0 scans: the whole file
    assert not torch.equal(vectors[0], vectors[1])


def test_impossible_settings_are_refused() -> None:
    for settings in (
        {"resolutions": (96,), "num_scans": (0,)},
        {"resolutions": (224, 96), "num_scans": (0, 0)},
        {"resolutions": (96, 224), "num_scans": (0,)},
        {"resolutions": (96, 224), "num_scans": (4, -1)},
        {"resolutions": (64, 96, 128, 160, 192, 224), "num_scans": (0,) * 6},
    ):
        with pytest.raises(ConfigError, match="ascending"):
            ScaleConfig(**settings)
    with pytest.raises(ConfigError):
        ScaleConfig(tau=1.5)
    with pytest.raises(DataError, match="at least 40"):
        fit_scale_model([torch.zeros(5, 4)] * 3, flops=(1, 2), backbone={}, config=CONFIG)


def test_one_class_is_no_purpose() -> None:
    vectors, classes, _ = made(num=100)
    with pytest.raises(DataError, match="one class, 'hats'"):
        fit_scale_model(vectors, flops=(10, 40), backbone={}, classes=["hats"] * len(classes), config=CONFIG)


def test_thresholds_are_judged_by_pictures_that_they_were_not_chosen_on() -> None:
    """Judged by those that they were chosen on, they would make none of 60 pictures worse, whatever others are."""
    torch.manual_seed(1)
    config = ScaleConfig(resolutions=(32, 64), num_scans=(1, 0), tolerance=0.0)
    means = torch.randn(4, 16)
    worse: list[float] = []
    worse_of_its_own: list[float] = []
    for _ in range(6):
        target = torch.randint(0, 4, (60,))
        small, large = (means[target] + spread * torch.randn(60, 16) for spread in (2.2, 1.4))
        classes = [str(each) for each in target.tolist()]
        fit = fit_scale_model([small, large, large], flops=(10, 40), backbone={}, classes=classes, config=config)
        places = chosen(fit.held_scores, fit.model.thresholds)
        worse.append(fit.good[-1] - fit.good_chosen)
        worse_of_its_own.append(fit.good[-1] - fit.held_good[torch.arange(60), places].float().mean().item())
    assert max(worse_of_its_own) < 1e-6
    assert sum(worse) > sum(worse_of_its_own) + 0.01
