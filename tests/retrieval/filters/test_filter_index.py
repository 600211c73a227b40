"""The filter index: the items that pass are those for which plain Python finds the filter true, in every build."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.retrieval.filters.random_filters import Filters, Said, catalogue, rows_of
from ziggurat.errors import BoundsError, ConfigError, DataError, FilterError
from ziggurat.ops import bitmask, mask_program
from ziggurat.ops.bitmask import rows_of_mask, unpack_mask
from ziggurat.ops.cpp_build import CppLibrary
from ziggurat.ops.mask_program import run_reference
from ziggurat.retrieval.filters import FilterConfig, FilterIndex, FilterSchema, Tail

N = 700
CONFIGS = [
    FilterConfig(tail=Tail.BLOOM),
    FilterConfig(most_planes=4),
    FilterConfig(tail=Tail.BLOOM, most_planes=4, bloom_hashes=2, bloom_rate=0.2),
    FilterConfig(tail=Tail.BLOOM, most_planes=0, bloom_hashes=1, bloom_rate=0.5, cached=1),
]


@pytest.fixture(scope="module")
def items() -> pl.DataFrame:
    return catalogue(N, seed=1)


@pytest.fixture(scope="module")
def index(items: pl.DataFrame) -> FilterIndex:
    return FilterIndex.build(items, config=CONFIGS[2])


@pytest.fixture(scope="module")
def drawn(items: pl.DataFrame) -> list[Said]:
    filters = Filters(items, seed=3)
    return [filters.draw(3) for _ in range(800)]


@pytest.mark.parametrize("config", CONFIGS)
def test_random_filters_let_the_items_pass_that_python_lets_pass(
    items: pl.DataFrame, drawn: list[Said], config: FilterConfig
) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(2))
    built = FilterIndex.build(items, order=order, config=config)
    for number, said in enumerate(drawn):
        mask = built.masks([said.text])[0]
        assert sorted(order[rows_of_mask(mask)].tolist()) == rows_of(said.true), said.text
        if number % 20 == 0:
            tree = built.program(said.text).tree
            assert torch.equal(run_reference(tree, planes=built.planes, n=N), mask), said.text
            position = number % N
            said_of_item = built.explain(said.text, position)
            passes = bool(said.true >> int(order[position]) & 1)
            assert said_of_item.startswith(f"this item {'passes' if passes else 'does not'}")


@pytest.mark.slow
def test_a_million_random_filters() -> None:
    rows = catalogue(300, seed=5)
    filters = Filters(rows, seed=6, most_terms=5000)
    indices = [FilterIndex.build(rows, config=config) for config in CONFIGS]
    for number in range(1_000_000):
        said = filters.draw(number % 5)
        mask = indices[number % len(indices)].masks([said.text])[0]
        true = int.from_bytes(mask.numpy().tobytes(), "little")
        assert true == said.true, said.text


def test_without_a_compiler_the_answers_are_the_same(
    drawn: list[Said], index: FilterIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [said.text for said in drawn[:30]]
    fast = index.masks(texts, exclude=[torch.tensor([3, -1])] * 30)
    for module in (mask_program, bitmask):
        monkeypatch.setattr(module, "_LIBRARY", CppLibrary.missing("no compiler"))
    assert torch.equal(index.masks(texts, exclude=[torch.tensor([3, -1])] * 30), fast)


def test_each_query_has_its_own_filter_and_its_own_exclusions(items: pl.DataFrame, index: FilterIndex) -> None:
    masks = index.masks(
        ["in_stock:true", None, None, index.parse("rating:5")],
        exclude=[None, torch.tensor([0, 5, 699, -1, 5]), torch.tensor([], dtype=torch.int64), None],
    )
    passing = [set(rows_of_mask(mask).tolist()) for mask in masks]
    assert passing[0] == set(items.with_row_index().filter(pl.col("in_stock"))["index"].to_list())
    assert passing[1] == set(range(N)) - {0, 5, 699}
    assert passing[2] == set(range(N))
    assert passing[3] == set(items.with_row_index().filter(pl.col("rating") == 5)["index"].to_list())
    for wrong in (torch.tensor([N]), torch.tensor([-2]), torch.tensor([0.5])):
        with pytest.raises(BoundsError, match="exclude, query 1"):
            index.masks([None, None], exclude=[None, wrong])


def test_spans_of_words_are_those_of_the_whole_mask(index: FilterIndex) -> None:
    spans = torch.tensor([[2, 4], [9, 11]])
    for wanted in ("creator:'creator 1' OR year:>1980", None):
        whole, part = index.masks([wanted])[0], index.masks([wanted], spans=spans)[0]
        kept = torch.zeros_like(whole)
        for begin, end in spans.tolist():
            kept[begin:end] = whole[begin:end]
        assert torch.equal(part, kept)


def test_the_state_is_tensors_and_comes_back_from_a_file(index: FilterIndex, tmp_path: Path) -> None:
    wanted = "genres:Drama AND NOT tags:tag3 AND price:<50"
    save_file(index.state_dict(prefix="filters."), tmp_path / "index.safetensors")
    back = FilterIndex.from_state(load_file(tmp_path / "index.safetensors"), prefix="filters.")
    assert torch.equal(back.masks([wanted]), index.masks([wanted]))
    assert (back.schema, back.config, back.left_out) == (index.schema, index.config, index.left_out)
    copied = copy.deepcopy(index)
    assert torch.equal(copied.masks([wanted]), index.masks([wanted]))
    copied.load_state_dict(index.state_dict())
    assert torch.equal(copied.masks([wanted]), index.masks([wanted]))


def test_the_state_of_another_index_is_refused(index: FilterIndex) -> None:
    one, other = (FilterIndex.build(pl.DataFrame({"x": values})) for values in (["a", "b"], ["c", None]))
    with pytest.raises((ConfigError, RuntimeError)):
        one.load_state_dict(other.state_dict())


def test_a_segment_of_further_items_has_the_same_attributes_and_other_values(index: FilterIndex) -> None:
    further = catalogue(5, seed=9).with_columns(
        pl.Series("creator", ["new"] * 5), pl.Series("year", [2030, None, 1, 2, 3]), pl.Series("tags", [None] * 5)
    )
    segment = FilterIndex.build(further, schema=index.schema)
    assert segment.schema == index.schema
    wanted = index.parse("creator:new AND year:>=2000 AND tags IS MISSING")
    assert rows_of_mask(segment.masks([wanted])[0]).tolist() == [0]
    assert rows_of_mask(index.masks([wanted])[0]).tolist() == []
    with pytest.raises(DataError, match="'year'"):
        FilterIndex.build(further.drop("year"), schema=index.schema)
    with pytest.raises(DataError, match="'year'"):
        FilterIndex.build(further.with_columns(year=pl.lit("1999")), schema=index.schema)


def test_bloom_planes_are_as_often_wrong_as_predicted_and_answers_are_exact() -> None:
    draw = random.Random(0)
    rows = pl.DataFrame({"tags": [[f"t{draw.randrange(3000)}" for _ in range(draw.randrange(6))] for _ in range(4000)]})
    built = FilterIndex.build(rows, config=FilterConfig(tail=Tail.BLOOM, bloom_rate=0.01))
    (found,) = built.false_positives(probes=200)
    assert found.predicted <= 0.01
    assert found.measured == pytest.approx(found.predicted, rel=0.15)
    wanted = [f"NOT tags:t{number}" for number in range(20)]
    expected = [{row for row, tags in enumerate(rows["tags"].to_list()) if text[9:] not in tags} for text in wanted]
    assert [set(rows_of_mask(mask).tolist()) for mask in built.masks(wanted)] == expected


def test_selectivity_is_near_the_share_that_passes() -> None:
    draw = random.Random(0)
    n = 60_000
    years = [draw.randrange(100) for _ in range(n)]
    rows = pl.DataFrame({"year": years, "decade": [year // 10 for year in years]})
    built = FilterIndex.build(rows)
    for text, share in [("year:0..49", 0.5), ("year:7 AND decade:0", 0.01), ("NOT decade:3", 0.9), ("year:200", 0.0)]:
        assert built.selectivity(text) == pytest.approx(share, rel=0.2, abs=1e-3)
    assert built.selectivity(None) == 1.0
    small = FilterIndex.build(rows[:1000])
    assert small.selectivity("year:<50") == sum(year < 50 for year in years[:1000]) / 1000


def test_an_item_is_explained_part_by_part() -> None:
    rows = pl.DataFrame({"genres": [["Drama", "Comedy"], []], "year": [1997, None]})
    built = FilterIndex.build(rows)
    lines = built.explain("genres:Drama AND NOT year:1995..1999", 0).splitlines()
    assert lines == [
        "this item does not pass: genres:Drama AND NOT year:1995..1999",
        "  no       all of",
        "  yes        genres:Drama   (genres is Comedy, Drama)",
        "  no         NOT",
        "  yes          year:1995..1999   (year is 1997)",
    ]
    unknown = built.explain("NOT year:1990", 1)
    assert "unknown whether" in unknown
    assert "year is missing" in unknown
    assert "an empty list" in built.explain("genres:Drama", 1)
    assert built.notes("genres:drama OR year:1990") == [
        "no item has genres:drama; the nearest is 'Drama'",
        "no item has year:1990",
    ]
    many = built.notes(" OR ".join(f"genres:d{n} OR genres:d{n}" for n in range(30)))
    assert len(many) == 9
    assert many[-1] == "no item has 22 further values of the filter"
    assert built.values_of(0) == {"genres": ["Comedy", "Drama"], "year": [1997]}
    assert built.values_of(1) == {"genres": [], "year": None}
    with pytest.raises(BoundsError):
        built.explain("year:1990", 2)


@pytest.mark.parametrize("n", [0, 1, 64, 65])
def test_few_items_are_no_special_case(n: int) -> None:
    rows, schema = catalogue(n, seed=n), FilterSchema.of_frame(catalogue(70, seed=2))[0]
    filters = Filters(catalogue(70, seed=2), seed=n, most_terms=30)
    texts = [*(filters.draw(2).text for _ in range(20)), "kind:film"]
    for config in CONFIGS:
        masks = FilterIndex.build(rows, config=config, schema=schema).masks(texts)
        assert not unpack_mask(masks, masks.shape[1] * 64)[:, n:].any()
        assert unpack_mask(masks[-1], n).all()


def test_what_cannot_be_indexed_is_refused_or_said() -> None:
    rows = pl.DataFrame({"vector": [[0.5, 1.0]], "year": [1990], "odd": [{"a": 1}]})
    built = FilterIndex.build(rows)
    assert built.schema.names == ["year"]
    assert set(built.left_out) == {"vector", "odd"}
    with pytest.raises(FilterError, match="left out"):
        built.parse("odd:1")
    named = FilterIndex.build(rows, config=FilterConfig(attributes=("vector",)))
    assert rows_of_mask(named.masks(["vector:0.9..1.1"])[0]).tolist() == [0]
    with pytest.raises(ConfigError, match="did you mean"):
        FilterIndex.build(rows, config=FilterConfig(attributes=("yaer",)))
    with pytest.raises(ConfigError, match="'odd'"):
        FilterIndex.build(rows, config=FilterConfig(attributes=("odd",)))
    with pytest.raises(DataError, match="64 bits"):
        FilterIndex.build(pl.DataFrame({"id": pl.Series([1 << 63], dtype=pl.UInt64)}))
    for order in (torch.tensor([1]), torch.tensor([0, 0]), torch.tensor([0.0])):
        with pytest.raises(ConfigError, match="order"):
            FilterIndex.build(rows, order=order)
    with pytest.raises(FilterError, match="as text"):
        built.parse(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", CONFIGS[1:3])
def test_damaged_tensors_are_refused_before_anything_follows_them(items: pl.DataFrame, config: FilterConfig) -> None:
    state = FilterIndex.build(items[:300], config=config).state_dict()
    for name, tensor in state.items():
        kind = name.rsplit(".")[-1]
        if kind in ("planes", "codes", "rows", "offsets", "item_codes", "item_offsets", "text_offsets", "numbers"):
            with pytest.raises(DataError):
                FilterIndex.from_state({**state, name: tensor.reshape(-1)[:-1]})
        if kind in ("rows", "item_offsets", "planed", "buckets") and len(tensor):
            for moved in (tensor - 1_000_000, tensor + 1_000_000):
                with pytest.raises(DataError):
                    FilterIndex.from_state({**state, name: moved})


def test_a_filter_of_another_index_and_wrong_arguments_are_refused(index: FilterIndex) -> None:
    other = FilterIndex.build(pl.DataFrame({"colour": ["red"], "year": ["old"]}))
    for text in ("colour:red", "year:old"):
        with pytest.raises(FilterError, match="another index"):
            index.masks([other.parse(text)])
    with pytest.raises(ConfigError, match="each of 1 queries"):
        index.masks([None], exclude=[None, None])
    for wrong in (torch.zeros(2, 2, dtype=torch.int64), torch.tensor([True])):
        with pytest.raises(BoundsError, match="in one row"):
            index.masks([None], exclude=[wrong])
    for spans in (torch.tensor([[0, 12]]), torch.tensor([[-1, 2]]), torch.tensor([0, 1]), torch.tensor([[0.0, 1.0]])):
        with pytest.raises(BoundsError, match="spans"):
            index.masks([None], spans=spans)


def test_bytes_are_counted_by_attribute(index: FilterIndex) -> None:
    sizes = index.index_bytes()
    assert set(sizes) == {"planes", *index.schema.names}
    assert sum(sizes.values()) == sum(tensor.nbytes for tensor in index.buffers()) - index.about.nbytes
