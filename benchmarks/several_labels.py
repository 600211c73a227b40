"""Models of several labels on made rows whose true probabilities are known: what sharing gives, and what it costs.

Three worlds of categorical fields.

    related   two labels of one sample: MMoE's made data (Ma et al. 2018, equations 2 to 4) with labels 0/1. Both are a
              sum of sines of a weighted sum of the fields; the weights of the second label are p times those of the
              first and √(1 − p²) times others. The second label is known of a tenth of the rows. p = 0.9 and p = 0.
    selected  clicks, and purchases of those who clicked. Both depend on the fields, and on a product of two of them in
              opposite directions: rows that are clicked are not like rows that are shown.
    domains   one label on four pages, which have 70, 20, 7 and 3 % of the rows. The weights of the fields are drawn
              anew for each page around common ones; both have the same size.

    single         related: a network a label, each on the rows that know it
    shared_bottom  MMoE with one expert
    mmoe, ple      as they are
    learned_weights    mmoe, with weights of labels that are learned (`training/label_weights.py`)
    naive          selected: a network for purchases on clicked rows alone
    left_out       selected: shared bottom of clicks and of purchases, the latter known of clicked rows only
    esmm           selected: the chance of a purchase over that of a click
    a_page         domains: a network a page, each on its rows
    dnn            domains: one network, to which the page is a field
    gates          domains: PEPNet without a domain: gates that read the fields
    pepnet         domains: PEPNet, whose EPNet reads the page

    excess         mean over new rows of KL(true probability, score): log loss above the best reachable, without the
                   noise of drawn labels; of `selected` that of a purchase given a click, on all rows that are shown
    ratio          mean score / mean true probability

All networks have two layers, and the same rates, batch size and rule to stop by validation rows; nothing was tuned.

`ziggurat bench several_labels [--worlds related,selected,domains] [--seeds N]`
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import polars as pl

import ziggurat as zg
from benchmarks.harness import chosen, say
from benchmarks.report import Report, by_round
from ziggurat.features.labels import MissingLabel
from ziggurat.models import ModelConfig
from ziggurat.precision import PLAIN
from ziggurat.studies.compare_statistics import paired_difference
from ziggurat.training.label_weights import LabelWeights

NUM_FIELDS = 8
NUM_IDS = 20
KNOWN_SHARE = 0.1  # of the second label
CORRELATIONS = (0.9, 0.0)
PAGE_SHARES = (0.7, 0.2, 0.07, 0.03)
METRICS = ("excess", "ratio")
HIDDEN = zg.MLPConfig(hidden_dims=(32,))
FIELDS = tuple(f"field{index}" for index in range(NUM_FIELDS))
PAGE = "page"
WIDE = zg.MLPConfig(hidden_dims=(64, 32))


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of the experiment.

    Args:
        rows: of training; there are a quarter as many to validate, and as many new ones.
        epochs: at most.
        seeds: of rows, weights and order.
    """

    rows: int
    epochs: int
    seeds: int


@dataclass(frozen=True, kw_only=True)
class World:
    """Rows of one seed.

    Args:
        train: with labels.
        valid: likewise.
        new: fields alone.
        chances: true probabilities of the new rows, by label; of `selected` a purchase is that given a click.
    """

    train: pl.DataFrame
    valid: pl.DataFrame
    new: pl.DataFrame
    chances: dict[str, np.ndarray]


def related_world(size: Size, *, correlation: float, seed: int) -> World:
    """Make rows with two labels whose weights have this cosine."""
    rng = np.random.default_rng(seed)
    hidden, ids, parts = _fields(size, rng=rng)
    first, other = np.linalg.qr(rng.normal(size=(NUM_FIELDS, 2)))[0].T
    second = correlation * first + np.sqrt(1.0 - correlation**2) * other
    alphas = rng.uniform(0.5, 2.0, 4)
    betas = rng.uniform(0.0, 2.0 * np.pi, 4)
    chances = {}
    for name, weights in (("first", first), ("second", second)):
        sums = 1.5 * hidden @ weights
        chances[name] = _sigmoid(sums + np.sin(alphas[:, None] * sums + betas[:, None]).sum(axis=0) - 1.0)
    frame = _labelled(ids, chances, rng=rng)
    unknown = pl.Series(rng.random(len(frame)) >= KNOWN_SHARE)
    frame = frame.with_columns(second=pl.when(unknown).then(None).otherwise(pl.col("second")))
    return _world(frame, chances, parts)


