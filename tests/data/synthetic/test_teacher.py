"""The teacher's rows do not depend on chunks, its distributions are as stated, and its best metrics are right."""

import functools
from itertools import combinations

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal
from sklearn.metrics import log_loss, roc_auc_score

from ziggurat.data.raw.source import RawSource
from ziggurat.data.synthetic.best_metrics import best_metrics
from ziggurat.data.synthetic.drift import DriftConfig
from ziggurat.data.synthetic.rows import BLOCK_ROWS, id_probabilities
from ziggurat.data.synthetic.teacher import SyntheticConfig, SyntheticTeacher, criteo_shaped, learnable, six_orders
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.schema import Encoding, MultiHot, column_of

LISTS = SyntheticConfig(
    num_dense=2,
    cardinalities=(10, 7),
    list_cardinalities=(30,),
    list_mean_length=1.5,
    list_max_length=4,
    conversion_rate=0.1,
    missing_share=0.2,
    num_groups=1,
    seed=3,
)


@pytest.fixture(scope="module")
def teacher() -> SyntheticTeacher:
    return SyntheticTeacher(learnable())


@pytest.fixture(scope="module")
def lists() -> SyntheticTeacher:
    return SyntheticTeacher(LISTS)


# ---------------------------------------------------------------------------------------------------------------- rows


