"""Online logistic regression of river and of Vowpal Wabbit on the windows of a stream: each is a test, then trained.

    python -m benchmarks.online_peers river ROWS.parquet '{"ids": […], "lists": […], "numbers": […], …}'

Prints a line of JSON: rows, seconds inside of scoring and learning, and the normalised entropy of each window. Rows
come as Python dictionaries (river) or lines of text (Vowpal Wabbit), which is how both take them; making these is part
of their time, as encoding is of ours. Both see each row once, in order of time, and score a whole window by what they
had learned before it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import polars as pl


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of the rows.

    Args:
        ids: categorical columns.
        lists: columns of lists of ids.
        numbers: columns of numbers.
        label: the column of the label.
        positive_from: the least value of a positive label.
        time: seconds since 1970.
        by: day or month.
        begin: windows before it are one, the history: YYYY-MM or nothing.
    """

    ids: tuple[str, ...]
    lists: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    label: str
    positive_from: float = 1.0
    time: str
    by: str
    begin: str = ""


def windows_of(path: str, columns: Columns) -> Iterator[tuple[str, pl.DataFrame]]:
    """Rows by window, in order of time within the history and within each later window."""
    moment = pl.from_epoch(columns.time, time_unit="s")
    name = moment.dt.strftime("%Y-%m-%d" if columns.by == "day" else "%Y-%m")
    if columns.begin:
        name = pl.when(name < columns.begin).then(pl.lit(f"before {columns.begin}")).otherwise(name)
    frame = pl.read_parquet(path).with_columns(window=name).sort(columns.time, maintain_order=True)
    for key, rows in frame.group_by("window", maintain_order=True):
        yield str(key[0]), rows


def as_dicts(rows: pl.DataFrame, columns: Columns) -> list[dict[str, float]]:
    """One-hot features of rows by name."""
    found: list[dict[str, float]] = []
    for row in rows.iter_rows(named=True):
        features: dict[str, float] = {f"{name}={row[name]}": 1.0 for name in columns.ids}
        for name in columns.lists:
            features |= {f"{name}={value}": 1.0 for value in row[name]}
        features |= {name: row[name] for name in columns.numbers}
        found.append(features)
    return found


def as_lines(rows: pl.DataFrame, columns: Columns) -> list[str]:
    """Features of rows as Vowpal Wabbit's text."""
    found: list[str] = []
    for row in rows.iter_rows(named=True):
        parts = [f"{name}={row[name]}" for name in columns.ids]
        for name in columns.lists:
            parts += [f"{name}={value}" for value in row[name]]
        parts += [f"{name}:{row[name]}" for name in columns.numbers]
        found.append("|f " + " ".join(part.replace(" ", "_").replace("|", "_") for part in parts))
    return found


class River:
    """river's logistic regression by Adagrad at the rate 0.1; no other one was tried."""

    def __init__(self) -> None:
        from river import linear_model, optim

        self.model = linear_model.LogisticRegression(optimizer=optim.AdaGrad(0.1))
        self.rows = as_dicts

    def score(self, row: Any) -> float:
        """The probability of a row."""
        return float(self.model.predict_proba_one(row)[True])

    def learn(self, row: Any, label: bool) -> None:
        """Take in a row."""
        self.model.learn_one(row, label)


class VowpalWabbit:
    """Vowpal Wabbit's logistic regression, with its default rate, which is adaptive and normalised."""

    def __init__(self) -> None:
        from vowpalwabbit import Workspace

        self.model = Workspace("--loss_function logistic --link logistic -b 20 --quiet")
        self.rows = as_lines

    def score(self, row: Any) -> float:
        """The probability of a row."""
        return float(self.model.predict(row))

    def learn(self, row: Any, label: bool) -> None:
        """Take in a row."""
        self.model.learn(f"{1 if label else -1} {row}")


PEERS: dict[str, Callable[[], River | VowpalWabbit]] = {"river": River, "vowpalwabbit": VowpalWabbit}


def entropy_of(scores: list[float], labels: list[bool]) -> float:
    """Log loss over that of always saying the share of positives."""
    share = sum(labels) / len(labels)
    if share in (0.0, 1.0):
        return math.nan
    bounded = [min(max(score, 1e-7), 1 - 1e-7) for score in scores]
    pairs = zip(bounded, labels, strict=True)
    loss = -sum(math.log(score if label else 1 - score) for score, label in pairs) / len(labels)
    return loss / -(share * math.log(share) + (1 - share) * math.log(1 - share))


def main(name: str, path: str, settings: str) -> None:
    """Stream the rows, and print what came of it."""
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(settings).items()
    }
    columns = Columns(**given)
    peer = PEERS[name]()
    seconds = 0.0
    num_rows = 0
    found: dict[str, float] = {}
    for number, (window, frame) in enumerate(windows_of(path, columns)):
        labels = (frame[columns.label] >= columns.positive_from).to_list()
        begin = time.perf_counter()
        rows = peer.rows(frame, columns)
        scores = [peer.score(row) for row in rows] if number else []
        for row, label in zip(rows, labels, strict=True):
            peer.learn(row, label)
        seconds += time.perf_counter() - begin
        num_rows += len(rows)
        if number:
            found[window] = entropy_of(scores, labels)
    print(json.dumps({"rows": num_rows, "seconds": seconds, "ne": found}))


if __name__ == "__main__":
    main(*sys.argv[1:4])