def selected_world(size: Size, *, seed: int) -> World:
    """Make rows that are shown, some of them clicked, and some of these bought."""
    rng = np.random.default_rng(seed)
    hidden, ids, parts = _fields(size, rng=rng)
    clicked = rng.normal(size=NUM_FIELDS) / np.sqrt(NUM_FIELDS)
    bought = rng.normal(size=NUM_FIELDS) / np.sqrt(NUM_FIELDS)
    both = hidden[:, 0] * hidden[:, 1]
    chances = {
        "click": _sigmoid(hidden @ clicked + 1.2 * both - 2.2),
        "buy": _sigmoid(hidden @ bought - 1.2 * both - 1.0),
    }
    frame = _labelled(ids, chances, rng=rng)
    # A purchase without a click is none, and not an unknown one.
    frame = frame.with_columns(buy=pl.col("click") * pl.col("buy"))
    return _world(frame, chances, parts)


def domain_world(size: Size, *, seed: int) -> World:
    """Make rows of pages on which the same fields mean something else; `page` is a field."""
    rng = np.random.default_rng(seed)
    hidden, ids, parts = _fields(size, rng=rng)
    num_pages = len(PAGE_SHARES)
    common = rng.normal(size=NUM_FIELDS)
    weights = (common + rng.normal(size=(num_pages, NUM_FIELDS))) / np.sqrt(NUM_FIELDS)
    pages = rng.choice(num_pages, len(ids), p=PAGE_SHARES)
    chances = {"click": _sigmoid((hidden * weights[pages]).sum(axis=1) + rng.normal(size=num_pages)[pages] - 1.0)}
    frame = _labelled(ids, chances, rng=rng).with_columns(page=pl.Series(pages))
    return _world(frame, chances, parts, fields=(*FIELDS, PAGE))


def excess_of(chances: np.ndarray, scores: np.ndarray) -> float:
    """Mean Kullback-Leibler divergence of scores from true probabilities."""
    scores = np.clip(scores.astype(np.float64), 1e-9, 1.0 - 1e-9)
    terms = chances * np.log(chances / scores) + (1.0 - chances) * np.log((1.0 - chances) / (1.0 - scores))
    return float(terms.mean())


def trained(
    model: ModelConfig,
    frames: Sequence[pl.DataFrame],
    *,
    labels: Sequence[zg.Label],
    size: Size,
    seed: int,
    fields: Sequence[str] = FIELDS,
    label_weights: LabelWeights = LabelWeights.GIVEN,
):
    """Train a model, and return it."""
    schema = zg.Schema(features=tuple(zg.Categorical(name=name) for name in fields), labels=tuple(labels))
    run = zg.table_run(model, schema)
    training = dataclasses.replace(
        run.training,
        seed=seed,
        threads=1,
        precision=PLAIN,
        epochs=size.epochs,
        learning_rate=2e-3,
        table_learning_rate=0.1,
        early_stop=dataclasses.replace(run.training.early_stop, metric=_loss_of(labels), patience=2),
        loader=dataclasses.replace(run.training.loader, batch_size=256, seed=seed),
    )
    # Pictures of the report would take a third of the time, and nobody looks at them.
    without_report = mock.patch("ziggurat.runs.execute.write_report", lambda folder: folder)
    with tempfile.TemporaryDirectory() as folder, without_report:
        paths = [Path(folder) / name for name in ("train.parquet", "valid.parquet")]
        for frame, path in zip(frames, paths, strict=True):
            frame.write_parquet(path)
        train, valid = map(str, paths)
        split = zg.SplitConfig(by=zg.SplitBy.FILES)
        data = dataclasses.replace(run.data, train=(train,), valid=(valid,), split=split)
        run = dataclasses.replace(run, data=data, training=training, label_weights=label_weights)
        zg.train_run(run, folder=Path(folder) / "run")
        return zg.load_run(Path(folder) / "run")