@settings(deadline=None, max_examples=8)
@given(
    start=st.integers(0, 2 * BLOCK_ROWS),
    length=st.integers(0, 3 * BLOCK_ROWS // 2),
    chunk_rows=st.integers(1000, 100_000),
)
def test_rows_do_not_depend_on_chunks_or_on_where_reading_starts(start: int, length: int, chunk_rows: int):
    teacher, whole, probabilities = _whole()
    rows = range(start, start + length)
    chunks = list(teacher.frames(rows, chunk_rows=chunk_rows))
    assert all(chunk.height == chunk_rows for chunk in chunks[:-1])
    assert sum(chunk.height for chunk in chunks) == length
    frame = pl.concat(chunks) if chunks else teacher.frame(rows)
    assert_frame_equal(frame, whole.slice(start, length))
    np.testing.assert_array_equal(teacher.probabilities(rows), probabilities[:, start : start + length])


@functools.cache
def _whole() -> tuple[SyntheticTeacher, pl.DataFrame, np.ndarray]:
    teacher = SyntheticTeacher(LISTS)
    return teacher, teacher.frame(4 * BLOCK_ROWS), teacher.probabilities(4 * BLOCK_ROWS)


def test_two_teachers_of_one_seed_agree_and_of_two_seeds_differ(teacher: SyntheticTeacher):
    assert_frame_equal(teacher.frame(1000), SyntheticTeacher(learnable()).frame(1000))
    other = SyntheticTeacher(learnable(seed=1)).frame(1000)
    assert not teacher.frame(1000)["C1"].equals(other["C1"])


def test_columns_types_and_ranges(lists: SyntheticTeacher):
    frame = lists.frame(50_000)
    assert frame.schema == {
        "label": pl.Int8,
        "conversion": pl.Int8,
        "I1": pl.Float32,
        "I2": pl.Float32,
        "C1": pl.Int32,
        "C2": pl.Int32,
        "L1": pl.List(pl.Int32),
    }
    assert frame["I1"].null_count() / frame.height == pytest.approx(0.2, abs=0.01)
    assert frame["I1"].drop_nulls().is_finite().all()
    assert (frame["C2"].min(), frame["C2"].max()) == (0, 6)
    lengths = frame["L1"].list.len()
    assert (lengths.min(), lengths.max()) == (0, 4)
    assert frame["L1"].explode().drop_nulls().is_between(0, 29).all()
    assert (frame["conversion"] <= frame["label"]).all()


def test_ids_follow_the_stated_distribution():
    for exponent in (0.0, 0.7, 1.0, 1.3):
        config = SyntheticConfig(cardinalities=(50,), num_groups=1, num_dense=0, zipf_exponent=exponent)
        counts = np.bincount(SyntheticTeacher(config).frame(200_000)["C1"].to_numpy(), minlength=50)
        expected = id_probabilities(50, exponent)
        assert expected.sum() == pytest.approx(1.0)
        np.testing.assert_array_less(np.abs(counts / 200_000 - expected), 5 * np.sqrt(expected / 200_000))


def test_large_cardinalities_reach_the_last_id():
    config = SyntheticConfig(cardinalities=(2_000_000,), num_groups=1, num_dense=0, zipf_exponent=0.0, hidden_dim=1)
    ids = SyntheticTeacher(config).frame(200_000)["C1"]
    assert ids.max() < 2_000_000
    assert ids.max() > 1_999_000
    assert ids.n_unique() > 185_000


def test_click_and_conversion_rates_are_those_chosen(teacher: SyntheticTeacher, lists: SyntheticTeacher):
    assert teacher.probabilities(500_000).mean() == pytest.approx(0.25, abs=0.005)
    click, conversion = lists.probabilities(500_000).mean(axis=1)
    assert click == pytest.approx(0.25, abs=0.005)
    assert conversion / click == pytest.approx(0.1, abs=0.005)


def test_labels_are_drawn_from_the_probabilities(lists: SyntheticTeacher):
    labels = lists.frame(400_000).select("label", "conversion").to_numpy().T
    for label, probability in zip(labels, lists.probabilities(400_000), strict=True):
        order = np.argsort(probability)
        for part in np.array_split(order, 20):
            sd = np.sqrt((probability[part] * (1 - probability[part])).sum())
            assert abs(label[part].sum() - probability[part].sum()) < 4.5 * sd


def test_only_features_of_one_group_interact():
    """The second difference of the logit over two ids is zero across groups, and is not within one."""
    config = SyntheticConfig(num_dense=0, cardinalities=(2,) * 4, num_groups=2, zipf_exponent=0.0, hidden_dim=2)
    teacher = SyntheticTeacher(config)
    frame = teacher.frame(20_000)
    p = teacher.probabilities(20_000)[0]
    logit = dict(zip(frame.select("C1", "C2", "C3", "C4").rows(), np.log(p / (1 - p)), strict=True))
    names = ["C1", "C2", "C3", "C4"]
    assert len(logit) == 16
    assert sorted(name for group in teacher.groups for name in group) == names
    for a in range(4):
        for b in range(a):
            difference = 0.0
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                ids = [0] * 4
                ids[a], ids[b] = i, j
                difference += (-1) ** (i + j) * logit[tuple(ids)]
            together = any({names[a], names[b]} <= set(group) for group in teacher.groups)
            assert (abs(difference) > 1e-3) == together


def test_lists_of_the_same_ids_count_by_their_mean_and_empty_ones_for_nothing():
    config = SyntheticConfig(
        num_dense=0, cardinalities=(2,), list_cardinalities=(3,), list_mean_length=1.0, num_groups=1, seed=1
    )
    teacher = SyntheticTeacher(config)
    frame = teacher.frame(30_000).with_columns(p=teacher.probabilities(30_000)[0])
    seen = {(row["C1"], tuple(row["L1"])): row["p"] for row in frame.iter_rows(named=True)}
    assert seen[0, (1,)] == pytest.approx(seen[0, (1, 1)], rel=1e-5)
    assert seen[0, (0, 1)] == pytest.approx(seen[0, (1, 0)], rel=1e-5)
    assert abs(seen[0, ()] - seen[0, (1,)]) > 1e-3


def test_shares_are_shares_of_the_logits_variance():
    config = SyntheticConfig(dense_share=0, first_order_share=0, second_order_share=1, third_order_share=0)
    assert np.std(_logit(config)) == pytest.approx(1.8, rel=0.02)
    config = SyntheticConfig(num_dense=0, first_order_share=1, second_order_share=0, third_order_share=0)
    assert np.std(_logit(config)) == pytest.approx(1.8, rel=0.02)


def _logit(config: SyntheticConfig) -> np.ndarray:
    p = SyntheticTeacher(config).probabilities(200_000)[0]
    return np.log(p / (1 - p))


# ------------------------------------------------------------------------------------------------------------- metrics


def test_best_auc_is_the_mean_over_many_draws_of_labels():
    """Monte Carlo: the pairs formula against scikit-learn on labels drawn again and again, with ties among p."""
    rng = np.random.default_rng(0)
    p = np.round(rng.beta(0.8, 2.0, 400), 2).clip(0.01, 0.99)
    expected = best_metrics(p, rng.random(400) < p)
    draws = [(rng.random(400) < p).astype(int) for _ in range(400)]
    aucs = np.array([roc_auc_score(y, p) for y in draws])
    losses = np.array([log_loss(y, p) for y in draws])
    # The ratio of expectations differs from the expected ratio by O(1/N), far below the tolerance.
    assert aucs.mean() == pytest.approx(expected.auc, abs=4 * aucs.std() / np.sqrt(400) + 2e-4)
    assert losses.mean() == pytest.approx(expected.log_loss, abs=4 * losses.std() / np.sqrt(400))
    rate = p.mean()
    base = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate))
    assert expected.normalised_entropy == pytest.approx(expected.log_loss / base)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0.05, 0.2, 0.2001, 0.5, 0.9]), min_size=2, max_size=30), st.randoms())
