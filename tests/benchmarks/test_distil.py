"""The study of students: teachers that are as old as they are said to be, settings that validation alone chooses."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
import torch

from benchmarks.distil import (
    AUX,
    SINGLE,
    Condition,
    Kept,
    best_of,
    figure_of,
    folder_of,
    parse_options,
    ratio_figure,
    run,
    table_of,
)
from benchmarks.distil_students import Histories, Outcome, Seed, Student
from benchmarks.distil_worlds import WORLDS, Rows, Size, World, cut_by_time, drifting, in_sessions, of_another_domain
from benchmarks.made_sessions import MadeSessions, SessionsConfig
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import HistoryPooling
from ziggurat.features.kinds import TeacherHistory
from ziggurat.ops.vector_histories import row_words_of, unpack_histories

SMALL = Size(seeds=1, windows=6, first=2, warm=1, valid=1, traffic=600, own=100, staleness=(0, 1))


def seed_of(name: str, rows: Rows | None = None, *, others: bool = False) -> Seed:
    """Return the first seed of a world, small, perhaps with other rows."""
    world = replace(WORLDS[name], others=others)
    if rows is not None:
        world = replace(world, draw=lambda seed, size: rows)
    return Seed(world, SMALL, 0)


@pytest.mark.parametrize("name", ["drift", "sessions"])
def test_a_teacher_speaks_of_a_window_by_weights_of_before_it(name: str) -> None:
    """With the labels of window 3 turned round, what was said of it stays, and what is said of later ones does not."""
    rows = WORLDS[name].draw(0, SMALL)
    turned = list(rows.frames)
    turned[3] = turned[3].with_columns((1 - pl.col(rows.label)).cast(pl.Int8).alias(rows.label))
    plain = seed_of(name).told
    other = seed_of(name, replace(rows, frames=turned)).told
    for stale, first_that_differs in ((0, 4), (1, 5)):
        for window in range(SMALL.first, SMALL.windows):
            is_same = np.array_equal(plain[stale].scores[window], other[stale].scores[window])
            assert is_same is (window < first_that_differs)
    if name == "sessions":
        # Window 4 has vectors of window 3, which were logged before it was trained.
        are_same = [np.array_equal(*pair) for pair in zip(plain[0].histories, other[0].histories, strict=True)]
        assert are_same == [True, True, True, True, True, False]


def test_another_domain_has_all_positives_and_other_meanings() -> None:
    frame = drifting(0, SMALL).frames[0]
    other = of_another_domain(frame, seed=0, window=0)
    assert other["label"].sum() == frame["label"].sum()
    negatives, kept_negatives = (each.filter(pl.col("label") == 0).height for each in (frame, other))
    assert 0.1 < kept_negatives / negatives < 0.4
    kept = frame.filter(pl.col("label") == 1)
    moved = other.filter(pl.col("label") == 1)
    assert moved["C1"].equals(kept["C1"])
    assert not moved["C4"].equals(kept["C4"])
    assert moved.group_by("C4").len()["len"].sort().equals(kept.group_by("C4").len()["len"].sort())


def test_ratings_are_cut_by_time() -> None:
    """No rating of a window is older than one of the window before, and a seed draws the student's of each."""
    rng = np.random.default_rng(0)
    count = 500
    ratings = pl.DataFrame(
        {
            "user_id": rng.integers(1, 30, count),
            "movie_id": [f"movie {each}" for each in rng.integers(0, 40, count)],
            "rating": rng.integers(1, 6, count),
            "timestamp": np.sort(rng.integers(0, 10_000, count)),
            "gender": ["F"] * count,
            "age": [25] * count,
            "occupation": [1] * count,
            "zip_code": ["48067"] * count,
            "year": [1995] * count,
            "genres": [["Drama"]] * count,
        }
    )
    size = replace(SMALL, traffic=80)
    rows = cut_by_time(ratings, seed=0, size=size)
    assert [frame.height for frame in rows.frames] == [80] * 6
    ends = [(frame["timestamp"].min(), frame["timestamp"].max()) for frame in rows.frames]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))  # type: ignore[operator]
    assert sorted(pl.concat(rows.frames)["at"]) == list(range(480))
    assert rows.click_rate == (rows.frames[0]["rating"] >= 4).mean()
    own = rows.frames[2][:10]["at"]
    assert not own.equals(cut_by_time(ratings, seed=1, size=size).frames[2][:10]["at"])
    assert own.equals(cut_by_time(ratings, seed=0, size=size).frames[2][:10]["at"])


