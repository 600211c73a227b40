"""The formula that orders answers is chosen on validation likes: the right figures, and an honest choice."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import ziggurat as zg
from tests.serving.shop import Shop
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import LabelSpec
from ziggurat.features.items import Repeats
from ziggurat.runs.execute import prepare_run, raw_files
from ziggurat.runs.export.data import RunData
from ziggurat.runs.export.held_out_likes import (
    HeldOutLikes,
    LikesWanted,
    ScoredCandidates,
    held_out_likes,
    scored_candidates,
)
from ziggurat.runs.export.value_choice import _refuse_trained_rows
from ziggurat.runs.export.value_fit import ValueFit, fit_value
from ziggurat.serving.answering.chain import Question
from ziggurat.serving.answers import Effort
from ziggurat.serving.export.export_folder import open_export
from ziggurat.serving.value_model.formula import ValueModel
from ziggurat.training.evaluation.full_ranking_pass import FullRanking
from ziggurat.training.records.run_folder import STARTUP
from ziggurat.training.report.progress import NoProgress

QUICK = zg.ExportConfig(num_candidates=12, golden=1, program=False, parity_rows=100)


@pytest.mark.parametrize(
    ("split", "repeats"), [("valid", Repeats.LEAVE_OUT_BUT_TARGET), *(("test", each) for each in Repeats)]
)
def test_retrieval_alone_is_the_full_ranking_of_the_run(
    shop: Shop, loaded: zg.Recommender, split: str, repeats: Repeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = property(lambda _: repeats, lambda _, of_schema: None)
    monkeypatch.setattr(FullRanking, "repeats", said, raising=False)  # as if the schema said so
    run = zg.load_run(shop.two_tower)
    data = RunData(
        config=raw_files(run.config, progress=NoProgress()), schema=run.preprocessing.schema, bad_rows=BadRows()
    )
    prepared, schemas = prepare_run(run.config), [run.preprocessing.schema]
    chain = loaded.chain
    wanted = LikesWanted(split=split, most=10_000)
    likes = held_out_likes(prepared, chain=chain, data=data, schemas=schemas, wanted=wanted)
    assert len(likes.questions) == likes.num_all > 40
    candidates = scored_candidates(likes)
    ranks = candidates.ranks(candidates.scores["retrieval"].double()).double()
    ndcg = torch.where((ranks > 0) & (ranks <= 10), 1 / torch.log2(ranks + 1), 0.0).mean()
    metrics = run.evaluate_split(split).metrics
    assert float(ndcg) == pytest.approx(metrics["full_ndcg@10"], abs=1e-9)
    assert metrics["full_repeated"] > 0.4, "else the protocols say the same"
    some = held_out_likes(
        prepared, chain=chain, data=data, schemas=schemas, wanted=dataclasses.replace(wanted, most=20, seed=3)
    )
    assert (len(some.questions), some.num_all) == (20, likes.num_all)


def made_up(*, informative: bool, seed: int = 0) -> tuple[HeldOutLikes, ScoredCandidates]:
    """Candidates of 300 questions, whose targets a task knows or does not."""
    draw = np.random.default_rng(seed)
    num, width = 300, 30
    items = torch.from_numpy(np.stack([draw.permutation(100)[:width] for _ in range(num)]))
    items[::7, -3:] = -1  # fewer candidates
    place = draw.integers(0, width - 3, num)
    target = torch.zeros(num, width, dtype=torch.bool)
    target[torch.arange(num), torch.from_numpy(place)] = True
    target[::11] = False  # not found
    retrieval = torch.from_numpy(draw.normal(size=(num, width))).float() + 0.5 * target
    like = torch.from_numpy(draw.normal(size=(num, width))).float() + (2.0 if informative else 0.0) * target
    likes = HeldOutLikes(
        questions=[Question(row={}, k=1)] * num,
        targets=np.where(target.any(dim=1), items[torch.arange(num), torch.from_numpy(place)], -1),
        weights=draw.uniform(0.5, 2.0, num),
        groups=draw.integers(0, 60, num),
        num_all=num,
        chain=None,  # type: ignore[arg-type]
    )
    scores = {"retrieval": retrieval.round(decimals=1), "long view": like.sigmoid()}
    return likes, ScoredCandidates(items=items, scores=scores, target=target)


def reference(likes: HeldOutLikes, candidates: ScoredCandidates, formula: str, *, k: int) -> list[float]:
    """The gain of each question in plain Python, by sorting."""
    values = ValueModel(formula, names=tuple(candidates.scores))(candidates.scores).tolist()
    found = []
    for row, target in enumerate(likes.targets.tolist()):
        numbers = candidates.items[row].tolist()
        order = sorted((-value, item) for value, item in zip(values[row], numbers, strict=True) if item >= 0)
        place = [item for _, item in order].index(target) if target >= 0 else k
        found.append(1 / math.log2(place + 2) if place < k else 0.0)
    return found


def test_figures_are_those_of_plain_python() -> None:
    likes, candidates = made_up(informative=True)
    fit = fit_value(likes, candidates, labels=[LabelSpec(name="long view")], k=5)
    gains = {each.formula: reference(likes, candidates, each.formula, k=5) for each in fit.tried}
    base = np.array(gains["retrieval"])
    for each in fit.tried:
        mine = np.array(gains[each.formula])
        assert each.ndcg == pytest.approx(np.average(mine, weights=likes.weights), abs=1e-9)
        gain = np.average(mine - base, weights=likes.weights)
        assert each.gain == pytest.approx(gain, abs=1e-9)
        sums = [(likes.weights * (mine - base - gain))[likes.groups == user].sum() for user in set(likes.groups)]
        assert each.error == pytest.approx(math.sqrt(sum(s * s for s in sums)) / likes.weights.sum(), abs=1e-9)
    assert len({each.formula for each in fit.tried}) == len(fit.tried) == 2 + 7


def test_a_ranker_that_knows_is_taken_and_one_that_does_not_is_not() -> None:
    labels = [LabelSpec(name="long view")]
    helped = fit_value(*made_up(informative=True), labels=labels)
    assert '"long view"' in helped.formula
    assert helped.chosen.gain > 5 * helped.chosen.error
    assert "over retrieval alone" in helped.verdict()
    for seed in range(5):
        fit = fit_value(*made_up(informative=False, seed=seed), labels=labels)
        if fit.best.gain <= fit.best.error:
            assert fit.formula == "retrieval"
            assert "does not help" in fit.verdict()
        assert fit.chosen.gain >= 0
        (marked,) = [line for line in fit.lines() if "►" in line]
        assert marked.split("►")[1].split("  ")[0].strip() == fit.formula


def test_several_tasks_get_a_weight_each() -> None:
    likes, candidates = made_up(informative=True)
    draw = torch.Generator().manual_seed(5)
    buy = (torch.randn(candidates.items.shape, generator=draw) + 1.5 * candidates.target).sigmoid()
    both = dataclasses.replace(candidates, scores=candidates.scores | {"buy": buy, "over_arch": buy.logit() * 0.1})
    fit = fit_value(likes, both, labels=[LabelSpec(name="long view"), LabelSpec(name="buy")])
    one = fit_value(likes, candidates, labels=[LabelSpec(name="long view")])
    assert fit.chosen.ndcg > one.chosen.ndcg
    assert "long view" in fit.formula
    assert "over_arch" in fit.formula or "buy" in fit.formula


class Said(NoProgress):
    """Keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Keep a line."""
        self.lines.append(text)


def test_an_export_takes_the_fitted_formula_and_keeps_what_was_tried(shop: Shop, tmp_path: Path) -> None:
    out, said = tmp_path / "films", Said()
    config = dataclasses.replace(QUICK, value_likes=50)
    zg.export_run(shop.two_tower, ranker=shop.ranker, out=out, config=config, progress=said)
    facts, shown = open_export(out).manifest.facts["value"], "\n".join(said.lines)
    assert facts["how"] == "fitted"
    assert (facts["likes"], facts["seed"]) == (50, 0)
    assert [each["formula"] for each in facts["tried"]][:2] == ["retrieval", "like"]
    assert f"► {facts['formula']} " in shown
    assert "ms by the ranker" in shown
    rec = zg.Recommender.load(out)  # golden answers are those of the formula
    assert rec.info().value_model == facts["formula"] == rec.chain.settings.formula


def test_without_rows_to_choose_by_retrieval_orders_and_it_is_said(shop: Shop, tmp_path: Path) -> None:
    other, out, said = tmp_path / "ranker", tmp_path / "films", Said()
    shutil.copytree(shop.ranker, other)
    startup = STARTUP.read(other / "startup.json")
    startup["Data"]["split"] = "by row number: valid from 9, test from 99"
    STARTUP.write(other / "startup.json", startup)
    auto = dataclasses.replace(QUICK, value="auto")
    loaded = {"encoder": zg.load_run(shop.two_tower), "ranker": zg.load_run(other)}
    with pytest.raises(ConfigError, match="same cuts in time"):
        _refuse_trained_rows(*loaded.values(), prepare_run(loaded["encoder"].config))
    zg.export_run(shop.two_tower, ranker=other, out=out, config=QUICK, progress=said)
    assert "No formula was tried" in "\n".join(said.lines)
    facts = open_export(out).manifest.facts["value"]
    assert (facts["formula"], facts["how"]) == ("retrieval", "default")
    assert "by row number" in facts["why"]
    with pytest.raises(zg.ZigguratError, match="full rankings"):
        zg.export_run(shop.ranker, out=tmp_path / "r", config=auto)


def test_tasks_that_order_nothing_are_shown_all_the_same(loaded: zg.Recommender) -> None:
    chain, names = loaded.chain, ("like", "retrieval")
    questions = [Question(row={"user_id": user, "age": 30}, k=4) for user in (3, 5)]
    plain = dataclasses.replace(chain, value=ValueModel("retrieval", names=names))
    whole = dataclasses.replace(chain, value=ValueModel("retrieval + 0 * like", names=names))
    for first, second in zip(
        *(each.recommend(questions, effort=Effort.FULL, explain=False) for each in (plain, whole)), strict=True
    ):
        assert torch.equal(first.items, second.items)
        torch.testing.assert_close(first.values, second.values)
        torch.testing.assert_close(first.tasks, second.tasks)
        assert first.tasks.shape == (4, 1)


def test_the_record_of_a_fit_is_plain_data() -> None:
    fit = fit_value(*made_up(informative=True), labels=[LabelSpec(name="long view")])
    assert isinstance(fit, ValueFit)
    assert json.loads(json.dumps(fit.to_json()))["tried"][0]["formula"] == "retrieval"
