"""Filtered vector search on one core: queries a second at recall@100 ≥ 0.95, a different filter for each query.

    cells     none | 50 % | 10 % | 1 % of the items pass, random ones | 10 % that lie near the query, or far from it |
              1 % with what can be prepared of a filter beforehand
    peers     faiss (IVF flat, SQ8, PQ fast scan refined, knn on the rows that pass), ScaNN (scann-core); by `--peers`
              also usearch and hnswlib, whose graphs take 5 to 10 minutes to build
    counted   process CPU time, one thread, all contestants in turns in one process; the ratio is against the fastest
              peer that reaches the recall, round by round

Filters are bits that are there when the clock starts, for everyone: what computing them from a text costs is the
business of `ziggurat.retrieval.filters`. faiss takes one selector a call, so its batch of 64 filters is 64 calls; ScaNN
has no filters, so it fetches more and drops what does not pass.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import PEER_PYTHON, ROOT, chosen, percentiles, say
from benchmarks.machine import RETRIEVAL_PACKAGES, describe_versions
from benchmarks.report import Case, Report, short
from benchmarks.retrieval_cells import CELLS
from ziggurat.errors import MissingDependencyError

BUILD = ROOT / "build" / "benchmarks"
PEERS = ("faiss", "scann", "usearch", "hnswlib")
_RECALL = 0.945  # to two decimals 0.95; who has less is marked and not compared with
_GOALS = {  # queries a second on a Zen 4 core
    (64, "none"): 12_000,
    (64, "50 %"): 11_000,
    (64, "10 %"): 5_000,
    (64, "1 %"): 4_000,
    (64, "1 % cached"): 12_000,
    (128, "none"): 9_000,
    (128, "50 %"): 9_500,
    (128, "10 %"): 6_000,
    (128, "1 %"): 3_000,
    (128, "1 % cached"): 8_000,
}


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Options of this benchmark alone."""
    parser = argparse.ArgumentParser(prog="ziggurat bench retrieval")
    parser.add_argument("--peers", default="faiss,scann", help=f"of {', '.join(PEERS)}; the last two build for minutes")
    parser.add_argument("--dims", default="64,128", help="widths of the vectors")
    parser.add_argument("--items", type=int, default=0, help="vectors; 0: a million, 50,000 with --quick")
    parser.add_argument(
        "--cells", default="", help="of " + ", ".join(cell.name for cell in CELLS) + "; all unless given"
    )
    parser.add_argument("--resume", action="store_true", help="keep the cells that an interrupted run has measured")
    return parser.parse_args(arguments)


def run(*, quick: bool, options: argparse.Namespace) -> Report:
    """Measure every width in a process of its own."""
    peers = chosen(options.peers, known=PEERS, option="ziggurat bench retrieval --peers")
    all_cells = [cell.name for cell in CELLS]
    cells = chosen(options.cells, known=all_cells, option="ziggurat bench retrieval --cells") or all_cells
    dims = [int(dim) for dim in options.dims.split(",")][: 1 if quick else None]
    results = []
    for dim in dims:
        num = options.items or (50_000 if quick else 1_000_000)
        settings = {"num": num, "dim": dim, "peers": peers, "filters": 8 if quick else 32}
        settings |= {"queries": 64 if quick else 256, "rounds": 3 if quick else 4}
        kept = BUILD / f"retrieval-{hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]}.json"
        results.append(_measure({**settings, "cells": cells, "resume": options.resume, "kept": str(kept)}))
    return report_of(dims, results, options=options)


