"""Full ranking against a plain numpy one: every item, every question, ties and exclusions."""

import math

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from ziggurat.data.preprocess.fit.latest_items import LATEST_FILE
from ziggurat.errors import DataError
from ziggurat.features.inputs import LabelSpec
from ziggurat.features.items import Repeats
from ziggurat.features.schema import NumericTransform
from ziggurat.training.evaluation.evaluate import metrics_line
from ziggurat.training.evaluation.full_ranking_pass import FullRanking
from ziggurat.training.metrics import full_ranking
from ziggurat.training.metrics.full_ranking import (
    FullRankingSums,
    HadBefore,
    Questions,
    full_ranking_names,
    had_targets,
    left_out,
    rank_all,
    rank_of_users,
    repeats_lines,
)
from ziggurat.training.metrics.ranking import ranking_metrics


def naive(items, users, targets, excluded, depth):
    ranks, lists = [], []
    for q, user in enumerate(users):
        scores = [float(user @ item) for item in items]
        out = {n for question, n in excluded if question == q and n != targets[q]}
        order = sorted((n for n in range(len(items)) if n not in out), key=lambda n: (-scores[n], n))
        ranks.append(order.index(targets[q]) + 1 if targets[q] >= 0 else 0)
        lists.append([*order[:depth], *[-1] * (depth - len(order))])
    return ranks, lists


@pytest.mark.parametrize("seed", range(25))
def test_it_is_that_of_plain_numpy(seed, monkeypatch):
    monkeypatch.setattr(full_ranking, "_QUESTIONS", 4)
    monkeypatch.setattr(full_ranking, "_ITEMS", 7)
    rng = np.random.default_rng(seed)
    num_items, num_questions = int(rng.integers(1, 30)), int(rng.integers(0, 14))
    # Whole numbers, so that products are exact and many tie.
    items, users = rng.integers(-2, 3, (num_items, 3)), rng.integers(-2, 3, (num_questions, 3))
    targets = rng.integers(-1, num_items, num_questions)
    pairs = sorted({(int(q), int(n)) for q, n in rng.integers(0, 99, (40, 2)) if q < num_questions and n < num_items})
    questions = Questions(
        users=torch.tensor(users).float().view(-1, 3),
        targets=torch.tensor(targets),
        excluded=torch.tensor(pairs, dtype=torch.int64).view(-1, 2),
    )
    ranks, lists = rank_all(torch.tensor(items).float(), questions, depth=6)
    wanted_ranks, wanted_lists = naive(items, users, targets, pairs, 6)
    assert ranks.tolist() == wanted_ranks
    assert lists.tolist() == wanted_lists
    weights = torch.tensor(rng.choice([0.0, 1.0, 2.0], (num_questions, 2)))
    sums = FullRankingSums([LabelSpec(name="a"), LabelSpec(name="b")], num_items=num_items, ks=(2, 6))
    half = num_questions // 2
    repeated = had_targets(targets, np.array(pairs, dtype=np.int64).reshape(-1, 2))
    assert repeated.tolist() == [(q, n) in pairs for q, n in enumerate(targets.tolist())]
    for some in (slice(0, half), slice(half, None)):
        sums.add(ranks[some], lists[some], weights[some], is_repeated_Q=torch.from_numpy(repeated[some]))
    found = sums.compute()
    assert set(found) == set(full_ranking_names(sums.labels, ks=(2, 6)))
    for index, label in enumerate("ab"):
        asked = [(w, r, n) for w, r, n in zip(weights[:, index].tolist(), wanted_ranks, wanted_lists, strict=True) if w]
        total = sum(w for w, _, _ in asked)
        for k in (2, 6):
            hits = [w * (0 < r <= k) for w, r, _ in asked]
            gains = [w / math.log2(r + 1) if 0 < r <= k else 0 for w, r, _ in asked]
            shown = {n for _, _, first in asked for n in first[:k] if n >= 0}
            wanted = (sum(hits) / total, sum(gains) / total, len(shown) / num_items) if total else (math.nan,) * 3
            names = [f"full_{name}@{k}/{label}" for name in ("recall", "ndcg", "coverage")]
            assert [found[name] for name in names] == pytest.approx(wanted, nan_ok=True)
        wanted_mrr = sum(w / r for w, r, _ in asked if r) / total if total else math.nan
        assert found[f"full_mrr/{label}"] == pytest.approx(wanted_mrr, nan_ok=True)
        answered = [
            w * (0 < rank <= 2)
            for w, rank, again in zip(weights[:, index].tolist(), wanted_ranks, repeated, strict=True)
            if not again
        ]
        wanted_answered = sum(answered) / total if total else math.nan
        assert found[f"full_answered@2/{label}"] == pytest.approx(wanted_answered, nan_ok=True)
        of_label = weights[:, index].numpy()
        wanted_share = (of_label * repeated).sum() / total if total else math.nan
        assert found[f"full_repeated/{label}"] == pytest.approx(wanted_share, nan_ok=True)