def test_pairs_formula_equals_the_double_loop(values: list[float], random):
    p = np.array(values)
    top = bottom = 0.0
    for i in range(p.size):
        for j in range(p.size):
            if i != j:
                weight = p[i] * (1 - p[j])
                bottom += weight
                top += weight * (1.0 if p[i] > p[j] else 0.5 if p[i] == p[j] else 0.0)
    labels = np.array([random.randint(0, 1) for _ in values])
    metrics = best_metrics(p, labels)
    assert metrics.auc == pytest.approx(top / bottom, abs=1e-12)
    if 0 < labels.sum() < labels.size:
        assert metrics.sample_auc == pytest.approx(roc_auc_score(labels, p), abs=1e-12)
    else:
        assert np.isnan(metrics.sample_auc)
    assert metrics.sample_log_loss == pytest.approx(log_loss(labels, p, labels=[0, 1]), abs=1e-12)


def test_best_metrics_of_the_teacher_are_what_its_own_probabilities_score(teacher: SyntheticTeacher):
    best = teacher.best_metrics(range(100_000, 400_000))
    frame = teacher.frame(range(100_000, 400_000))
    p = teacher.probabilities(range(100_000, 400_000))[0]
    assert best.num_rows == 300_000
    assert best.sample_auc == pytest.approx(roc_auc_score(frame["label"], p), abs=1e-12)
    assert best.auc == pytest.approx(best.sample_auc, abs=0.003)
    assert best.log_loss == pytest.approx(best.sample_log_loss, abs=0.004)
    worse = roc_auc_score(frame["label"], p + np.random.default_rng(0).normal(0, 0.05, p.size))
    assert worse < best.sample_auc - 0.002


def test_best_metrics_of_the_second_label(lists: SyntheticTeacher):
    best = lists.best_metrics(200_000, label="conversion")
    assert best.positive_rate == pytest.approx(0.025, abs=0.002)
    assert 0.6 < best.auc < 0.99


# ----------------------------------------------------------------------------------------------------- schema and file


def test_schema_reads_every_column_and_identity_tables_have_the_true_ids(lists: SyntheticTeacher):
    schema = lists.schema()
    frame = lists.frame(10)
    assert {column_of(item) for item in (*schema.features, *schema.labels)} == set(frame.columns)
    assert [(table.name, table.num_rows) for table in schema.tables] == [("C1", 10), ("C2", 7), ("L1", 30)]
    assert isinstance(schema.feature("L1"), MultiHot)
    assert lists.schema(encoding=Encoding.VOCABULARY).tables == ()


def test_criteo_shape():
    schema = SyntheticTeacher(criteo_shaped(cardinality=1000)).schema()
    assert [feature.name for feature in schema.features] == [f"I{n}" for n in range(1, 14)] + [
        f"C{n}" for n in range(1, 27)
    ]
    assert {table.num_rows for table in schema.tables} == {1000}
    assert criteo_shaped().cardinalities == (100_000,) * 26


def test_parquet_holds_the_rows_with_page_checksums_and_nothing_else_is_left(lists: SyntheticTeacher, tmp_path):
    path = lists.write_parquet(tmp_path / "rows.parquet", range(1000, 41_000))
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.parquet"]
    table = pq.ParquetFile(path, page_checksum_verification=True).read()
    assert_frame_equal(pl.DataFrame(table), lists.frame(range(1000, 41_000)))
    empty = pl.read_parquet(lists.write_parquet(tmp_path / "none.parquet", 0))
    assert empty.schema == lists.frame(1).schema
    assert empty.height == 0


