"""Small tables to judge a first model by: twelve that are made, whose truth is known, and two that are published.

Each made table asks one question of a default: are pairs of ids found at all, is a sum of weights left alone where it
is the truth, do numbers, rare positives, many columns of noise, unknown users or labels that are numbers break it?

    logit = main effects of ids and numbers + strength · ⟨taste of the user, character of the item⟩

The table `taste` is 40,000 rows of five features with 300 users and 100 items of rank 3.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from ziggurat.features.schema import Categorical, Dense, Feature, Label, MultiHot, NumericTransform, Schema, Task

_CRITEO_ROWS = 10_000
_STANDARD = NumericTransform.STANDARDISE


@dataclass(frozen=True, kw_only=True)
class SmallSet:
    """A table with its schema.

    Args:
        frame: of raw rows.
        schema: what the columns mean.
        attainable: AUC of the true probabilities (RMSE of the true means for a number) over all rows; NaN where nobody
            knows the truth.
    """

    frame: pl.DataFrame
    schema: Schema
    attainable: float = float("nan")


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))


def _popular(draw: np.random.Generator, num_ids: int, *, size: int, power: float = 0.8) -> NDArray[np.int64]:
    """Ids whose frequency falls by a power of their rank."""
    share = np.arange(1, num_ids + 1, dtype=np.float64) ** -power
    return draw.choice(num_ids, size=size, p=share / share.sum())


def _taste(
    draw: np.random.Generator, users: NDArray[np.int64], items: NDArray[np.int64], *, rank: int
) -> NDArray[np.float64]:
    """Inner products of random vectors of users and items, of variance 1."""
    of_users = draw.normal(size=(users.max() + 1, rank))
    of_items = draw.normal(size=(items.max() + 1, rank))
    return (of_users[users] * of_items[items]).sum(axis=1) / np.sqrt(rank)


def _effects(draw: np.random.Generator, ids: NDArray[np.int64], *, sd: float) -> NDArray[np.float64]:
    """One normal effect an id."""
    return draw.normal(scale=sd, size=ids.max() + 1)[ids]


def _clicks(draw: np.random.Generator, logits: NDArray[np.float64]) -> tuple[NDArray[np.int64], float]:
    """Labels drawn by logits, and the AUC of the true probabilities."""
    from sklearn.metrics import roc_auc_score

    probabilities = _sigmoid(logits)
    labels = (draw.random(len(logits)) < probabilities).astype(np.int64)
    return labels, float(roc_auc_score(labels, probabilities))


def _set(
    columns: dict[str, NDArray], features: tuple[Feature, ...], *, labels: NDArray, attainable: float, time: str = ""
) -> SmallSet:
    is_number = labels.dtype.kind == "f"
    label = Label(name="label", task=Task.REGRESSION if is_number else Task.BINARY)
    frame = pl.DataFrame({**columns, "label": labels})
    return SmallSet(frame=frame, schema=Schema(features=features, labels=(label,), time=time), attainable=attainable)


_SHOP = (
    Categorical(name="user"),
    Categorical(name="item"),
    Categorical(name="hour"),
    Categorical(name="device"),
    Dense(name="price"),
)


def _shop_columns(draw: np.random.Generator, *, rows: int, users: int, items: int) -> dict[str, NDArray]:
    return {
        "user": draw.integers(users, size=rows),
        "item": draw.integers(items, size=rows),
        "hour": draw.integers(24, size=rows),
        "device": draw.integers(4, size=rows),
        "price": np.round(np.exp(draw.normal(3.0, 1.0, size=rows)), 2),
    }


def _shop_effects(draw: np.random.Generator, columns: dict[str, NDArray]) -> NDArray[np.float64]:
    """Main effects of a shop's columns."""
    return (
        _effects(draw, columns["user"], sd=0.45)
        + _effects(draw, columns["item"], sd=0.45)
        + 0.3 * np.sin(columns["hour"] / 24 * 2 * np.pi)
        + _effects(draw, columns["device"], sd=0.2)
        - 0.25 * (np.log(columns["price"]) - 3.0)
    )


def taste(seed: int = 0) -> SmallSet:
    """40,000 rows; 300 users and 100 items of rank 3, hour, device, price."""
    draw = np.random.default_rng(seed)
    columns = _shop_columns(draw, rows=40_000, users=300, items=100)
    logits = 1.35 * _shop_effects(draw, columns) - 0.5 + 1.25 * _taste(draw, columns["user"], columns["item"], rank=3)
    labels, attainable = _clicks(draw, logits)
    return _set(columns, _SHOP, labels=labels, attainable=attainable)


def taste_of_many(seed: int = 1) -> SmallSet:
    """60,000 rows; 2,000 users and 600 popular items of rank 2: about 30 rows a user."""
    draw = np.random.default_rng(seed)
    columns = _shop_columns(draw, rows=60_000, users=2_000, items=600)
    columns["item"] = _popular(draw, 600, size=60_000)
    logits = _shop_effects(draw, columns) - 0.5 + 1.25 * _taste(draw, columns["user"], columns["item"], rank=2)
    labels, attainable = _clicks(draw, logits)
    return _set(columns, _SHOP, labels=labels, attainable=attainable)