def test_equal_scores_stand_in_the_order_of_rows_here_and_share_their_places_within_groups() -> None:
    """All four items tie: the target of row 2 has rank 3 among all, and the expected rank 2.5 among scored samples."""
    questions = Questions(
        users=torch.ones(1, 3), targets=torch.tensor([2]), excluded=torch.empty(0, 2, dtype=torch.int64)
    )
    ranks, lists = rank_all(torch.ones(4, 3), questions, depth=4)
    sums = FullRankingSums([LabelSpec(name="a")], num_items=4, ks=(4,))
    sums.add(ranks, lists, torch.ones(1, 1), is_repeated_Q=torch.tensor([False]))
    assert sums.compute()["full_mrr"] == pytest.approx(1 / 3)
    assert ranking_metrics([1.0] * 4, [0.0, 0.0, 1.0, 0.0], [7] * 4)["mrr"] == pytest.approx(1 / 2.5)


def test_what_groups_had_is_found_and_nobody_had_nothing():
    had = HadBefore([(np.array([5, 0, -3, 5]), np.array([2, 1, 7, 2])), (np.array([5]), np.array([1]))])
    questions, items = had.pairs_of(np.array([5, 0, 9, -3, 5]))
    assert list(zip(questions.tolist(), items.tolist(), strict=True)) == [(0, 1), (0, 2), (3, 7), (4, 1), (4, 2)]
    assert HadBefore([]).pairs_of(np.array([1]))[0].tolist() == []


@pytest.mark.parametrize("kind", ["number", "date", "text", "none"])
def test_items_are_as_they_were_last_in_time(kind, tmp_path):
    """Files are in any order; of rows of one time the later one counts, and validation rows do not."""
    rng = np.random.default_rng(3)
    time = rng.permutation(np.repeat(np.arange(300), 2))
    frame = pl.DataFrame({"user": rng.integers(0, 9, 600), "item": rng.integers(0, 40, 600), "size": np.arange(600)})
    days = pl.Series(time).cast(pl.Int32).cast(pl.Date)
    times = {"number": pl.Series(time), "date": days, "text": days.dt.strftime("%d.%m.%Y"), "none": pl.Series(time)}
    frame = frame.with_columns(times[kind].alias("t"), like=pl.Series(rng.integers(0, 2, 600)), at=pl.Series(time))
    frame.select(pl.exclude("at")).write_parquet(tmp_path / "events.parquet")
    schema = zg.Schema(
        features=(
            zg.Categorical(name="user"),
            zg.Categorical(name="item"),
            zg.Dense(name="size", transform=NumericTransform.IDENTITY),
        ),
        labels=(zg.Label(name="like"),),
        time="" if kind == "none" else "t",
        items=zg.Items(id="item", features=("size",)),
    )
    config = zg.DataConfig(train=(str(tmp_path / "events.parquet"),), rows_per_group=100)
    prepared = zg.prepare(config, schema=schema, folder=tmp_path / "cache")
    items = FullRanking(prepared.train).items
    ids = prepared.preprocessing.vocabularies["item"].ids
    names = ids.gather(items.column("item").to_numpy() - 3).cast(pl.Int64)
    found = dict(zip(names, items.column("size").to_pylist(), strict=True))
    rows = np.concatenate(
        [prepared.train.read_group(g)["row:"].to_numpy() for g in range(len(prepared.train.group_sizes))]
    )
    train = frame[rows.tolist()].sort("size")
    last = (train if kind == "none" else train.sort("at", maintain_order=True)).unique(
        "item", keep="last", maintain_order=True
    )
    assert found == dict(zip(last["item"], last["size"].cast(pl.Float64), strict=True))
    if kind == "number":
        by_file = train.unique("item", keep="last", maintain_order=True)
        assert found != dict(zip(by_file["item"], by_file["size"].cast(pl.Float64), strict=True))
        (prepared.train.folder / LATEST_FILE).write_bytes(b"PAR1")
        with pytest.raises(DataError, match=LATEST_FILE):
            FullRanking(prepared.train)