def related(world: World, *, size: Size, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the scores of new rows by model and label."""
    first = zg.Label(name="first")
    second = zg.Label(name="second", missing=MissingLabel.LEFT_OUT)
    frames = (world.train, world.valid)
    known = [frame.drop_nulls("second") for frame in frames]
    found: dict[str, dict[str, np.ndarray]] = {"single": {}}
    for label, rows in ((first, frames), (second, known)):
        run = trained(zg.DNNConfig(embedding_dim=8, deep=WIDE), rows, labels=(label,), size=size, seed=seed)
        found["single"][label.name] = run.scores(world.new)[:, 0]
    models = {
        "shared_bottom": zg.MMoEConfig(embedding_dim=8, num_experts=1, expert=WIDE, head=HIDDEN),
        "mmoe": zg.MMoEConfig(embedding_dim=8, num_experts=4, expert=HIDDEN, head=HIDDEN),
        "ple": zg.PLEConfig(
            embedding_dim=8, num_levels=1, num_shared_experts=2, num_own_experts=1, expert=HIDDEN, head=HIDDEN
        ),
    }
    models["learned_weights"] = models["mmoe"]
    for name, model in models.items():
        weights = LabelWeights.UNCERTAINTY if name == "learned_weights" else LabelWeights.GIVEN
        run = trained(model, frames, labels=(first, second), size=size, seed=seed, label_weights=weights)
        scores = run.scores(world.new)
        found[name] = {"first": scores[:, 0], "second": scores[:, 1]}
    return found


def selected(world: World, *, size: Size, seed: int) -> dict[str, np.ndarray]:
    """Return what models say of purchases given a click, of new rows, clicked or not."""
    click = zg.Label(name="click")
    buy = zg.Label(name="buy")
    frames = (world.train, world.valid)
    clicked = [frame.filter(pl.col("click") == 1) for frame in frames]
    some = [
        frame.with_columns(buy=pl.when(pl.col("click") == 1).then(pl.col("buy")).otherwise(None)) for frame in frames
    ]
    naive = trained(zg.DNNConfig(embedding_dim=8, deep=WIDE), clicked, labels=(buy,), size=size, seed=seed)
    shared = trained(
        zg.MMoEConfig(embedding_dim=8, num_experts=1, expert=WIDE, head=HIDDEN),
        some,
        labels=(click, dataclasses.replace(buy, missing=MissingLabel.LEFT_OUT)),
        size=size,
        seed=seed,
    )
    esmm = trained(zg.ESMMConfig(embedding_dim=8, deep=WIDE), frames, labels=(click, buy), size=size, seed=seed)
    of_both = esmm.scores(world.new)
    return {
        "naive": naive.scores(world.new)[:, 0],
        "left_out": shared.scores(world.new)[:, 1],
        "esmm": of_both[:, 1] / of_both[:, 0],
    }


def on_pages(world: World, *, size: Size, seed: int) -> dict[str, np.ndarray]:
    """Return what models say of new rows of all pages."""
    frames = (world.train, world.valid)
    click = (zg.Label(name="click"),)
    pages = world.new[PAGE].to_numpy()
    own = np.zeros(len(pages))
    for page in range(len(PAGE_SHARES)):
        rows = [frame.filter(pl.col(PAGE) == page) for frame in frames]
        network = trained(zg.DNNConfig(embedding_dim=8, deep=WIDE), rows, labels=click, size=size, seed=seed)
        own[pages == page] = network.scores(world.new.filter(pl.col(PAGE) == page).select(FIELDS))[:, 0]
    found = {"a_page": own}
    models = {
        "dnn": zg.DNNConfig(embedding_dim=8, deep=WIDE),
        "gates": zg.PEPNetConfig(embedding_dim=8, deep=WIDE, gate_dim=16),
        "pepnet": zg.PEPNetConfig(embedding_dim=8, deep=WIDE, gate_dim=16, domain=(PAGE,)),
    }
    for name, model in models.items():
        one = trained(model, frames, labels=click, size=size, seed=seed, fields=(*FIELDS, PAGE))
        found[name] = one.scores(world.new)[:, 0]
    return found


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read `--worlds` and `--seeds`."""
    parser = argparse.ArgumentParser(prog="ziggurat bench several_labels")
    parser.add_argument("--worlds", default=",".join(WORLDS), help="out of these (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="of rows, weights and order (default: %(default)s)")
    return parser.parse_args(arguments)


def run(*, quick: bool = False, options: argparse.Namespace | None = None) -> Report:
    """Train every model on every world and seed."""
    options = options or parse_options([])
    worlds = chosen(options.worlds, known=tuple(WORLDS), option="ziggurat bench several_labels --worlds")
    size = Size(rows=12_000, epochs=6, seeds=options.seeds)
    if quick:
        size = Size(rows=1_500, epochs=2, seeds=2)
    is_whole = options == parse_options([])
    report = Report(
        benchmark="several_labels" if is_whole else "_".join(["several_labels", *worlds]),
        claim=f"Models of several labels on {size.rows:,} made rows, {size.seeds} seeds: log loss above the best "
        "reachable on as many new rows, against a model a label, a model of clicked rows, and one network for pages.",
        command="ziggurat bench several_labels"
        + ("" if is_whole else f" --worlds {','.join(worlds)} --seeds {size.seeds}"),
    )
    for world in worlds:
        WORLDS[world](report, size)
    return report


def add_related(report: Report, size: Size) -> None:
    """Compare models of two labels that agree more or less."""
    for correlation in CORRELATIONS:
        found: dict[str, dict[str, list[float]]] = {}
        for seed in range(size.seeds):
            world = related_world(size, correlation=correlation, seed=seed)
            for name, by_label in related(world, size=size, seed=seed).items():
                for label, scores in by_label.items():
                    _note(found, f"{name}, {label} label", world.chances[label], scores)
            _show(f"related, cosine {correlation}, seed {seed}", found)
        _add(report, f"related, cosine {correlation}", found, peers={f"single, {each} label" for each in _LABELS})


def add_selected(report: Report, size: Size) -> None:
    """Compare models of purchases of those who clicked, on all who are shown."""
    of_selected: dict[str, dict[str, list[float]]] = {}
    for seed in range(size.seeds):
        world = selected_world(size, seed=seed)
        for name, scores in selected(world, size=size, seed=seed).items():
            _note(of_selected, name, world.chances["buy"], scores)
        _show(f"selected, seed {seed}", of_selected)
    _add(report, "selected", of_selected, peers={"naive"})


def add_pages(report: Report, size: Size) -> None:
    """Compare models of several pages, on all of them and on the rare ones."""
    of_all: dict[str, dict[str, list[float]]] = {}
    of_rare: dict[str, dict[str, list[float]]] = {}
    for seed in range(size.seeds):
        world = domain_world(size, seed=seed)
        is_rare = world.new[PAGE].to_numpy() >= 2
        for name, scores in on_pages(world, size=size, seed=seed).items():
            _note(of_all, name, world.chances["click"], scores)
            _note(of_rare, name, world.chances["click"][is_rare], scores[is_rare])
        _show(f"domains, seed {seed}", of_all)
    _add(report, "domains, all rows", of_all, peers={"dnn"})
    _add(report, "domains, the two rare pages", of_rare, peers={"dnn"})


WORLDS: dict[str, Callable[[Report, Size], None]] = {
    "related": add_related,
    "selected": add_selected,
    "domains": add_pages,
}
_LABELS = ("first", "second")


def _fields(size: Size, *, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Draw ids, and the hidden number of each; return both as (rows, fields), and where parts of the rows end."""
    num_rows = 2 * size.rows + size.rows // 4
    ids = rng.integers(0, NUM_IDS, (num_rows, NUM_FIELDS))
    hidden = rng.normal(size=(NUM_FIELDS, NUM_IDS))
    return hidden[np.arange(NUM_FIELDS), ids], ids, (size.rows, size.rows + size.rows // 4)


def _labelled(ids: np.ndarray, chances: dict[str, np.ndarray], *, rng: np.random.Generator) -> pl.DataFrame:
    drawn = {name: (rng.random(len(ids)) < chance).astype(np.int64) for name, chance in chances.items()}
    return pl.DataFrame({name: ids[:, index] for index, name in enumerate(FIELDS)} | drawn)


def _world(
    frame: pl.DataFrame, chances: dict[str, np.ndarray], parts: tuple[int, int], fields: Sequence[str] = FIELDS
) -> World:
    begin, end = parts
    return World(
        train=frame[:begin],
        valid=frame[begin:end],
        new=frame[end:].select(fields),
        chances={name: chance[end:] for name, chance in chances.items()},
    )


def _note(found: dict[str, dict[str, list[float]]], name: str, chances: np.ndarray, scores: np.ndarray) -> None:
    metrics = found.setdefault(name, {metric: [] for metric in METRICS})
    metrics["excess"].append(excess_of(chances, scores))
    metrics["ratio"].append(float(scores.mean() / chances.mean()))


def _show(title: str, found: dict[str, dict[str, list[float]]]) -> None:
    say(f"{title}: " + "; ".join(f"{name} {metrics['excess'][-1]:.4f}" for name, metrics in found.items()))


def _add(report: Report, world: str, found: dict[str, dict[str, list[float]]], *, peers: set[str]) -> None:
    """Add a table of a world, and each model beside its peer, in pairs by seed."""
    lines = [f"**{world}**, means over seeds ± deviation:", "", "| | excess log loss | mean score / truth |"]
    lines.append("|---|---:|---:|")
    for name, metrics in found.items():
        cells = [f"{statistics.mean(values):.4f} ± {_spread(values):.4f}" for values in metrics.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    report.tables.append("\n".join(lines))
    for name, metrics in found.items():
        peer = next(each for each in peers if each.partition(",")[2] == name.partition(",")[2])
        if name == peer:
            continue
        case = f"{world}: {name}"
        theirs = found[peer]["excess"]
        report.cases.append(by_round(case, ours=(name, metrics["excess"]), peer=(peer, theirs), unit="excess"))
        difference = paired_difference(metrics["excess"], theirs)
        report.notes.append(f"{case}: {difference.mean:+.5f} ± {difference.sd:.5f}, p = {difference.t_p:.4f}")


def _loss_of(labels: Sequence[zg.Label]) -> str:
    """Return the metric to stop by: the loss of the last label, which is the rare one."""
    return "log_loss" if len(labels) == 1 else f"log_loss/{labels[-1].name}"


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