def report_of(dims: Sequence[int], results: Sequence[dict[str, Any]], *, options: argparse.Namespace) -> Report:
    """The report of what was measured, one result a width."""
    cases, lines, builds = [], [], []
    for dim, result in zip(dims, results, strict=True):
        for cell in result["cells"]:
            for batch in (1, 64):
                cases += _cases(cell, batch)
            lines += _lines(cell)
        builds += [f"| {dim} | {b['name']} | {b['build_s']:.1f} | {b['bytes'] / 1e6:.0f} |" for b in result["builds"]]
    return Report(
        benchmark="retrieval",
        claim=__doc__.splitlines()[0],
        command=_command(options),
        cases=cases,
        tables=[
            "| d | pass | who | setting | recall@100 | QPS, one query a call | QPS, 64 a call |\n"
            "|---:|---|---|---|---:|---:|---:|\n" + "\n".join(lines),
            "| d | who | build, CPU s | MB |\n|---:|---|---:|---:|\n" + "\n".join(builds),
        ],
        extra={
            "cells": [_cell_json(cell, batch) for result in results for cell in result["cells"] for batch in (1, 64)],
            "results": list(results),
            "peer_versions": describe_versions(packages=RETRIEVAL_PACKAGES),
        },
        notes=[
            "largest memory of a run, all contestants, vectors and filters: "
            + ", ".join(
                f"d={dim} {result['peak_bytes'] / 2**30:.1f} GiB" for dim, result in zip(dims, results, strict=True)
            ),
            ", ".join(f"{name} {version}" for name, version in describe_versions(packages=RETRIEVAL_PACKAGES).items()),
            "goals are queries a second of ours on a Zen 4 core: "
            + ", ".join(f"d={dim} {cell}: {goal:,}" for (dim, cell), goal in _GOALS.items()),
        ],
    )


def _command(options: argparse.Namespace) -> str:
    """What reproduces a run."""
    words = ["ziggurat bench retrieval"]
    for name, usual in (("peers", "faiss,scann"), ("dims", "64,128"), ("items", 0), ("cells", "")):
        if (value := getattr(options, name)) != usual:
            words.append(f"--{name} " + (f'"{value}"' if " " in str(value) or value == "" else str(value)))
    return " ".join(words)


def _measure(settings: dict[str, Any]) -> dict[str, Any]:
    if not PEER_PYTHON.exists():
        raise MissingDependencyError(
            expected="the interpreter of the peers, .venv-bench",
            found="none",
            where="benchmarks/retrieval.py",
            ways_out="bash benchmarks/setup.sh (about 2 minutes)",
        )
    say(f"  d={settings['dim']}: {settings['num']:,} vectors")
    command = [str(PEER_PYTHON), "-W", "ignore", "-m", "benchmarks.retrieval_cells", json.dumps(settings)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _best_peer(cell: dict[str, Any], batch: int) -> dict[str, Any] | None:
    able = [entry for entry in cell["entries"][1:] if entry["recall"] >= _RECALL]
    return max(able, key=lambda entry: statistics.median(entry[f"b{batch}"]), default=None)


def _cases(cell: dict[str, Any], batch: int) -> list[Case]:
    ours, peer = cell["entries"][0], _best_peer(cell, batch)
    if peer is None:
        return []
    ratios = [mine / theirs for mine, theirs in zip(ours[f"b{batch}"], peer[f"b{batch}"], strict=True)]
    low, high = percentiles(ratios)
    return [
        Case(
            name=f"d={cell['dim']}, {cell['cell']}, batch {batch}, against {peer['name']}",
            ours=statistics.median(ours[f"b{batch}"]),
            peer=statistics.median(peer[f"b{batch}"]),
            ratio=statistics.median(ratios),
            ratio_p10=low,
            ratio_p90=high,
            ours_name="ziggurat",
            peer_name=peer["name"],
            goal=1.0,
            unit="queries/s",
        )
    ]


def _cell_json(cell: dict[str, Any], batch: int) -> dict[str, Any]:
    """What scripts read: one object a cell."""
    ours, cases = cell["entries"][0], _cases(cell, batch)
    rate, goal = statistics.median(ours[f"b{batch}"]), _GOALS.get((cell["dim"], cell["cell"]), 0)
    return {
        "dim": cell["dim"],
        "filter": cell["cell"],
        "batch": batch,
        "ours_qps": rate,
        "peer_qps": cases[0].peer if cases else None,
        "peer": cases[0].peer_name if cases else None,
        "ratio": cases[0].ratio if cases else None,
        "recall": ours["recall"],
        "goal_qps": goal,
        "goal_met": rate >= goal and ours["recall"] >= _RECALL,
    }


def _lines(cell: dict[str, Any]) -> list[str]:
    lines = []
    for entry in cell["entries"]:
        recall = f"{entry['recall']:.3f}" + ("" if entry["recall"] >= _RECALL else " **below**")
        rates = " | ".join(short(statistics.median(entry[f"b{batch}"])) for batch in (1, 64))
        lines.append(f"| {cell['dim']} | {cell['cell']} | {entry['name']} | {entry['setting']} | {recall} | {rates} |")
    return lines
