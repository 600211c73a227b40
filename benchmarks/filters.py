"""Filters over a million items: the time of a mask on one core, against polars; bytes; false positives.

Seven attributes: lists of 18 genres, years, 20 languages, 200 countries, 100,000 creators, lists of 20,000 tags (Zipf),
prices that are missing for one item in 50. Ours and polars take turns, and the items that pass are compared. What is
timed is a mask of a filter that was read before, the median of 41 in a row, and for polars the boolean column of an
expression; times are CPU time. `measure_filters` is what `benchmarks/retrieval.py` can show beside its searches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
import torch

from benchmarks.harness import percentiles, say
from benchmarks.report import Case, Report
from ziggurat.ops.bitmask import num_words, unpack_mask
from ziggurat.retrieval.filters import FilterConfig, FilterIndex, Tail

GENRES = [
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
]
GOAL_US = 100
ITEMS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Question:
    """A filter, and the same in polars."""

    name: str
    text: str
    peer: pl.Expr


def questions() -> list[Question]:
    """One predicate of each kind, and filters of four."""
    drama, war = (pl.col("genres").list.contains(genre) for genre in ("Drama", "War"))
    nineties, tag = pl.col("year").is_between(1995, 1999), pl.col("tags").list.contains("tag100")
    few = (f"creator{number}" for number in range(8))
    return [
        Question(name="one_of_18_in_lists", text="genres:Drama", peer=drama),
        Question(name="range_of_years", text="year:1995..1999", peer=nineties),
        Question(name="range_of_prices", text="price:5..10", peer=pl.col("price").is_between(5, 10)),
        Question(name="one_of_200", text="country:c7", peer=pl.col("country") == "c7"),
        Question(name="one_of_100000", text="creator:creator77", peer=pl.col("creator") == "creator77"),
        Question(name="one_of_20000_in_lists", text="tags:tag100", peer=tag),
        Question(
            name="eight_of_100000",
            text=f"creator IN ({', '.join(f'creator{number}' for number in range(8))})",
            peer=pl.col("creator").is_in(list(few)),
        ),
        Question(
            name="four_planes",
            text="genres:Drama AND NOT genres:War AND lang IN (l1, l2)",
            peer=drama & ~war & pl.col("lang").is_in(["l1", "l2"]),
        ),
        Question(
            name="four_with_ranges",
            text="genres:Drama AND NOT year:1995..1999 AND country:c5 AND price:<10",
            peer=drama & ~nineties & (pl.col("country") == "c5") & (pl.col("price") < 10),
        ),
        Question(
            name="four_with_rare_values",
            text="genres:Drama AND NOT tags:tag100 AND NOT creator:creator5 AND year:>=1980",
            peer=drama & ~tag & (pl.col("creator") != "creator5") & (pl.col("year") >= 1980),
        ),
    ]


def catalogue(n: int, *, seed: int = 0) -> pl.DataFrame:
    """Items with the seven attributes."""
    draw = np.random.default_rng(seed)
    tags = np.array([f"tag{number % 20_000}" for number in draw.zipf(1.3, 5 * n)])
    price = pl.Series(draw.gamma(2, 10, n)).to_frame("price")
    return pl.DataFrame(
        {
            "genres": _lists(np.array(GENRES)[draw.integers(0, 18, 3 * n)], draw.integers(1, 4, n)),
            "year": draw.integers(1919, 2001, n),
            "lang": [f"l{number}" for number in draw.integers(0, 20, n)],
            "country": [f"c{number}" for number in draw.integers(0, 200, n)],
            "creator": [f"creator{number}" for number in draw.integers(0, 100_000, n)],
            "tags": _lists(tags, draw.integers(0, 6, n)),
            "price": price.select(pl.when(pl.int_range(n) % 50 > 0).then("price"))["price"],
        }
    )


def _lists(values: np.ndarray, lengths: np.ndarray) -> pl.Series:
    """Lists of so many values each; an empty one stays empty."""
    owners = pl.Series(np.repeat(np.arange(len(lengths)), lengths)).alias("owner")
    grouped = pl.DataFrame([owners, pl.Series("value", values[: len(owners)])]).group_by("owner").agg("value")
    everyone = pl.DataFrame({"owner": np.arange(len(lengths))})
    empty = pl.lit([], dtype=pl.List(pl.String))
    return (
        everyone.join(grouped, on="owner", how="left", maintain_order="left")["value"]
        .to_frame()
        .select(pl.col("value").fill_null(empty))["value"]
    )


def measure_filters(n: int, *, rounds: int) -> dict[str, object]:
    """Times, bytes and false positives of an index of n items.

    Returns:
        `cases` (a `Case` each), `bytes_per_item`, `build_s` and `false_positives`, by the way in which the values of
        attributes with many texts are kept.
    """
    torch.set_num_threads(1)
    items = catalogue(n)
    order = torch.from_numpy(np.random.default_rng(1).permutation(n))
    placed = items[order.numpy()]
    found: dict[str, dict] = {"bytes_per_item": {}, "build_s": {}, "false_positives": {}}
    cases: list[Case] = []
    for tail in Tail:
        begin = time.process_time()
        index = FilterIndex.build(items, order=order, config=FilterConfig(tail=tail))
        found["build_s"][tail.value] = time.process_time() - begin
        found["bytes_per_item"][tail.value] = sum(index.index_bytes().values()) / n
        found["false_positives"][tail.value] = index.false_positives()
        for question in questions():
            say(f"  {question.name}, {tail.value}")
            cases.append(_case(index, placed, question, tail=tail, rounds=rounds))
    return {"cases": cases, **found}


def _case(index: FilterIndex, placed: pl.DataFrame, question: Question, *, tail: Tail, rounds: int) -> Case:
    program = index.program(question.text)
    out = torch.empty(num_words(index.n), dtype=torch.int64)

    def ours() -> None:
        program.run(index.planes, n=index.n, out=out)

    def peer() -> None:
        placed.select(question.peer)

    times = [(_seconds(ours, 41), _seconds(peer, 1)) for _ in range(rounds)]
    expected = placed.select(question.peer.fill_null(False)).to_series().to_torch()
    assert torch.equal(unpack_mask(out, index.n), expected), f"{question.name}: other items pass than in polars"
    ratios = [theirs / mine for mine, theirs in times]
    low, high = percentiles(ratios)
    return Case(
        name=f"{question.name}_{tail.value}",
        ours=1 / statistics.median(mine for mine, _ in times),
        peer=1 / statistics.median(theirs for _, theirs in times),
        ratio=statistics.median(ratios),
        ratio_p10=low,
        ratio_p90=high,
        ours_name="FilterIndex",
        peer_name="polars",
        unit="filters/s",
    )


def _seconds(function: Callable[[], None], times: int) -> float:
    """The median CPU time of calls; polars computes in threads of its own, which count."""
    taken = []
    for _ in range(times):
        begin = time.process_time()
        function()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def run(*, quick: bool = False) -> Report:
    """Measure filters of every kind."""
    n = ITEMS // 10 if quick else ITEMS
    found = measure_filters(n, rounds=3 if quick else 11)
    report = Report(
        benchmark="filters",
        claim=f"Masks of filters over {n:,} items a second on one core, against polars on the same columns (CPU time).",
        command="ziggurat bench filters",
        cases=found["cases"],  # type: ignore[arg-type]
        extra={"bytes_per_item": found["bytes_per_item"], "build_cpu_s": found["build_s"]},
    )
    slow = [case.name for case in report.cases if case.name.startswith("four") and 1e6 / case.ours > GOAL_US]
    report.notes.append(
        f"goal: {GOAL_US} us for four predicates over a million items; missed by {', '.join(slow) or 'none'}"
    )
    report.notes += [
        f"{case.name}: {1e6 / case.ours:.0f} us, polars {1e6 / case.peer:,.0f} us" for case in report.cases
    ]
    for tail, rates in found["false_positives"].items():  # type: ignore[attr-defined]
        kept, built = found["bytes_per_item"][tail], found["build_s"][tail]  # type: ignore[index]
        report.notes.append(
            f"{tail}: {kept:.1f} bytes an item with seven attributes, built in {built:.1f} s of CPU time"
        )
        report.notes += [
            f"{tail}, {rate.attribute}: {rate.planes} planes, {rate.hashes} a value; false positives predicted "
            f"{rate.predicted:.4%}, measured {rate.measured:.4%}"
            for rate in rates
        ]
    return report
