"""A stream whose users come and go: a growing table against a fixed hash in the same memory, and a row for every user.

The teacher gives each user a vector w of 16 numbers; a sample is a user and a context x, and a click with probability
σ(w·x). Users are drawn by Zipf 1.05 from a window of ids that slides, so that a user is frequent for a while and never
comes again. Each contestant learns a table of 16 columns by row-wise Adagrad, and is judged on each batch before it
learns from it, over the second half of the stream. All bytes count: 68 a row, and 19.9 more where the table grows.

Collisions: look-ups of the hash whose row another user of the same window last trained.

Two more cases are of the map alone. A stream of 10⁸ ids, drawn by Zipf 1.05 from 10⁹ that slide, goes through a table
of 10⁶ rows: every answer is held to a list of who has which row, kept apart from the map, and the memory of the process
to what it was in the beginning. And the rates at which one core finds and counts ids of a table that knows all 10⁷.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import say
from benchmarks.report import Case, Report
from ziggurat.features.growing import Counting, Evict, Growing
from ziggurat.features.hashing import GOLDEN, mix
from ziggurat.ops.growing.growing_ids import GrowingIds
from ziggurat.training.metrics.functions import auc

DIM, BATCH, ROW_BYTES, ID_BYTES = 16, 4096, 4 * 16 + 4, 19.9


@dataclass
class Table:
    """A table of users and how it learns; the last row is that of unknown users."""

    weight: np.ndarray
    sums: np.ndarray

    @staticmethod
    def of(num_rows: int) -> Table:
        """Zeros: a user of whom nothing is known clicks half of the time."""
        return Table(np.zeros((num_rows + 1, DIM)), np.zeros(num_rows + 1))

    def step(self, rows: np.ndarray, contexts: np.ndarray, clicks: np.ndarray) -> np.ndarray:
        """Scores of a batch, which is then learned."""
        logits = (self.weight[rows] * contexts).sum(axis=1)
        errors = 1 / (1 + np.exp(-logits)) - clicks
        distinct, inverse = np.unique(rows, return_inverse=True)
        gradients = np.zeros((len(distinct), DIM))
        np.add.at(gradients, inverse, errors[:, None] * contexts)
        self.sums[distinct] += (gradients**2).mean(axis=1)
        self.weight[distinct] -= 0.3 * gradients / np.sqrt(self.sums[distinct] + 1e-8)[:, None]
        return logits


def stream(seed: int, *, num_batches: int, window: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Batches of users, contexts and clicks."""
    rng, batches = np.random.default_rng(seed), []
    shares = np.cumsum(np.arange(1, window + 1) ** -1.05)
    key = mix(np.array([seed + 1], dtype=np.uint64) * GOLDEN)
    for number in range(num_batches):
        ranks = np.searchsorted(shares, rng.random(BATCH) * shares[-1]).astype(np.uint64)
        slot = mix(ranks * GOLDEN + key)  # each place of the window renews its user at a time of its own
        age = (np.uint64(number) + slot % np.uint64(100)) // np.uint64(100)
        users = mix(slot + age * GOLDEN)
        words = mix(users[:, None] + np.arange(1, DIM + 1, dtype=np.uint64) * GOLDEN)
        teacher = 2 * (words >> np.uint64(11)) * 2.0**-53 - 1
        contexts = rng.normal(size=(BATCH, DIM))
        clicks = rng.random(BATCH) < 1 / (1 + np.exp(-(teacher * contexts).sum(axis=1)))
        batches.append((users, contexts, clicks.astype(float)))
    return batches


def judged(seed: int, *, num_batches: int, window: int, num_ids: int) -> dict[str, float]:
    """AUC of each contestant on one stream, and collisions."""
    batches, found = stream(seed, num_batches=num_batches, window=window), {}
    num_hashed = int(num_ids * (ROW_BYTES + ID_BYTES) / ROW_BYTES)
    everyone = np.unique(np.concatenate([users for users, _, _ in batches]))
    owner, collided = np.zeros(num_hashed, np.uint64), 0
    for name in ("growing", "growing_twice", "hash", "all"):
        grown = GrowingIds(Growing(num_ids=num_ids, admit_after=2 if name == "growing_twice" else 1))
        table = Table.of({"hash": num_hashed, "all": len(everyone)}.get(name, num_ids))
        scores, labels = [], []
        for number, (users, contexts, clicks) in enumerate(batches):
            if name == "hash":
                rows = (users % np.uint64(num_hashed)).astype(np.int64)
                collided += int(np.count_nonzero((owner[rows] != users) & (owner[rows] != 0)))
                owner[rows] = users
            elif name == "all":
                rows = np.searchsorted(everyone, users)
            else:
                admission = grown.step(users, step=number + 1)
                table.weight[admission.new_rows], table.sums[admission.new_rows] = 0.0, 0.0
                rows = np.where(admission.rows < 0, num_ids, admission.rows)
            logits = table.step(rows, contexts, clicks)
            if 2 * number >= num_batches:
                scores.append(logits)
                labels.append(clicks)
        found[name] = auc(np.concatenate(scores), np.concatenate(labels))
    return found | {"collisions": collided / (num_batches * BATCH), "users": float(len(everyone))}