def sums(seed: int = 2) -> SmallSet:
    """20,000 rows; a sum of weights is the truth, so whatever a model adds to it is noise."""
    draw = np.random.default_rng(seed)
    columns = _shop_columns(draw, rows=20_000, users=500, items=200)
    logits = 1.6 * _shop_effects(draw, columns) - 0.5
    labels, attainable = _clicks(draw, logits)
    return _set(columns, _SHOP, labels=labels, attainable=attainable)


def numbers(seed: int = 3) -> SmallSet:
    """30,000 rows; eight numbers with thresholds, products and a square."""
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(30_000, 8))
    logits = (
        1.5 * (values[:, 0] > 0.5)
        + values[:, 1] * values[:, 2]
        - 0.8 * np.abs(values[:, 3])
        + 0.5 * values[:, 4]
        + 0.7 * (values[:, 5] ** 2 - 1)
    )
    labels, attainable = _clicks(draw, logits)
    columns: dict[str, NDArray] = {f"number_{index}": values[:, index] for index in range(8)}
    features = tuple(Dense(name=name, transform=_STANDARD) for name in columns)
    return _set(columns, features, labels=labels, attainable=attainable)


def rare(seed: int = 4) -> SmallSet:
    """80,000 rows of which 2 % are positives; main effects and a taste."""
    draw = np.random.default_rng(seed)
    columns = _shop_columns(draw, rows=80_000, users=300, items=100)
    logits = _shop_effects(draw, columns) - 4.9 + 1.25 * _taste(draw, columns["user"], columns["item"], rank=3)
    labels, attainable = _clicks(draw, logits)
    return _set(columns, _SHOP, labels=labels, attainable=attainable)


def lists(seed: int = 5) -> SmallSet:
    """30,000 rows; segments of users like genres, of which an item has one to three."""
    draw = np.random.default_rng(seed)
    rows, genres, segments = 30_000, 12, 8
    of_items = [np.sort(draw.choice(genres, size=draw.integers(1, 4), replace=False)).tolist() for _ in range(400)]
    items = draw.integers(400, size=rows)
    segment = draw.integers(segments, size=rows)
    liking = draw.normal(scale=1.5, size=(segments, genres))
    match = np.array([liking[s, of_items[i]].mean() for s, i in zip(segment, items, strict=True)])
    labels, attainable = _clicks(draw, match + _effects(draw, items, sd=0.4) - 0.3)
    columns = {
        "segment": segment,
        "item": items,
        "genres": pl.Series([[f"g{g}" for g in of_items[i]] for i in items]),
        "age": draw.integers(18, 70, size=rows).astype(np.float64),
    }
    features = (Categorical(name="segment"), Categorical(name="item"), MultiHot(name="genres"), Dense(name="age"))
    return _set(columns, features, labels=labels, attainable=attainable)


def new_users(seed: int = 6) -> SmallSet:
    """50,000 rows in time; nine of ten users of the last rows occur nowhere before."""
    draw = np.random.default_rng(seed)
    rows = 50_000
    time = np.sort(draw.integers(0, 10**7, size=rows))
    users = (time / 10**7 * 900).astype(np.int64) + draw.integers(0, 60, size=rows)
    columns: dict[str, NDArray] = {
        "user": users,
        "item": _popular(draw, 500, size=rows),
        "country": draw.integers(12, size=rows),
        "age": draw.integers(18, 70, size=rows).astype(np.float64),
        "time": time + 978_300_000,
    }
    logits = (
        _effects(draw, users, sd=0.7)
        + _effects(draw, columns["item"], sd=0.7)
        + _effects(draw, columns["country"], sd=0.3)
        + _taste(draw, users, columns["item"], rank=3)
        - 0.02 * (columns["age"] - 40)
    )
    labels, attainable = _clicks(draw, logits)
    features = (Categorical(name="user"), Categorical(name="item"), Categorical(name="country"), Dense(name="age"))
    return _set(columns, features, labels=labels, attainable=attainable, time="time")


def tiny(seed: int = 7) -> SmallSet:
    """3,000 rows; four small ids, two numbers, one pair that matters."""
    draw = np.random.default_rng(seed)
    rows = 3_000
    columns: dict[str, NDArray] = {f"id_{index}": draw.integers(6, size=rows) for index in range(4)}
    columns |= {"x": draw.normal(size=rows), "y": draw.normal(size=rows)}
    pair = draw.normal(size=(6, 6))[columns["id_0"], columns["id_1"]]
    logits = pair + _effects(draw, columns["id_2"], sd=0.5) + 0.6 * columns["x"] - 0.2
    labels, attainable = _clicks(draw, logits)
    ids = tuple(Categorical(name=f"id_{index}") for index in range(4))
    dense = (Dense(name="x", transform=_STANDARD), Dense(name="y", transform=_STANDARD))
    return _set(columns, (*ids, *dense), labels=labels, attainable=attainable)


