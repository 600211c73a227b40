"""The scale model: fits what can be seen in a thumbnail, chooses the cheapest that holds, survives a file."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ziggurat.errors import ConfigError, DataError, ZigguratError
from ziggurat.models.images.scale_model import (
    NEVER,
    ClassScale,
    NearScale,
    ScaleModel,
    cheapest_thresholds,
    chosen,
)


def test_the_smallest_that_reaches_its_threshold_is_chosen() -> None:
    scores = torch.tensor([[0.9, 0.1], [0.1, 0.9], [0.1, 0.1], [0.5, 0.5]])
    assert chosen(scores, (0.5, 0.5)).tolist() == [0, 1, 2, 0]
    assert chosen(scores, (NEVER, 0.5)).tolist() == [2, 1, 2, 1]
    assert chosen(scores, (NEVER, NEVER)).tolist() == [2, 2, 2, 2]


def test_a_near_scale_learns_what_the_vectors_show() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(400, 16)
    is_near = torch.stack([vectors[:, 0] > 0.5, vectors[:, 0] > -0.5], dim=1)
    model = NearScale(resolutions=(32, 64, 96), num_scans=(1, 5, 0), dim=16, num_outputs=2)
    model.fit(vectors[:300], is_near[:300])
    model.thresholds = (0.5, 0.5)
    wanted = torch.where(is_near[300:, 0], 0, torch.where(is_near[300:, 1], 1, 2))
    assert (model.choose(vectors[300:]) == wanted).float().mean() > 0.75


def test_a_class_scale_sends_on_what_it_is_unsure_of() -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 3, (300,))
    is_plain = torch.rand(300) < 0.6
    vectors = torch.randn(300, 12) + 4 * torch.nn.functional.one_hot(target, 12) * is_plain[:, None]
    model = ClassScale(resolutions=(32, 64), num_scans=(0, 0), dim=12, num_outputs=3)
    model.fit(vectors[:200], target[:200])
    sure = model.scores(vectors[200:])[:, 0]
    assert sure[is_plain[200:]].median() > sure[~is_plain[200:]].median() + 0.1


def test_thresholds_are_the_cheapest_that_hold_by_trying_all() -> None:
    torch.manual_seed(1)
    scores = torch.rand(60, 2)
    is_good = torch.cat([torch.rand(60, 2) < scores + 0.3, torch.rand(60, 1) < 0.9], dim=1)
    costs = (1.0, 3.0, 6.0)
    for tolerance in (0.0, 0.05, 0.2):
        found = cheapest_thresholds(scores, is_good, costs, tolerance=tolerance)

        def outcome(thresholds: tuple[float, ...]) -> tuple[float, float]:
            cost = 0.0
            worse = 0
            for row in range(60):
                place = next((p for p in range(2) if scores[row, p] >= thresholds[p]), 2)
                cost += costs[place]
                worse += bool(is_good[row, 2]) and not bool(is_good[row, place])
            return cost / 60, worse

        cost, worse = outcome(found)
        assert worse <= tolerance * 60
        grids = [[*torch.quantile(column, torch.linspace(0, 1, 16)).tolist(), NEVER] for column in scores.T]
        least = min(outcome(each)[0] for each in itertools.product(*grids) if outcome(each)[1] <= tolerance * 60)
        assert cost == pytest.approx(least)


def test_where_nothing_small_holds_all_go_to_the_last() -> None:
    is_good = torch.tensor([[False, True]] * 20)
    assert cheapest_thresholds(torch.rand(20, 1), is_good, (1.0, 2.0), tolerance=0.0) == (NEVER,)


@pytest.mark.parametrize("kind", [ClassScale, NearScale])
def test_a_file_gives_the_same_choices(kind: type[ScaleModel], tmp_path: Path) -> None:
    torch.manual_seed(0)
    fingerprint = {"name": "tiny", "weights": "abc"}
    model = kind(
        resolutions=(32, 64, 96),
        num_scans=(1, 5, 0),
        dim=8,
        num_outputs=2,
        thresholds=(0.6, NEVER),
        backbone=fingerprint,
    )
    torch.nn.init.normal_(model.linear.weight)
    again = ScaleModel.load(model.save(tmp_path / "scale.json"))
    vectors = torch.randn(50, 8)
    assert type(again) is kind
    assert (again.resolutions, again.num_scans) == ((32, 64, 96), (1, 5, 0))
    assert torch.equal(again.choose(vectors), model.choose(vectors))
    again.check_backbone(fingerprint, where="here")
    with pytest.raises(ConfigError, match="tiny, with other weights"):
        again.check_backbone({"name": "tiny", "weights": "other"}, where="here")


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = NearScale(resolutions=(32, 64), num_scans=(0, 0), dim=4, num_outputs=1).save(tmp_path / "scale.json")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ZigguratError):
        ScaleModel.load(path)
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(DataError):
        ScaleModel.load(tmp_path / "text.json")