def test_made_sessions_remember_clicks_of_before_alone() -> None:
    config = SessionsConfig(windows=3, window_rows=400, users=60)
    frames = MadeSessions(config).frames()
    assert [frame.height for frame in frames] == [400] * 3
    again = MadeSessions(config).frames()
    assert frames[2].equals(again[2])
    rows = pl.concat(frames)
    assert rows["at"].to_list() == list(range(1_200))
    checked = 0
    for before, after in zip(rows.iter_rows(named=True), rows[1:].iter_rows(named=True), strict=False):
        if after["position"] != before["position"] + 1:
            continue
        assert after["user"] == before["user"]
        expected = [before["tag"], *before["recent"]] if before["click"] else before["recent"]
        assert after["recent"] == expected[: config.recent]
        checked += before["click"]
    assert checked > 100
    assert set(frames[2]["video"]) - set(range(config.alive))  # videos come
    assert abs(rows["truth"].mean() - rows["click"].mean()) < 0.05  # type: ignore[operator]


def test_a_student_of_sessions_serves_one_tab() -> None:
    frame = in_sessions(0, SMALL).frames[1]
    assert frame.height == SMALL.traffic
    assert set(frame[: SMALL.own]["tab"]) == {0}
    last = frame.with_row_index().filter(pl.col("tab") == 0)["index"][-1]
    assert last == (frame["tab"] == 0).sum() - 1


def test_histories_have_the_latest_vectors_first() -> None:
    feature = TeacherHistory(
        name="vectors",
        key="user",
        length=2,
        dim=2,
        format="bf16",
        row_words=row_words_of("bf16", 2),
        pooling=HistoryPooling.MEAN,
    )
    histories = Histories(3, feature)
    users = np.array([1, 2, 1, 1])
    vectors = torch.tensor([[3.0, 3.0], [9.0, 9.0], [1.0, 1.0], [2.0, 2.0]])
    histories.add(users, np.array([2, 0, 0, 1]), vectors)

    def of_user_1() -> list[float]:
        words = torch.from_numpy(histories.of(np.array([1])))
        return unpack_histories(words, history=feature.history)[0][0, :, 0].tolist()

    assert of_user_1() == [3.0, 2.0]
    histories.add(np.array([1]), np.array([5]), torch.tensor([[4.0, 4.0]]))
    assert of_user_1() == [4.0, 3.0]
    assert histories.of(np.array([0]))[0, 0] == 0
    assert histories.of(np.array([2]))[0, 0] == 1


def test_settings_are_chosen_by_validation_alone() -> None:
    good = {"auc": 0.7, "ne": 0.9, "calibration": 1.0}
    bad = good | {"ne": 1.2}
    tried = {SINGLE: [Outcome(valid=bad, test=good)], AUX: [Outcome(valid=good, test=bad)]}
    assert best_of(tried) is AUX


def condition_of(**arms: tuple[float, ...]) -> Condition:
    """Return a condition with these differences of AUC to labels."""
    found = {arm: [{"auc": 0.7 + gain, "ne": 0.9, "calibration": 1.0} for gain in gains] for arm, gains in arms.items()}
    teacher = found.pop("teacher")
    return Condition(name="drift_0", teacher=teacher, arms=found)


def test_no_multiple_of_a_loss_is_told() -> None:
    condition = condition_of(
        teacher=(0.1, 0.1, 0.1),
        labels=(0.0, 0.0, 0.0),
        ours=(0.02, 0.03, 0.04),
        peer=(0.01, 0.01, 0.02),
        worse=(-0.01, 0.0, -0.02),
    )
    met = ratio_figure("one", condition, ours="ours", peer="peer", goal=2.0)
    assert (round(float(str(met["ratio"])), 6), met["verdict"]) == (2.25, "met")
    against_loss = ratio_figure("two", condition, ours="ours", peer="worse", goal=2.0)
    assert (against_loss["ratio"], against_loss["verdict"]) == (None, "met")
    assert ratio_figure("three", condition, ours="worse", peer="peer", goal=2.0)["verdict"] == "missed"