def zipf_ids(rng: np.random.Generator, number: int, *, size: int) -> np.ndarray:
    """Ids of a batch: ranks by Zipf 1.05 among 10⁹, of which the places slide, as hashes of 64 bits."""
    ranks = (1 - rng.random(size) * (1 - 1e9**-0.05)) ** -20.0  # inverse of the distribution, as if it were continuous
    ranks = np.minimum(ranks, 1e9).astype(np.uint64)
    slot = mix(ranks * GOLDEN)
    return mix(slot + (np.uint64(number) + slot % np.uint64(100)) // np.uint64(100) * GOLDEN)


def streamed(growing: Growing, *, num_streamed: int, batch: int = 65_536) -> dict[str, float]:
    """A stream through one table, every answer held to an own list of who has which row.

    Args:
        growing: of the table.
        num_streamed: ids.
        batch: ids of a step.
    """
    rng, grown = np.random.default_rng(1), GrowingIds(growing)
    owner, owned = np.zeros(growing.num_ids, np.uint64), np.zeros(growing.num_ids, bool)
    wrong, seconds, first_bytes = 0, 0.0, 0
    for number in range(-(-num_streamed // batch)):
        ids = zipf_ids(rng, number, size=min(batch, num_streamed - number * batch))
        begin = time.perf_counter()
        found = grown.step(ids, step=number + 1)
        seconds += time.perf_counter() - begin
        replaced = int(np.count_nonzero(owned[found.new_rows]))
        owner[found.new_rows], owned[found.new_rows] = found.new_ids, True
        has = found.rows >= 0
        wrong += int(np.count_nonzero(owner[found.rows[has]] != ids[has]))  # a row of another id
        wrong += replaced != found.num_evicted
        if number % 100 == 99:  # an id that has a row and was not found, or two rows with one id
            wrong += int(np.count_nonzero(np.isin(ids[~has], owner[owned])))
            wrong += int(owned.sum()) - len(np.unique(owner[owned]))
            say(f"{(number + 1) * batch:,} ids, {wrong} wrong, {(number + 1) * batch / seconds / 1e6:.2f} M ids/s")
        if first_bytes == 0 and 10 * number * batch >= num_streamed:
            first_bytes = resident_bytes()  # after a tenth of the stream
    totals: dict[str, float] = {**grown.report()}
    wrong += totals["known"] + totals["unknown"] != num_streamed
    wrong += totals["new"] - totals["evicted"] != int(owned.sum())
    wrong += int(np.count_nonzero(grown.find(owner[owned]) != np.flatnonzero(owned)))
    return totals | {
        "wrong": wrong,
        "ids_per_s": num_streamed / seconds,
        "more_bytes": resident_bytes() - first_bytes,
        "bytes_per_id": grown.num_bytes / growing.num_ids,
    }


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def known_rates(num_ids: int, *, rounds: int, batch: int = 65_536) -> dict[str, float]:
    """Ids that one core finds, and counts, a second, in a table that knows all of them; medians over rounds.

    Args:
        num_ids: that the table knows.
        rounds: of 20 batches each.
        batch: ids of a call.
    """
    rng, grown = np.random.default_rng(2), GrowingIds(Growing(num_ids=num_ids, admit_after=2))
    keys = mix(np.arange(1, num_ids + 1, dtype=np.uint64) * GOLDEN)
    for first in range(0, num_ids, batch):
        grown.step(np.repeat(keys[first : first + batch], 2), step=1)
    assert len(grown) == num_ids
    rates: dict[str, list[float]] = {"find": [], "step": []}
    for number in range(rounds):
        batches = [keys[rng.integers(0, num_ids, batch)] for _ in range(20)]
        for name in rates:
            begin = time.perf_counter()
            for ids in batches:
                grown.find(ids) if name == "find" else grown.step(ids, step=2 + number)
            rates[name].append(20 * batch / (time.perf_counter() - begin))
    medians = {name: statistics.median(each) for name, each in rates.items()}
    return medians | {"bytes_per_id": grown.num_bytes / num_ids}


def run(*, quick: bool = False) -> Report:
    """Judge all contestants over seeds and sizes."""
    report = Report(
        benchmark="growing",
        claim="Users come and go: AUC over a stream of a growing table against a fixed hash in the same memory.",
        command="ziggurat bench growing",
    )
    window, num_batches = (5_000, 40) if quick else (50_000, 400)
    for share in (0.1,) if quick else (0.05, 0.2, 0.8):
        found = []
        for seed in range(2 if quick else 3):
            found.append(judged(seed, num_batches=num_batches, window=window, num_ids=int(window * share)))
            say(f"{share} {seed} {found[-1]}")
        for name in ("growing", "growing_twice"):
            ratios = [each[name] / each["hash"] for each in found]
            report.cases.append(
                Case(
                    name=f"{name}_{round(100 * share)}_percent_of_users",
                    ours=statistics.median(each[name] for each in found),
                    peer=statistics.median(each["hash"] for each in found),
                    ratio=statistics.median(ratios),
                    ratio_p10=min(ratios),
                    ratio_p90=max(ratios),
                    ours_name=name,
                    peer_name="hash in the same memory",
                    unit="AUC",
                )
            )
        mean = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
        differences = [each["growing"] - each["hash"] for each in found]
        report.notes.append(
            f"rows for {share:.0%} of a window of {window:,} users, {mean['users']:,.0f} users in all: AUC of a row "
            f"for every user {mean['all']:.4f}, growing {mean['growing']:.4f} (after two sightings "
            f"{mean['growing_twice']:.4f}), hash {mean['hash']:.4f}, difference {statistics.fmean(differences):+.4f} ± "
            f"{statistics.stdev(differences):.4f}; {mean['collisions']:.1%} of the hash's look-ups find a row that "
            "another user trained last"
        )
    add_maps(report, quick=quick)
    return report


def add_maps(report: Report, *, quick: bool) -> None:
    """Add the cases of the map alone to a report."""
    report.figures += figures(quick=quick)
    lines = ["| stream through the map | ids | M ids/s | new | evicted | unknown | wrong | memory since a tenth |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
    for case in report.figures:
        if "ids" in case:
            counts = " | ".join(f"{case[name]:,}" for name in ("new", "evicted", "unknown", "wrong"))
            rate = float(str(case["ids_per_s"])) / 1e6
            lines.append(
                f"| {case['name']} | {case['streamed']:,} | {rate:.2f} | {counts} | {case['more_bytes']:,} B |"
            )
    known = report.figures[-1]
    rates = ", ".join(f"{name} {float(str(known[name])) / 1e6:.1f} M ids/s" for name in ("find", "step"))
    report.tables.append("\n".join(lines))
    report.notes.append(
        f"all ids known: {rates} on one core (goal 5), {float(str(known['bytes_per_id'])):.1f} bytes an id (goal 20)"
    )


def figures(*, quick: bool) -> list[dict[str, object]]:
    """The cases of the map alone."""
    num_streamed, num_ids = (2_000_000, 20_000) if quick else (100_000_000, 1_000_000)
    found: list[dict[str, object]] = []
    whole, part = num_streamed, num_streamed // 10
    cases = {
        "admit_all_evict_least_frequent": (Growing(num_ids=num_ids), whole),
        "admit_all_evict_oldest": (Growing(num_ids=num_ids, evict=Evict.OLDEST), part),
        "admit_second_sketch": (Growing(num_ids=num_ids, admit_after=2), part),
        "admit_second_exact": (Growing(num_ids=num_ids, admit_after=2, counting=Counting.EXACT), part),
    }
    for name, (growing, size) in cases.items():
        found.append({"name": name, "streamed": size, **streamed(growing, num_streamed=size)})
        say(str(found[-1]))
    rates = known_rates(200_000 if quick else 10_000_000, rounds=3 if quick else 11)
    found.append({"name": "ten_million_known_ids", **rates, "goal_ids_per_s": 5e6, "goal_bytes_per_id": 20.0})
    say(str(found[-1]))
    return found