def test_a_score_that_is_not_a_number_finds_nothing_and_is_found_nowhere():
    items = torch.tensor([[1.0, 0.0], [math.nan, 0.0], [3.0, 0.0], [2.0, 1.0]])
    users = torch.tensor([[1.0, 1.0], [math.nan, 1.0], [1.0, 0.0], [1.0, -1.0], [1.0, 0.0]])
    questions = Questions(
        users=users, targets=torch.tensor([0, 2, 1, 3, 0]), excluded=torch.tensor([[4, 2]], dtype=torch.int64)
    )
    ranks, lists = rank_all(items, questions, depth=4)
    assert ranks.tolist() == [3, 0, 0, 3, 2]
    assert lists.tolist() == [[2, 3, 0, -1], [-1] * 4, [2, 3, 0, -1], [2, 0, 3, -1], [3, 0, -1, -1]]
    sums = FullRankingSums([LabelSpec(name="a")], num_items=4, ks=(1, 2))
    sums.add(ranks[1:2], lists[1:2], torch.ones(1, 1), is_repeated_Q=torch.tensor([False]))
    assert sums.compute() == {name: 0.0 for name in full_ranking_names(sums.labels, ks=(1, 2))}


@pytest.mark.parametrize(
    ("repeats", "rank", "first"), [("leave_out", 0, [2, 3]), ("allow", 3, [0, 2]), ("leave_out_but_target", 2, [2, 1])]
)
def test_three_protocols_for_what_a_user_had(repeats, rank, first):
    """One user, items of falling score but for item 2; items 0 and 1 were had, and item 1 is taken again."""
    items, had = torch.tensor([[5.0], [3.0], [4.0], [1.0]]), np.array([[0, 0], [0, 1]])
    targets, excluded = left_out(np.array([1]), had, repeats=Repeats(repeats))
    questions = Questions(
        users=torch.ones(1, 1), targets=torch.from_numpy(targets), excluded=torch.from_numpy(excluded)
    )
    ranks, lists = rank_all(items, questions, depth=2)
    assert (ranks.tolist(), lists.tolist()) == ([rank], [first])
    new, _ = left_out(np.array([2]), had, repeats=Repeats(repeats))
    assert new.tolist() == [2], "a target that is new can be found under each protocol"


@pytest.mark.parametrize(("repeats", "answered"), [("leave_out", 0.5), ("allow", 1.0), ("leave_out_but_target", 0.5)])
def test_the_recall_of_answers_counts_no_target_that_they_leave_out(repeats: str, answered: float) -> None:
    """Two users find their item first; one of them had it before."""
    sums = FullRankingSums([LabelSpec(name="a")], num_items=4, ks=(1,), repeats=Repeats(repeats))
    ranks = torch.tensor([1, 0 if repeats == "leave_out" else 1])
    sums.add(ranks, torch.tensor([[2], [3]]), torch.ones(2, 1), is_repeated_Q=torch.tensor([False, True]))
    found = sums.compute()
    assert found["full_answered@1"] == answered
    line = metrics_line(found)
    assert ("(of answers, without what a user had: 0.50000)" in line) is (repeats == "leave_out_but_target")


def test_the_protocol_is_said_and_a_warning_where_answers_differ():
    metrics = {"auc": 0.5, "full_recall@10": 0.5, "full_repeated": 0.75}
    said = {repeats: repeats_lines(metrics, repeats=repeats) for repeats in Repeats}
    assert all("75.0% of the targets are repeated, 25.0% are new" in lines[0] for lines in said.values())
    assert [len(lines) for lines in said.values()] == [1, 1, 2], "answers follow the first two"
    assert "answers can never hold the 75.0%" in said[Repeats.LEAVE_OUT_BUT_TARGET][1]
    assert len(repeats_lines({"full_repeated": 0.0}, repeats=Repeats.LEAVE_OUT_BUT_TARGET)) == 1
    assert repeats_lines({"auc": 0.5}, repeats=Repeats.LEAVE_OUT_BUT_TARGET) == []
    both = {"full_repeated/a": 0.0, "full_repeated/b": 0.5}
    assert "of 'b'" in repeats_lines(both, repeats=Repeats.LEAVE_OUT_BUT_TARGET)[2]


@pytest.mark.parametrize("seed", range(25))
def test_users_who_ask_several_times_have_one_list(seed):
    """As if each question were asked by itself, ties and unknown targets included."""
    rng = np.random.default_rng(seed)
    num_users, num_items, depth = int(rng.integers(1, 150)), int(rng.integers(1, 60)), int(rng.integers(1, 70))
    items = torch.from_numpy(rng.integers(-2, 3, (num_items, 3)).astype(np.float32))
    vectors = torch.from_numpy(rng.integers(-2, 3, (num_users, 3)).astype(np.float32))
    users = torch.from_numpy(np.sort(rng.integers(0, num_users, 4 * num_users)))
    had = rng.random((num_users, num_items)) < 0.2
    targets = np.array([rng.choice([-1, *np.flatnonzero(~had[user])]) for user in users.tolist()])
    by_user = torch.from_numpy(np.argwhere(had))
    by_question = torch.from_numpy(np.argwhere(had[users.numpy()]))
    whole = Questions(users=vectors[users], targets=torch.from_numpy(targets), excluded=by_question)
    some = Questions(users=vectors, targets=torch.from_numpy(targets), excluded=by_user)
    wanted = rank_all(items, whole, depth=depth)
    found = rank_of_users(items, some, users_Q=users, depth=depth)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("repeats", Repeats)
