"""A teacher that drifts: each part alone moves what it must, and any window is drawn alone."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray
from polars.testing import assert_frame_equal
from sklearn.linear_model import LogisticRegression

from ziggurat.data.synthetic.drift import DriftConfig, DriftingTeacher, walked
from ziggurat.data.synthetic.rows import SyntheticConfig
from ziggurat.data.synthetic.teacher import SyntheticTeacher
from ziggurat.errors import ConfigError

ROWS = 20_000
TEACHER = SyntheticConfig(cardinalities=(40, 60), num_groups=1, num_dense=2, list_cardinalities=(30,), seed=5)
STILL = DriftConfig(teacher=TEACHER, window_rows=ROWS)
ALL = DriftConfig(
    teacher=dataclasses.replace(TEACHER, conversion_rate=0.2, missing_share=0.1),
    window_rows=ROWS,
    preference_rate=0.1,
    lifetime=5.0,
    popularity_decay=2.0,
    season_windows=7.0,
    season_logit=0.5,
    season_angle=0.4,
    covariate_rate=0.05,
    delay_s=3600.0,
)


def drifting(**changes: object) -> DriftingTeacher:
    """A teacher of which only some parts move."""
    return DriftingTeacher(dataclasses.replace(STILL, **changes))


def features(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.select(pl.col("^[ICL][0-9]+$"))


def test_without_drift_the_rows_are_those_of_the_teacher_bit_for_bit() -> None:
    teacher = drifting()
    still = SyntheticTeacher(TEACHER)
    for window in (0, 3):
        rows = range(window * ROWS, (window + 1) * ROWS)
        frame = teacher.frame(window)
        assert_frame_equal(frame.drop("time"), still.frame(rows), check_exact=True)
        np.testing.assert_array_equal(teacher.probabilities(window), still.probabilities(rows))
        assert teacher.truth(window).best["label"] == still.best_metrics(rows)


def test_a_window_does_not_depend_on_those_that_were_drawn_before() -> None:
    one = DriftingTeacher(ALL)
    for window in range(6):
        one.moment(window)
    alone = DriftingTeacher(ALL)
    assert_frame_equal(one.frame(5), alone.frame(5), check_exact=True)
    assert one.truth(5) == alone.truth(5)
    other = dataclasses.replace(ALL, teacher=dataclasses.replace(ALL.teacher, seed=6))
    assert not DriftingTeacher(other).frame(5).equals(alone.frame(5))


def test_rows_stand_in_order_of_time_inside_their_window() -> None:
    teacher = DriftingTeacher(dataclasses.replace(STILL, window_s=3600, begin="2026-03-01T23:00"))
    times = teacher.frame(2)["time"]
    begin = int(np.datetime64("2026-03-02T01:00:00", "s").astype(np.int64))
    assert times.is_sorted()
    assert times[0] == begin
    assert begin + 3590 < times[-1] < begin + 3600
    assert teacher.name(2) == "2026-03-02T01-00-00"
    assert drifting().name(31) == "2026-02-01"


# ------------------------------------------------------------------------------------------------------ walk of vectors


@pytest.mark.parametrize("rate", [0.02, 0.3, 1.0])
def test_a_walk_keeps_its_variance_and_forgets_at_its_rate_between_any_two_windows(rate: float) -> None:
    def normal(step: int) -> NDArray[np.float32]:
        return np.random.default_rng((7, step)).standard_normal(40_000, dtype=np.float32)

    values = {steps: walked(normal(0), steps, rate=rate, normal=normal) for steps in range(18)}
    for a, first in values.items():
        assert first.var() == pytest.approx(1.0, abs=0.04)
        for b, second in values.items():
            assert np.mean(first * second) == pytest.approx((1 - rate) ** (abs(a - b) / 2), abs=0.04)


# ------------------------------------------------------------------------------------------------------ each part alone


def test_preferences_alone_leave_the_rows_and_how_much_can_be_known() -> None:
    teacher = drifting(preference_rate=0.2)
    still = drifting()
    assert_frame_equal(features(teacher.frame(6)), features(still.frame(6)), check_exact=True)

    def correlation(window: int) -> float:
        # The numbers' part of the logit stands still, the ids' parts move.
        rows = [np.log(p / (1 - p)) for p in (teacher.probabilities(window)[0], still.probabilities(window)[0])]
        return float(np.corrcoef(rows)[0, 1])

    assert correlation(0) > 1 - 1e-12
    assert correlation(1) > correlation(6) + 0.1
    assert correlation(6) > correlation(30) + 0.05
    best = [teacher.truth(window).best["label"].auc for window in (0, 6, 30)]
    assert max(best) - min(best) < 0.08


def test_ids_come_and_go() -> None:
    teacher = drifting(lifetime=4.0, come_and_go=("C1", "L1"))
    frames = {window: teacher.frame(window) for window in (0, 1, 2, 5, 13)}
    assert_frame_equal(frames[2].select("I1", "I2", "C2"), drifting().frame(2).select("I1", "I2", "C2"))
    for name in ("C1", "L1"):
        ids = {window: set(frame[name].explode().drop_nulls().to_list()) for window, frame in frames.items()}
        cardinality = 40 if name == "C1" else 30
        assert max(ids[0]) < cardinality
        assert 0 < len(ids[2] - ids[1]) < cardinality / 2
        assert not ids[0] & ids[5]
        assert not ids[5] & ids[13]
        assert len(ids[13]) <= cardinality
        assert len({number % cardinality for number in ids[13]}) == len(ids[13])
    new = np.mean([teacher.new_ids(window)["C1"] for window in range(1, 41)])
    assert new == pytest.approx(1 / 4, abs=0.06)
    assert teacher.new_ids(0) == {"C1": 0.0, "L1": 0.0}
    is_new = ~frames[2]["C1"].is_in(frames[1]["C1"].unique().to_list())
    assert is_new.mean() == pytest.approx(teacher.new_ids(2)["C1"], abs=0.02)


def test_an_id_keeps_its_vector_through_its_life_and_another_one_has_another() -> None:
    teacher = drifting(lifetime=6.0)

    def vectors(window: int) -> dict[int, tuple[float, ...]]:
        moment = teacher.moment(window)
        ids = moment.ids[1]
        assert ids is not None
        return {int(number): tuple(row) for number, row in zip(ids, moment.tables[1].tolist(), strict=True)}

    eighth = vectors(8)
    ninth = vectors(9)
    shared = eighth.keys() & ninth.keys()
    assert 30 < len(shared) < 60
    assert all(eighth[number] == ninth[number] for number in shared)
    assert len(set(eighth.values()) | set(ninth.values())) == len(eighth.keys() | ninth.keys())


def test_popularity_falls_over_a_life() -> None:
    teacher = drifting(lifetime=10.0, popularity_decay=4.0)
    counts = {}
    for window in range(11, 19):
        counts[window] = dict(teacher.frame(window)["C1"].value_counts().iter_rows())
    long_lived = set.intersection(*(set(each) for each in counts.values()))
    assert len(long_lived) >= 4
    first = sum(counts[11][number] for number in long_lived)
    last = sum(counts[18][number] for number in long_lived)
    assert last < 0.75 * first


def test_seasons_move_the_base_rate_and_come_back() -> None:
    teacher = drifting(season_windows=8.0, season_logit=1.0)
    rates = [float(teacher.probabilities(window).mean()) for window in (0, 2, 4, 6, 8)]
    still = float(drifting().probabilities(0).mean())
    assert rates[0] == still
    assert rates[1] > still + 0.1
    assert rates[3] < still - 0.08
    assert rates[2] == pytest.approx(still, abs=0.02)
    assert rates[4] == pytest.approx(still, abs=0.02)


def test_seasons_turn_preferences_and_turn_them_back() -> None:
    teacher = drifting(season_windows=8.0, season_angle=math.pi / 3)
    still = drifting().moment(0).tables[0]
    summer = teacher.moment(2).tables[0]
    assert np.abs(teacher.moment(8).tables[0] - still).max() < 1e-5
    angles = (still * summer).sum() / np.sqrt((still**2).sum() * (summer**2).sum())
    assert angles == pytest.approx(math.cos(math.pi / 3), abs=0.25)
    np.testing.assert_array_equal(features(teacher.frame(2))["C1"], drifting().frame(2)["C1"])


def test_covariate_shift_moves_numbers_and_not_what_a_row_means() -> None:
    teacher = drifting(covariate_rate=0.3)
    moved = teacher.moment(9)
    index = int(np.abs(moved.dense_means).argmax())
    name = f"I{index + 1}"
    assert abs(moved.dense_means[index]) > 0.2
    difference = np.log(teacher.frame(9)[name].to_numpy()).mean() - np.log(drifting().frame(9)[name].to_numpy()).mean()
    assert 0.5 <= difference / moved.dense_means[index] <= 1.2  # the logarithm of a number has such an sd
    for table, still in zip(moved.tables, teacher.still.maker.still.tables, strict=True):
        np.testing.assert_array_equal(table, still)
    means = [teacher.moment(window).dense_means for window in range(400)]
    assert np.var(means) == pytest.approx(1.0, abs=0.35)


def test_a_label_is_known_after_its_delay() -> None:
    config = dataclasses.replace(TEACHER, conversion_rate=0.3)
    teacher = drifting(teacher=config, delay_s=50_000.0, attribution_s=100_000)
    frame = teacher.frame(1).with_columns(delay=pl.col("label_time") - pl.col("time"))
    assert set(frame.filter(pl.col("label") == 0)["delay"]) == {0}
    assert set(frame.filter((pl.col("label") == 1) & (pl.col("conversion") == 0))["delay"]) == {100_000}
    delays = frame.filter(pl.col("conversion") == 1)["delay"]
    assert (delays <= 100_000).all()
    # The mean of an exponential distribution of mean m that ends at 2m.
    assert delays.mean() == pytest.approx(50_000 * (1 - 2 / (math.e**2 - 1)), rel=0.06)
    assert_frame_equal(frame.drop("label_time", "delay"), drifting(teacher=config).frame(1), check_exact=True)
    one_label = drifting(delay_s=50_000.0, attribution_s=100_000).frame(1)
    known = one_label.filter(pl.col("label") == 0)
    assert (known["label_time"] - known["time"]).unique().to_list() == [100_000]


# -------------------------------------------------------------------------------------------------------- best metrics


def test_a_logistic_regression_of_the_window_reaches_its_best_normalised_entropy_and_an_old_one_does_not() -> None:
    first_order = SyntheticConfig(
        num_dense=0, cardinalities=(10, 12), num_groups=1, first_order_share=1.0, second_order_share=0.0,
        third_order_share=0.0, zipf_exponent=0.2,
    )  # fmt: skip
    teacher = DriftingTeacher(
        DriftConfig(teacher=first_order, window_rows=200_000, preference_rate=0.2, season_windows=5, season_logit=0.5)
    )
    fitted = {window: _fit(teacher.frame(window)) for window in (0, 6)}
    rows = teacher.frame(6)
    y = rows["label"].to_numpy()
    truth = teacher.truth(6).best["label"]
    base = -(y.mean() * np.log(y.mean()) + (1 - y.mean()) * np.log(1 - y.mean()))

    def ne(window: int) -> float:
        p = fitted[window].predict_proba(_one_hot(rows))[:, 1]
        return float(-np.where(y == 1, np.log(p), np.log1p(-p)).mean() / base)

    assert ne(6) == pytest.approx(truth.normalised_entropy, abs=0.004)
    assert ne(0) > truth.normalised_entropy + 0.05


def _one_hot(frame: pl.DataFrame) -> np.ndarray:
    return np.concatenate([np.eye(10)[frame["C1"].to_numpy()], np.eye(12)[frame["C2"].to_numpy()]], axis=1)


def _fit(frame: pl.DataFrame) -> LogisticRegression:
    return LogisticRegression(C=100.0).fit(_one_hot(frame), frame["label"].to_numpy())


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"popularity_decay": 1.0}, "lifetime"),
        ({"season_logit": 1.0}, "period"),
        ({"begin": "yesterday"}, "a date"),
        ({"window_rows": 1}, "at least 2 rows"),
        ({"teacher": dataclasses.replace(TEACHER, num_dense=0), "covariate_rate": 0.1}, "means can move"),
        ({"lifetime": 3.0, "come_and_go": ("C9",)}, "C1, C2, L1"),
        ({"preference_rate": 1.5}, "from 0 to 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        drifting(**changes)


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        drifting().frame(-1)