def test_nothing_is_transferred_by_a_teacher_that_knows_less() -> None:
    arms = {"labels": (0.0, 0.0), "aux": (0.01, 0.02)}
    better = condition_of(teacher=(0.1, 0.1), **arms)
    worse = condition_of(teacher=(-0.1, 0.0), **arms)
    assert round(float(str(figure_of(better, "aux")["transfer"])), 6) == 0.15
    assert figure_of(worse, "aux")["transfer"] is None
    assert "| aux | 0.7150 |" in table_of(worse)


def test_a_student_is_scored_before_it_is_trained() -> None:
    """What its teacher says of the last window changes nothing that is measured."""
    seed = seed_of("drift")
    learned = seed.of_student(Student(distil=SINGLE), 0)
    scores = seed.told[0].scores
    scores[-1] = 1.0 - scores[-1]
    assert seed.of_student(Student(distil=SINGLE), 0) == learned
    assert seed.of_student(Student(), 0) != learned
    scores[-2] = 1.0 - scores[-2]
    assert seed.of_student(Student(distil=SINGLE), 0) != learned


def test_a_student_reads_vectors_of_its_users() -> None:
    seed = seed_of("sessions")
    known = seed.of_teacher(0).test["known_users"]
    assert 0.0 < seed.of_teacher(1).test["known_users"] < known < 1.0
    learned = seed.of_student(Student(reads_vectors=True), 0)
    assert seed.of_student(Student(reads_vectors=True), 0) == learned
    for words in seed.told[0].histories[SMALL.first :]:
        words[:] = 0
    assert seed.of_student(Student(reads_vectors=True), 0) != learned


def test_a_student_with_more_rows_has_the_first_rows_too() -> None:
    """The teacher is the same, and what it says of the first rows of a window stays."""
    few = seed_of("drift").told[0]
    seed = seed_of("drift", others=True)
    many = seed.told[0]
    assert len(many.scores[3]) == 4 * SMALL.own
    np.testing.assert_allclose(few.scores[3], many.scores[3][: SMALL.own], rtol=1e-5)
    assert seed.of_student(Student(times_own=4), 0) != seed.of_student(Student(), 0)


def test_students_have_names_of_their_own() -> None:
    students = [
        Student(),
        Student(distil=SINGLE),
        Student(distil=replace(SINGLE, loss_weight=0.3)),
        Student(distil=AUX),
        Student(distil=replace(AUX, adapter=True)),
        Student(distil=AUX, starts_at_half=True),
        Student(distil=AUX, reads_vectors=True),
        Student(distil=AUX, is_large=True),
        Student(distil=AUX, times_own=4),
    ]
    assert len({each.name for each in students}) == len(students)


def test_finished_students_are_taken_up(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run trains nothing, and says the same; other settings have another folder."""
    world = replace(WORLDS["drift"], quick=SMALL, others=False)
    monkeypatch.setitem(WORLDS, "drift", world)
    options = parse_options(["--worlds", "drift", "--runs", str(tmp_path)])
    first = run(quick=True, options=options)
    assert "drift_aux_head_gain_ratio" in {figure["name"] for figure in first.figures}
    assert first.benchmark == "distil_drift"

    def draw(seed: int, size: Size) -> Rows:
        raise AssertionError("nothing is left to train")

    monkeypatch.setitem(WORLDS, "drift", replace(world, draw=draw))
    assert run(quick=True, options=options).tables == first.tables
    assert folder_of(world, SMALL, tmp_path) != folder_of(world, replace(SMALL, own=50), tmp_path)


def test_a_run_that_was_cut_off_leaves_no_half_file(tmp_path) -> None:
    kept = Kept(tmp_path)

    def cut_off() -> Outcome:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept.outcome("one", cut_off)
    assert not list(tmp_path.iterdir())


def test_a_world_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="movielens"):
        run(options=parse_options(["--worlds", "frappe"]))


def test_worlds_have_windows_for_all_purposes() -> None:
    worlds: list[World] = list(WORLDS.values())
    for world in worlds:
        for size in (world.size, world.quick):
            assert size.first + size.warm + size.valid + 2 <= size.windows
            assert max(size.staleness) <= size.first
            assert size.own * (4 if world.others else 1) <= size.traffic
