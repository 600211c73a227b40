"""How fast epochs of MovieLens-1M are: ours, RecTools and padded torch, in turns, one core each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import RECTOOLS, Entry, Measured, RoundsConfig, measure
from benchmarks.report import Case, compare
from ziggurat.data.datasets import fetch

USERS = 128  # of a step
GOAL = 3.0
_NAME = "benchmarks.next_item"


@contextmanager
def training_events() -> Iterator[Path]:
    """A file with all events but each user's last two, in the order of time: what every contestant trains on."""
    log = pl.read_parquet(fetch("movielens-1m-events"), columns=["user_id", "movie_id", "timestamp"])
    log = log.sort(["user_id", "timestamp"], maintain_order=True)
    log = log.filter(pl.int_range(pl.len()).over("user_id") < pl.len().over("user_id") - 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.npz"
        items = log["movie_id"].cast(pl.Categorical).to_physical().to_numpy()
        np.savez(path, users=log["user_id"].to_numpy(), items=items, times=log["timestamp"].to_numpy())
        yield path


def entries(events: Path) -> list[Entry]:
    """The contestants, by what they train."""
    found = []
    for model in ("hstu", "sasrec"):
        own = {"samples_per_step": USERS, "group": f"ml1m_{model}"}
        ours, theirs = {"recipe": f"movielens_{model}", "batch_size": USERS}, {"events": str(events), "model": model}
        found.append(Entry(name=f"ours_{model}", module=f"{_NAME}.our_epochs", settings=ours, **own))
        module = f"{_NAME}.rectools_epochs"
        found.append(Entry(name=f"rectools_{model}", module=module, settings=theirs, venv=RECTOOLS, **own))
    padded = {"samples_per_step": USERS, "group": "ml1m_hstu"}
    found.append(Entry(name="padded_hstu", module=f"{_NAME}.padded_hstu", **padded))
    return found


def speed(*, quick: bool) -> tuple[list[Case], list[Measured]]:
    """The cases of speed, and what each contestant did."""
    rounds = RoundsConfig(rounds=2 if quick else 5, turn_s=1.0 if quick else 4.0, warmup_s=1.0, threads=1)
    with training_events() as events:
        results = measure(entries(events), rounds)
    cases = [
        compare(f"ml1m_{model}_speed_rectools", results, ours=f"ours_{model}", peer=f"rectools_{model}", goal=GOAL)
        for model in ("hstu", "sasrec")
    ]
    cases.append(compare("ml1m_hstu_speed_padded", results, ours="ours_hstu", peer="padded_hstu", goal=GOAL))
    return cases, list(results.values())


def others() -> str:
    """How many processes wanted the cores when the contest began: figures of a busy machine are called so."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores when the contest of speed began"