@pytest.mark.parametrize("seed", range(4))
def test_recall_and_ndcg_of_users(seed, repeats):
    """One list a user, by brute force: what was asked for again counts once, what was had before as the schema says."""
    rng = np.random.default_rng(seed)
    num_users = 30
    num_items = 60
    items = torch.from_numpy(rng.normal(size=(num_items, 4)).astype(np.float32))
    vectors = torch.from_numpy(rng.normal(size=(num_users, 4)).astype(np.float32))
    had = rng.random((num_users, num_items)) < 0.3
    users = rng.integers(0, num_users, 200)  # 0 is nobody
    # The best items are asked for most, so that places collide; -1 is an item that training never saw.
    best = (-(vectors @ items.T)).argsort(dim=1).numpy()
    targets = best[users, rng.integers(0, 25, 200)]
    targets[rng.random(200) < 0.1] = -1
    weights = torch.from_numpy((rng.random((200, 1)) < 0.8).astype(np.float32))
    sums = FullRankingSums([LabelSpec(name="a")], num_items=num_items, ks=(5,), repeats=repeats, has_users=True)
    for some in (slice(0, 90), slice(90, None)):
        pairs = np.argwhere(had[users[some]])
        wanted, excluded = left_out(targets[some], pairs, repeats=repeats)
        asked = Questions(
            users=vectors[users[some]], targets=torch.from_numpy(wanted), excluded=torch.from_numpy(excluded)
        )
        ranks, lists = rank_all(items, asked, depth=5)
        is_repeated = torch.from_numpy(had_targets(targets[some], pairs))
        sums.add(ranks, lists, weights[some], is_repeated_Q=is_repeated, units_Q=users[some], targets_Q=targets[some])
    recalls = []
    ndcgs = []
    for user in range(1, num_users):
        own = targets[(users == user) & (weights[:, 0].numpy() > 0)]
        right = set(own[own >= 0].tolist())
        count = len(right) + int((own < 0).sum())
        if not count:
            continue
        takes_part = ~had[user] | (repeats is Repeats.ALLOW)
        takes_part[list(right)] |= repeats is Repeats.LEAVE_OUT_BUT_TARGET
        listed = [item for item in best[user].tolist() if takes_part[item]][:20]
        hits = [place for place, item in enumerate(listed, 1) if item in right]
        recalls.append(len(hits) / count)
        whole = sum(1 / math.log2(place + 1) for place in range(1, min(count, 20) + 1))
        ndcgs.append(sum(1 / math.log2(place + 1) for place in hits) / whole)
    found = sums.compute()
    assert set(found) == set(full_ranking_names(sums.labels, ks=(5,), has_users=True))
    assert found["full_user_recall@20"] == pytest.approx(np.mean(recalls))
    assert found["full_user_ndcg@20"] == pytest.approx(np.mean(ndcgs))


def test_items_of_a_user_whose_lists_differ_stand_behind_one_another():
    sums = FullRankingSums([LabelSpec(name="a")], num_items=9, ks=(1,), repeats=Repeats.ALLOW, has_users=True)
    users = np.array([1, 1, 1, 2])
    targets = np.array([4, 5, 4, 4])
    ranks = torch.tensor([1, 1, 7, 3])
    weights = torch.ones(4, 1)
    lists = torch.zeros(4, 1, dtype=torch.int64)
    is_repeated = torch.zeros(4, dtype=torch.bool)
    sums.add(ranks, lists, weights, is_repeated_Q=is_repeated, units_Q=users, targets_Q=targets)
    found = sums.compute()
    assert found["full_user_recall@20"] == 1
    assert found["full_user_ndcg@20"] == pytest.approx((1 + 1 / math.log2(4)) / 2)


def test_without_a_user_there_is_no_metric_of_users():
    sums = FullRankingSums([LabelSpec(name="a")], num_items=4, ks=(1,), has_users=True)
    found = sums.compute()
    assert math.isnan(found["full_user_recall@20"])
    assert math.isnan(found["full_user_ndcg@20"])
