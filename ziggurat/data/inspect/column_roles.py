"""Guessing labels, time, group, session and weight among the columns of a table, and what gives the label away.

- *label*: a column named like an outcome (label, click, conversion …) with two values; failing that a rating with
  few values (liked from three quarters of the scale on); failing that the only column of 0/1 or yes/no, where
  those called is_… or has_… count last.
- *time*: dates (in text, too: `raw/dates.py`), or numbers within the range of epoch seconds (to nanoseconds) of 1990 to
  2100, named like a time.
- *group*: the user, by name; GAUC is computed within it. *session*, *weight*: by name alone.
- *leaks*: a column whose values alone order the label almost perfectly was probably written after the fact. Measured by
  AUC on the sample: of the number itself, and of the mean label of each value in the other half of the rows (so that a
  column of rare ids cannot look good by memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from ziggurat.commands import pasted
from ziggurat.data.inspect.column_facts import ColumnFacts, Values, number, percent, short_number
from ziggurat.data.inspect.column_rules import MIN_ROWS_FOR_ROW_IDS, words
from ziggurat.data.preprocess.values.cells import canonical_text
from ziggurat.data.preprocess.values.time_units import two_units
from ziggurat.data.synthetic.best_metrics import pair_share
from ziggurat.errors import DataError, nearest_names
from ziggurat.features.date_order import DateOrder
from ziggurat.features.labels import YES_WORDS, MissingLabel
from ziggurat.features.schema import Label, Task

LEAK_AUC = 0.99
SUSPECT_AUC = 0.95
_LABEL_WORDS = (
    # Of several columns with such a name those of an earlier line come first.
    ("label", "target", "outcome", "y"),
    ("click", "clicked", "clk", "isclick"),
    ("conversion", "converted", "conv", "purchase", "purchased", "bought", "buy", "install", "installed", "order"),
    ("churn", "churned", "subscribed", "responded", "response", "sold", "fraud", "survived"),
    ("like", "liked", "love", "loved", "favorite", "favourite", "upvote", "follow", "share", "finish", "finished"),
)
_RATING_WORDS = frozenset(["rating", "ratings", "stars", "star"])
# fmt: off
_PAST_WORDS = frozenset({
    "before", "last", "prev", "previous", "past", "history", "hist", "num", "count", "cnt", "avg", "mean",
    "rate", "ctr", "ever", "total", "time", "date", "ts", "at", "id",
})
# fmt: on
_FEW = 50  # values: in a column of more, none is likely to be the positive
_FLAG_WORDS = frozenset(["is", "has", "was", "can"])
_TIME_WORDS = frozenset(["time", "timestamp", "ts", "date", "datetime", "when", "at", "epoch", "unixtime"])
_USER_WORDS = ("user", "uid", "userid", "member", "customer", "visitor", "account", "profile", "reviewer", "client")
_EPOCH_1990, _EPOCH_2100 = 631_152_000, 4_102_444_800


@dataclass(frozen=True)
class RoleGuess:
    """A column that is no plain feature, and why."""

    column: str
    reason: str
    label: Label | None = None
    warning: str = ""


def label_of(facts: ColumnFacts, *, positive: str, others: Sequence[ColumnFacts]) -> RoleGuess:
    """Return the label that a column makes which somebody named as such.

    Args:
        facts: of the column.
        positive: the value that somebody named as the positive; "": two values decide, or numbers are predicted.
        others: columns that could be named in its place.

    Raises:
        DataError: it has one value, or is neither numbers nor two texts; or has no such positive.
    """
    guess = _with_positive(facts, positive) if positive else _as_it_is(facts)
    if guess is not None:
        return replace(guess, reason=f"named as the label; {guess.reason}")
    positives = [f"say which value is the positive: --positive {pasted(value)}" for value in _likely_positives(facts)]
    columns = [guess.column for guess in find_labels(others)]
    columns += [each.name for each in others if each.name not in columns and _as_it_is(each) is not None]
    labels = [f"predict another column: --label {pasted(name)}" for name in columns[:2]]
    raise DataError(
        expected="a label of two values, or of numbers, or one of whose values is said to be the positive",
        found=facts.evidence,
        where=f"column {facts.name!r}",
        ways_out=(*positives, *labels) or ("add a column to predict, of two values or of numbers",),
    )


def columns_with(columns: Sequence[ColumnFacts], positive: str) -> list[str]:
    """Return the names of the columns of few values, one of which is this text."""
    return [facts.name for facts in columns if facts.num_distinct <= _FEW and _canonical(positive) in _values_of(facts)]


def _as_it_is(facts: ColumnFacts) -> RoleGuess | None:
    """Return the label that a column makes by its values alone; None if they do not say what to predict."""
    guess = _two_values(facts)
    # A rating has more than two values, so that it is asked after.
    if guess is None and set(words(facts.name)) & _RATING_WORDS and _is_rating(facts):
        guess = _rating(facts)
    if guess is None and facts.kind in (Values.WHOLE, Values.NUMBERS) and facts.num_distinct > 2:
        why = "for regression: more than two values"
        guess = RoleGuess(facts.name, why, Label(name=facts.name, task=Task.REGRESSION))
    return guess


def _with_positive(facts: ColumnFacts, positive: str) -> RoleGuess:
    """Return the label that is 1 where a column holds a value, and 0 where it holds another.

    Raises:
        DataError: it does not hold the value, or no other.
    """
    counts = _values_of(facts)
    positive = _canonical(positive)
    others = [value for value in counts if value != positive]
    if positive not in counts or not others:
        near = nearest_names(positive, others, most=1)
        likely = [*near, *(value for value in _likely_positives(facts) if value not in near)]
        ways = [f"--positive {pasted(value)}" for value in likely[:3]]
        more = ["leave --positive out"] if _as_it_is(facts) is not None else []
        # A sample was read, and the value may stand in other rows.
        if facts.num_sampled < facts.num_rows:
            more.append("if rows that were not read hold it, say positive in the [[label]] of the schema by hand")
        if not ways and not more:
            more.append("name another label: --label COLUMN")
        raise DataError(
            expected=f"the positive {positive!r} among the values of the label, beside another value",
            found=facts.evidence,
            where=f"column {facts.name!r}",
            ways_out=(*ways, *more),
        )
    share = counts[positive] / sum(counts.values())
    negatives = ", ".join(map(repr, others[:3])) + (f" and {len(others) - 3:,} more" if len(others) > 3 else "")
    # With one other value it is named, so that a third one is a bad row later.
    negative = others[0] if len(others) == 1 else ""
    why = f"{positive!r} is positive, {share:.2%} of the rows; {negatives} {'is' if negative else 'are'} not"
    return RoleGuess(facts.name, why, Label(name=facts.name, positive=positive, negative=negative))


def _values_of(facts: ColumnFacts) -> dict[str, int]:
    """Count the values that a schema can name as the positive, as it names them; the most frequent first."""
    if facts.kind is Values.TRUTH:
        # A text file may say TRUE, which only its examples still show.
        truths = {_canonical(text): text.strip().lower() == "true" for text in facts.examples}
        counts = {text: int((facts.present == truth).sum()) for text, truth in truths.items()}
        return dict(sorted(counts.items(), key=lambda entry: -entry[1]))
    is_as_written = facts.kind is Values.TEXT or (facts.kind is Values.WHOLE and not facts.is_marked)
    texts = canonical_text(facts.present) if is_as_written else None
    # Numbers and dates have no text that a schema could name.
    if texts is None:
        return {}
    # Ties are broken by the value, so that the order is the same on every run.
    counted = texts.str.strip_chars().rename("value").value_counts(name="count").sort("count", "value", descending=True)
    return {str(value): int(count) for value, count in counted.iter_rows() if value}


def _canonical(text: str) -> str:
    """Return a text as `Label.positive` is compared."""
    texts = canonical_text(pl.Series([text.strip()], dtype=pl.String))
    return text if texts is None or texts[0] is None else str(texts[0])


def _likely_positives(facts: ColumnFacts) -> list[str]:
    """Return up to three values of a column that may be its positive: what says yes, then what is frequent."""
    if not 2 < facts.num_distinct <= _FEW or facts.kind is not Values.TEXT:
        return []
    values = list(_values_of(facts))
    # False sorts before True, and the sort keeps the order of frequency within both.
    return sorted(values, key=lambda value: value.lower() not in YES_WORDS)[:3]


def find_labels(columns: Sequence[ColumnFacts]) -> list[RoleGuess]:
    """The labels, most likely first; empty if nothing looks like one."""
    named: list[tuple[int, int, RoleGuess]] = []
    for position, facts in enumerate(columns):
        rank = _label_rank(facts.name)
        guess = _named_label(facts) if rank is not None else None
        if guess is not None and rank is not None:
            named.append((rank, position, guess))
    if named:
        # Not by the guess itself, which has no order.
        return [guess for *_, guess in sorted(named, key=lambda entry: entry[:2])]
    ratings = [facts for facts in columns if set(words(facts.name)) & _RATING_WORDS and _is_rating(facts)]
    if ratings:
        return [_rating(ratings[0])]
    answers = [(facts, guess) for facts in columns if (guess := _two_values(facts)) and not guess.warning]
    # Where only flags are there, one of them may be the label all the same.
    likely = [pair for pair in answers if words(pair[0].name)[:1] not in ([word] for word in _FLAG_WORDS)] or answers
    if len(likely) != 1:
        return []
    facts, guess = likely[0]
    why = f"the only column that answers yes or no, though its name does not say so; {guess.reason}"
    warning = f"{facts.name!r} is taken for the label though its name does not say so: name yours with --label COLUMN"
    return [replace(guess, reason=why, warning=warning)]


def known_of_some(labels: list[RoleGuess], by_name: Mapping[str, ColumnFacts]) -> list[RoleGuess]:
    """Say of labels with empty cells that they are known of some rows only: the others stay for the other labels."""
    found: list[RoleGuess] = []
    for guess in labels:
        null_share = by_name[guess.column].null_share
        if guess.label is None or not null_share:
            found.append(guess)
            continue
        known = percent(1 - null_share)
        notes = [guess.warning] if guess.warning else []
        if len(labels) > 1:
            notes.append(
                f"{guess.column!r} is known of {known} of the rows: the others stay for the other labels, as "
                'missing = "left_out" in its block says'
            )
            label = replace(guess.label, missing=MissingLabel.LEFT_OUT)
        else:
            notes.append(
                f"{guess.column!r} is known of {known} of the rows: the others are bad rows, which "
                "--data.bad-rows quarantine puts aside"
            )
            label = guess.label
        found.append(replace(guess, label=label, warning="; ".join(notes)))
    return found


def other_outcomes(columns: Sequence[ColumnFacts], labels: Sequence[RoleGuess]) -> str:
    """Name further columns of 0 and 1, which may be outcomes as the label is; "" if there are none."""
    if not labels:
        return ""
    taken = {guess.column for guess in labels}
    names: list[str] = []
    for facts in columns:
        named = set(words(facts.name))
        if facts.name not in taken and _is_binary(facts) and not named & (_FLAG_WORDS | _PAST_WORDS):
            names.append(repr(facts.name))
    if not names:
        return ""
    listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{listed}: 0 or 1, as the label {labels[0].column!r} is; what is known only afterwards is no feature: take it "
        "out, or give it a [[label]] block of its own"
    )


def is_outcome(facts: ColumnFacts) -> bool:
    """True for a rating that is not the label: known only after the fact, like the label itself."""
    return bool(set(words(facts.name)) & _RATING_WORDS) and _is_rating(facts)


def _label_rank(name: str) -> int | None:
    named = words(name)
    if set(named) & _PAST_WORDS:
        return None
    return next((rank for rank, group in enumerate(_LABEL_WORDS) if set(named) & set(group)), None)


def _named_label(facts: ColumnFacts) -> RoleGuess | None:
    guess = _two_values(facts)
    if guess is not None:
        return replace(guess, reason=f"the name says so; {guess.reason}")
    if facts.kind in (Values.WHOLE, Values.NUMBERS) and set(words(facts.name)) & {"label", "target", "y"}:
        why = "for regression: more than two values"
        return RoleGuess(facts.name, why, Label(name=facts.name, task=Task.REGRESSION))
    return None


def _two_values(facts: ColumnFacts) -> RoleGuess | None:
    """The label of a column with two values; None if it has not two, or they are lists or dates."""
    if facts.num_distinct != 2:
        return None
    if _is_binary(facts):
        return RoleGuess(facts.name, _rate(facts), Label(name=facts.name))
    if facts.kind in (Values.WHOLE, Values.NUMBERS):
        why = f"two values, 1 from {short_number(facts.maximum)} on"
        return RoleGuess(facts.name, why, Label(name=facts.name, positive_from=facts.maximum))
    if facts.kind is not Values.TEXT:
        return None
    # The rarer one first: what one wants to predict mostly happens seldom.
    counts = facts.present.value_counts().sort("count", facts.name)
    rarer, other = (str(text) for text in counts[facts.name].to_list())
    said = [text for text in (rarer, other) if text.strip().lower() in YES_WORDS]
    # Where both say yes, or none, words do not help.
    positive = said[0] if len(said) == 1 else rarer
    negative = other if positive == rarer else rarer
    share = number((facts.present == positive).mean())
    why = f"{positive!r} is positive, {share:.2%} of the rows"
    warning = "" if len(said) == 1 else f"{facts.name!r}: {positive!r} is taken for the positive, being the rarer one"
    label = Label(name=facts.name, positive=positive.strip(), negative=negative.strip())
    return RoleGuess(facts.name, why, label, warning)


def _is_binary(facts: ColumnFacts) -> bool:
    if facts.kind is Values.TRUTH:
        return facts.num_distinct == 2
    return facts.kind is Values.WHOLE and facts.num_distinct == 2 and (facts.minimum, facts.maximum) == (0, 1)


def _is_rating(facts: ColumnFacts) -> bool:
    # Half stars from 0 to 10 and whole ones from 0 to 20 have no more values.
    return facts.kind in (Values.WHOLE, Values.NUMBERS) and 2 <= facts.num_distinct <= 21


def _rating(facts: ColumnFacts) -> RoleGuess:
    """Liked from the first value on that is at least three quarters up the scale: 4 of 1 … 5, 8 of 1 … 10."""
    scale = sorted(float(value) for value in facts.present.unique().to_list())
    # The scale runs from the smallest value that is there, which is not always 0.
    least = scale[0] + 0.75 * (scale[-1] - scale[0])
    start = next(value for value in scale if value >= least)
    liked = number((facts.present >= start).mean())
    range_text = f"{short_number(scale[0])} to {short_number(scale[-1])}"
    why = f"a rating; {short_number(start)} and more of {range_text} counts as liked, {liked:.1%} of the rows"
    return RoleGuess(facts.name, why, Label(name="like", column=facts.name, positive_from=start))


def _rate(facts: ColumnFacts) -> str:
    positive = number(facts.present.cast(pl.Float64).mean()) if facts.kind is not Values.TEXT else 0.0
    return f"{positive:.2%} positive"


def find_time(columns: Sequence[ColumnFacts]) -> RoleGuess | None:
    """The column with the order of events, if one looks like it."""
    best: tuple[int, int, RoleGuess] | None = None
    for position, facts in enumerate(columns):
        named = bool(set(words(facts.name)) & _TIME_WORDS)
        unit = _epoch_unit(facts)
        if facts.kind is Values.DATES and facts.null_share == 0:
            score = 2 + named
            why = _dates_in_words(facts)
        elif unit and named:
            score = 3
            why = f"whole numbers in the range of {unit} since 1970, and the name says so"
        # Two values are in order by chance.
        elif unit and len(facts.present) > 2 and facts.num_distinct > 2 and facts.present.is_sorted():
            score = 2
            why = f"whole numbers in the range of {unit} since 1970, in order"
        elif named and facts.kind is Values.WHOLE and facts.null_share == 0 and words(facts.name)[-1] != "at":
            score = 1
            why = "whole numbers, by the name"
        else:
            continue
        guess = RoleGuess(
            facts.name, f"no feature: {why}", warning=_warning_of_dates(facts) or _warning_of_units(facts)
        )
        # Of equal scores the first column of the file.
        if best is None or (score, -position) > best[:2]:
            best = (score, -position, guess)
    return best[2] if best else None


def _dates_in_words(facts: ColumnFacts) -> str:
    if facts.date_order is DateOrder.AUTO:
        return "dates"
    order = facts.date_order or DateOrder.DAY_FIRST
    return f"dates with the {order.value.replace('_', ' ')}, " + ("as they show" if facts.date_order else "perhaps")


def _warning_of_dates(facts: ColumnFacts) -> str:
    """Return a warning where 01/03/2024 may be 1 March or 3 January, and where only some dates name a zone."""
    zones = (
        f"{facts.name!r}: some dates name a time zone, and others do not; those count as UTC, write the zone into them "
        "where that is wrong"
        if facts.lacks_zones
        else ""
    )
    if facts.date_order is not None:
        return zones
    if zones:
        zones = f"; {zones}"
    return (
        f"{facts.name!r}: no date shows whether the day or the month stands first; day_first is taken, say "
        f"--data.split.date-order month_first where that is wrong{zones}"
    )


def _warning_of_units(facts: ColumnFacts) -> str:
    """Return a warning where some times are in seconds and others in milliseconds."""
    units = two_units(facts.present.to_numpy()) if facts.kind is Values.WHOLE and len(facts.present) else ""
    return f"{facts.name!r}: times in {units}, by their sizes; a split by time needs one unit" if units else ""


def _epoch_unit(facts: ColumnFacts) -> str:
    if facts.kind is not Values.WHOLE or facts.null_share > 0:
        return ""
    for unit, factor in (("seconds", 1), ("milliseconds", 10**3), ("microseconds", 10**6), ("nanoseconds", 10**9)):
        if _EPOCH_1990 * factor <= facts.minimum and facts.maximum <= _EPOCH_2100 * factor:
            return unit
    return ""


def find_group(columns: Sequence[ColumnFacts]) -> RoleGuess | None:
    """Guess the column of the user: ids that come back, under a name of `_USER_WORDS`."""
    for word in _USER_WORDS:
        for facts in columns:
            named = words(facts.name)
            # An id for nearly every row is one of the row, and no user comes back.
            ids = facts.kind in (Values.WHOLE, Values.TEXT) and facts.num_distinct > 2 and facts.distinct_share < 0.9
            if word in named and ids and (named[-1] in ("id", "ids", "key", "hash") or named == [word]):
                return RoleGuess(facts.name, "also the group of GAUC: one user's rows are ranked among themselves")
    return None


def find_session(columns: Sequence[ColumnFacts]) -> RoleGuess | None:
    """Guess the column of the session, which is no feature: a session seen in training hardly comes back."""
    for facts in columns:
        ids = facts.kind in (Values.WHOLE, Values.TEXT) and facts.distinct_share < 0.9
        if "session" in words(facts.name) and words(facts.name)[-1] in ("id", "session", "key") and ids:
            return RoleGuess(
                facts.name, "sessions hardly come back: no feature; a shuffle can keep their rows together"
            )
    return None


def find_weight(columns: Sequence[ColumnFacts]) -> RoleGuess | None:
    """Guess the column of sample weights: numbers >= 0 called sample_weight or the like, not `weight` alone."""
    for facts in columns:
        named = set(words(facts.name))
        numbers = facts.kind in (Values.WHOLE, Values.NUMBERS) and facts.minimum >= 0 and facts.null_share == 0
        if "weight" in named and named & {"sample", "importance", "example", "loss", "row"} and numbers:
            return RoleGuess(facts.name, "of the sample, by the name")
    return None


def other_weight(columns: Sequence[ColumnFacts]) -> str:
    """Name a column that may weigh samples, though its name does not say of what; "" if there is none."""
    for facts in columns:
        numbers = facts.kind in (Values.WHOLE, Values.NUMBERS) and facts.minimum >= 0 and facts.null_share == 0
        if words(facts.name) in (["weight"], ["weights"], ["w"]) and numbers:
            return (
                f"{facts.name!r} is taken for a feature; if it says how much a row counts, take its block out and "
                f'write weight = "{facts.name}" under [roles]'
            )
    return ""


def label_values(facts: ColumnFacts, label: Label) -> np.ndarray:
    """(N,) 0/1 values of a binary label in the sample, NaN where missing."""
    if label.positive:
        texts = facts.values.cast(pl.String).str.strip_chars()
        # Compared as a text: the positive of a schema is one, whatever type the column has.
        return (texts == label.positive).cast(pl.Float64).fill_null(float("nan")).to_numpy()
    values = facts.values.cast(pl.Float64).fill_null(float("nan")).to_numpy()
    if label.positive_from is None:
        return values
    # NaN fails the comparison, and would be a negative.
    return np.where(np.isnan(values), np.nan, (values >= label.positive_from).astype(float))


def single_column_auc(facts: ColumnFacts, labels: np.ndarray) -> float:
    """Measure how well one column alone orders a binary label: AUC in 0.5 … 1; 0.5 where it cannot be measured."""
    usable = ~np.isnan(labels)
    positives = int(np.nansum(labels))
    if facts.kind in (Values.LISTS_OF_IDS, Values.LISTS_OF_NUMBERS, Values.OTHER, Values.NOTHING):
        return 0.5
    # With fewer of one class an AUC of 1 may be chance.
    if min(positives, int(usable.sum()) - positives) < MIN_ROWS_FOR_ROW_IDS:
        return 0.5
    y = labels[usable]
    series = facts.values.filter(pl.Series(usable))
    # Ranks stand for values of any type; null gets the code 0, which no rank has.
    codes = series.rank("dense").fill_null(0).to_numpy().astype(np.int64)
    scores = [_mean_of_other_half(codes, y)]
    if facts.kind in (Values.WHOLE, Values.NUMBERS, Values.DATES):
        # Whether a value is missing may give the label away, too.
        scores += [codes.astype(float), (codes == 0).astype(float)]
    aucs = [pair_share(score, y, 1.0 - y) for score in scores]
    # The mean label can only rise with the label; the order of values may run either way.
    return max(max(auc, 1.0 - auc) if index else auc for index, auc in enumerate(aucs))


def _mean_of_other_half(codes: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(N,) mean label of the same value among the rows of the other half, drawn towards the overall mean."""
    # A fixed seed: the same file gets the same verdict every time.
    half = np.random.default_rng(0).random(codes.size) < 0.5
    score = np.empty(codes.size)
    # By the other half, because the mean of a rare value over its own rows would be its label.
    for part in (half, ~half):
        sums = np.bincount(codes[~part], weights=labels[~part], minlength=codes.max() + 1)
        counts = np.bincount(codes[~part], minlength=codes.max() + 1)
        # One more row with the mean label, so that a rare value is drawn to it.
        score[part] = ((sums + labels.mean()) / (counts + 1.0))[codes[part]]
    return score