def pairs_alone(seed: int = 8) -> SmallSet:
    """20,000 rows; three ids of ten values whose pairs matter, and which mean nothing by themselves."""
    draw = np.random.default_rng(seed)
    rows = 20_000
    columns = {f"id_{index}": draw.integers(10, size=rows) for index in range(5)}
    logits = np.zeros(rows)
    for one, other in ((0, 1), (1, 2)):
        table = draw.normal(scale=1.2, size=(10, 10))
        table -= table.mean(axis=0, keepdims=True)
        table -= table.mean(axis=1, keepdims=True)
        logits += table[columns[f"id_{one}"], columns[f"id_{other}"]]
    labels, attainable = _clicks(draw, logits)
    features = tuple(Categorical(name=name) for name in columns)
    return _set(columns, features, labels=labels, attainable=attainable)


def noise(seed: int = 9) -> SmallSet:
    """20,000 rows of 25 columns, of which four matter."""
    draw = np.random.default_rng(seed)
    rows = 20_000
    columns: dict[str, NDArray] = {f"id_{index}": draw.integers(40, size=rows) for index in range(15)}
    columns |= {f"number_{index}": draw.normal(size=rows) for index in range(10)}
    logits = (
        _effects(draw, columns["id_0"], sd=0.8)
        + _effects(draw, columns["id_1"], sd=0.6)
        + 0.5 * columns["number_0"]
        + 0.5 * columns["number_0"] * columns["number_1"]
    )
    labels, attainable = _clicks(draw, logits)
    ids = tuple(Categorical(name=f"id_{index}") for index in range(15))
    dense = tuple(Dense(name=f"number_{index}", transform=_STANDARD) for index in range(10))
    return _set(columns, (*ids, *dense), labels=labels, attainable=attainable)


def stars(seed: int = 10) -> SmallSet:
    """40,000 ratings of 1 to 5 by taste: a label that is a number."""
    draw = np.random.default_rng(seed)
    columns = _shop_columns(draw, rows=40_000, users=300, items=100)
    means = 3.4 + 0.5 * (_shop_effects(draw, columns) + _taste(draw, columns["user"], columns["item"], rank=3))
    labels = np.clip(np.round(means + draw.normal(scale=0.6, size=40_000)), 1, 5)
    attainable = float(np.sqrt(((labels - means) ** 2).mean()))
    return _set(columns, _SHOP, labels=labels, attainable=attainable)


def dwell(seed: int = 11) -> SmallSet:
    """40,000 times in milliseconds, about 40,000 ± 12,800: a label that is a large number."""
    draw = np.random.default_rng(seed)
    columns = _shop_columns(draw, rows=40_000, users=300, items=100)
    signal = _shop_effects(draw, columns) + _taste(draw, columns["user"], columns["item"], rank=3)
    means = 40_000.0 + 9_000.0 * signal
    labels = np.round(means + draw.normal(scale=6_000.0, size=40_000))
    attainable = float(np.sqrt(((labels - means) ** 2).mean()))
    return _set(columns, _SHOP, labels=labels, attainable=attainable)


MADE: dict[str, Callable[[], SmallSet]] = {
    made.__name__: made
    for made in (
        taste,
        taste_of_many,
        sums,
        numbers,
        rare,
        lists,
        new_users,
        tiny,
        pairs_alone,
        noise,
        stars,
        dwell,
    )
}


def criteo_sample(folder: Path) -> SmallSet:
    """The first 10,000 rows of Criteo Kaggle's training file."""
    names = ["label", *(f"I{index}" for index in range(1, 14)), *(f"C{index}" for index in range(1, 27))]
    with gzip.open(folder / "criteo_first10k.tsv.gz") as file:
        frame = pl.read_csv(
            file.read(),
            separator="\t",
            has_header=False,
            new_columns=names,
            schema_overrides={f"column_{index}": pl.String for index in range(15, 41)},
        )
    features = (
        *(Dense(name=f"I{index}") for index in range(1, 14)),
        *(Categorical(name=f"C{index}") for index in range(1, 27)),
    )
    return SmallSet(frame=frame.head(_CRITEO_ROWS), schema=Schema(features=features, labels=(Label(name="label"),)))


def frappe_sample(folder: Path) -> SmallSet:
    """Frappe's published validation file as a table of its own: 57,722 rows, ten ids."""
    lines = gzip.decompress((folder / "frappe.validation.libfm.gz").read_bytes()).decode().splitlines()
    rows = [line.split() for line in lines]
    columns: dict[str, list[int]] = {"label": [int(float(row[0]) > 0) for row in rows]}
    for field in range(10):
        columns[f"field_{field}"] = [int(row[1 + field].partition(":")[0]) for row in rows]
    frame = pl.DataFrame(columns)
    features = tuple(Categorical(name=f"field_{field}") for field in range(10))
    return SmallSet(frame=frame, schema=Schema(features=features, labels=(Label(name="label"),)))


PUBLISHED: dict[str, tuple[str, Callable[[Path], SmallSet]]] = {
    "criteo_sample": ("criteo_sample", criteo_sample),
    "frappe_sample": ("frappe", frappe_sample),
}