def test_mistakes_have_errors(lists: SyntheticTeacher, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match=r"file.rows\.parquet"):
        lists.write_parquet(tmp_path / "file" / "rows.parquet", 10)
    with pytest.raises(ConfigError, match="no step"):
        lists.frame(range(0, 10, 2))
    for wrong in (
        {"cardinalities": ()},
        {"cardinalities": (0,)},
        {"num_groups": 9},
        {"logit_sd": 0.0},
        {"click_rate": 1.0},
        {"missing_share": 1.0},
        {"dense_share": -1.0},
        {"list_mean_length": 0.0},
        {"seed": -1},
    ):
        with pytest.raises(ConfigError):
            SyntheticConfig(**wrong)


def test_files_are_sealed_so_that_a_changed_footer_is_found(tmp_path):
    path = SyntheticTeacher(LISTS).write_parquet(tmp_path / "rows.parquet", rows=50)
    content = bytearray(path.read_bytes())
    content[-20] ^= 1  # of the footer, which no checksum of Parquet's own covers
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match="the footer or the seal differs"):
        list(RawSource([path]).frames())


# ---------------------------------------------------------------------------------------------------------- six orders


def test_each_order_carries_its_share_of_the_logit():
    """Project the logit on the products themselves, which are made here from the ids by the definition."""
    config = six_orders()
    teacher = SyntheticTeacher(config)
    maker = teacher.maker
    rows = 60_000
    frame = teacher.frame(rows)
    ids = [frame[name].to_numpy() for name in maker.names]
    p = teacher.probabilities(rows)[0]
    logit = np.log(p) - np.log1p(-p)
    hidden = [table[place, 1].astype(np.float64) for table, place in zip(maker.still.tables, ids, strict=True)]
    shares = []
    left = logit - logit.mean()
    variance = left.var()
    for order in range(2, 7):
        products = [np.prod([hidden[i] for i in members], axis=0) for members in combinations(range(8), order)]
        design = np.stack(products, axis=1)
        weights, *_ = np.linalg.lstsq(design, left, rcond=None)
        shares.append((design @ weights).var() / variance)
        assert np.std(weights / weights.std()) > 0.5  # each product has a weight of its own
    # By 60,000 rows, and by those that calibrate; fitting 70 weights takes a thousandth more.
    np.testing.assert_allclose(shares, [0.30, 0.20, 0.15, 0.10, 0.05], atol=0.015)
    assert np.sqrt(variance) == pytest.approx(2.5, rel=0.03)


def test_what_is_left_of_six_orders_is_of_single_features():
    config = six_orders()
    teacher = SyntheticTeacher(config)
    rows = 60_000
    frame = teacher.frame(rows)
    p = teacher.probabilities(rows)[0]
    logit = np.log(p) - np.log1p(-p)
    single = sum(
        np.array([logit[ids == i].mean() for i in range(ids.max() + 1)])[ids] - logit.mean()
        for ids in (frame[name].to_numpy() for name in teacher.maker.names)
    )
    assert single.var() / logit.var() == pytest.approx(0.15, abs=0.015)


def test_rows_of_six_orders_are_made_in_blocks_that_owe_each_other_nothing():
    whole = SyntheticTeacher(six_orders()).frame(2 * BLOCK_ROWS)
    alone = SyntheticTeacher(six_orders()).frame(range(BLOCK_ROWS + 5, BLOCK_ROWS + 500))
    assert_frame_equal(alone, whole.slice(BLOCK_ROWS + 5, 495))


def test_vectors_that_move_must_be_normal():
    with pytest.raises(ConfigError, match="even_vectors"):
        DriftConfig(teacher=six_orders())


def test_teachers_of_three_orders_are_what_they_were():
    """Rows of studies that were made before there were more orders."""
    block = SyntheticTeacher(SyntheticConfig()).maker.block(3)
    assert block.probabilities[0, :3] == pytest.approx(
        [0.24509254585584725, 0.14532490775158893, 0.5936354284322567], rel=1e-12
    )
