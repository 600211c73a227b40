"""Hold what links between hosts add to a step in the demo: bytes by hand, steps over links, and how they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ziggurat.cli.verbs import _print_ranks
from ziggurat.runs.demo import links
from ziggurat.runs.demo.towers import RanksRow, _fast

FLAT, TOWERS = (44.4, 787_000.0), (51.3, 329_000.0)


def test_bytes_out_of_a_host_are_messages_to_others_and_a_share_of_sums() -> None:
    rows = [
        {"purpose": "embeddings forward", "link": "cross_host", "bytes_per_step": 1000},
        {"purpose": "embeddings backward", "link": "host", "bytes_per_step": 700},
        {"purpose": "dense gradients", "link": "reduced", "bytes_per_step": 400},
    ]
    # 4 ranks add 100 bytes each: in a ring 2 · 3/4 of them cross each link.
    assert links.bytes_out_of_a_host({"ranks": 4, "rows": rows}, num_hosts=2) == 1000 / 2 + 150


def test_an_emulated_link_adds_the_time_of_its_bytes() -> None:
    measured, *others = links.emulated(FLAT, TOWERS)
    assert (measured.flat_ms, measured.towers_ms) == (44.4, 51.3)
    assert measured.verdict == "flat 1.16 times as fast"
    by_rate = dict(zip(links.GBIT_PER_S, others, strict=True))
    assert by_rate[0.1].flat_ms == pytest.approx(44.4 + 62.96)
    assert by_rate[0.1].towers_ms == pytest.approx(51.3 + 26.32)
    assert by_rate[0.1].verdict == "towers 1.38 times as fast"


def test_at_the_even_rate_both_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = links.even_rate(FLAT, TOWERS)
    assert rate == pytest.approx(0.531, abs=0.001)
    monkeypatch.setattr(links, "GBIT_PER_S", (rate,))
    assert links.emulated(FLAT, TOWERS)[1].verdict == "equal"
    assert links.even_rate(FLAT, (44.0, 329_000.0)) == float("inf")
    assert links.even_rate(FLAT, (51.3, 900_000.0)) == 0.0
    assert "below 0.53 Gbit/s" in links.explained(FLAT, TOWERS)[1]
    assert "on every link" in links.explained(FLAT, (44.0, 329_000.0))[1]
    assert "on no link" in links.explained(FLAT, (51.3, 900_000.0))[1]


def test_simulated_gpus_compute_so_fast_that_towers_win_and_more_so_on_more_hosts() -> None:
    two, eight = links.simulated()
    assert (two.link, eight.link) == ("simulated: 2 hosts × 8 A100", "simulated: 8 hosts × 8 A100")
    assert 1.1 < two.flat_ms / two.towers_ms < eight.flat_ms / eight.towers_ms
    assert links.simulated() == [two, eight]


def test_bars_are_as_long_as_their_values() -> None:
    drawn = links.bars([1023, 128, 1, 0], width=30)
    assert drawn[0] == "█" * 30
    assert drawn[1] == "███▊"
    assert drawn[2:] == ["▎", "▏"] or drawn[2:] == ["▏", "▏"]
    assert links.bars([]) == []


def test_the_demo_names_what_is_measured_emulated_and_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [
        RanksRow(
            name=name,
            test_auc=0.76,
            cross_host_bytes=size,
            leaving_bytes=step[1],
            step_ms=step[0],
            report=Path("report.html"),
        )
        for name, size, step in (("flat", 1_047_790, FLAT), ("towers", 130_974, TOWERS))
    ]
    _print_ranks(ranks)
    said = capsys.readouterr().out
    assert re.search(r"flat +0\.7600 +1,023 +█{30}$", said, re.MULTILINE)
    assert re.search(r"towers +0\.7600 +128 +███▊$", said, re.MULTILINE)
    for kind, number in (("measured", 1), ("emulated", 3), ("simulated", 2)):
        assert len(re.findall(rf"^{kind}: .* times as fast$", said, re.MULTILINE)) == number
        assert re.search(rf"^{kind}: .*[a-z)]$", said, re.MULTILINE)


def test_other_work_on_the_machine_during_a_job_is_no_part_of_its_step() -> None:
    quiet = [100.0 + number for number in range(10)]
    assert _fast([*quiet, 3.0, 4.0]) == _fast(quiet) == 108.0
