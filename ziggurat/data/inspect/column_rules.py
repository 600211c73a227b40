"""Guessing what one column means as a feature, from its name and what was measured. A guess always says why.

The rules, in the order in which they are tried (first match wins):

    nothing, one value                       left out: constant
    every row its own value                  left out: a row id (whole numbers in steps, or text)
    list of numbers, all of one length       vector; so is text like "[0.1, 0.2]"
    list of ids, or text like "a|b|c"        sequence if its name says history or ids repeat in a list, else multi-hot
    true/false, text                         categorical (long, nearly unique text is left out)
    whole numbers                            by name (…_id, …_count); below zero: a number; counts (small values are the
                                             frequent ones, and among the large ones are gaps): a number; else ids
    numbers with fractions                   dense: log1p if skewed, else standardised
    dates                                    left out: the time is a role, not a feature

Whole numbers are the hard case: user 17 is not "more" than user 16, but 17 clicks are. A wrong guess is cheap to mend
(one word in the schema) if the reason is visible.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from ziggurat.data.inspect.column_facts import ColumnFacts, Values, number, percent, short_number
from ziggurat.data.preprocess.values.list_ends import find_padding, has_spaces
from ziggurat.data.preprocess.values.written_vectors import length_of_vectors
from ziggurat.data.raw.written_numbers import DECIMAL_COMMA
from ziggurat.features.schema import (
    Categorical,
    Dense,
    Feature,
    MultiHot,
    NumericTransform,
    Sequence,
    Spaces,
    Vector,
)

MIN_ROWS_FOR_ROW_IDS = 20
# fmt: off
_ID_WORDS = frozenset({
    "id", "ids", "uid", "key", "code", "zip", "zipcode", "postal", "postcode", "type", "kind", "category",
    "cat", "brand", "region", "country", "city", "state", "gender", "sex", "occupation", "job", "hour",
    "weekday", "dayofweek", "dow", "month", "device", "os", "browser", "genre", "class", "segment", "slot",
    "channel", "language", "lang", "item", "product", "movie", "user", "ad", "campaign", "advertiser", "site",
    "app", "publisher", "domain", "shop", "store", "seller", "author", "artist", "sku", "userid", "member", "customer",
    "visitor", "account", "profile", "reviewer", "client",
})
_NUMBER_WORDS = frozenset({
    "count", "counts", "cnt", "num", "number", "price", "cost", "amount", "total", "sum", "avg", "mean",
    "duration", "length", "size", "views", "clicks", "score", "ratio", "rate", "distance", "weight", "height",
    "quantity", "qty", "age", "days", "hours", "minutes", "seconds", "income", "salary", "budget",
    "popularity", "year",
})
_HISTORY_WORDS = frozenset({
    "history", "hist", "seq", "sequence", "recent", "past", "last", "previous", "prev", "clicked", "viewed",
    "watched",
})
# fmt: on
_FEW = 50
_MAX_WITHOUT_GAPS = 100


@dataclass(frozen=True)
class FeatureGuess:
    """A guess of what a column becomes.

    Args:
        feature: None: left out.
        reason: why, in a clause.
        warnings: what the reader should look at.
        evidence: what was measured, where the general measurements of the column do not say it.
    """

    feature: Feature | None
    reason: str
    warnings: tuple[str, ...] = field(default=())
    evidence: str = ""


def words(name: str) -> list[str]:
    """The words of a column name, in lower case: userID_v2 → user, id, v2."""
    # Before a capital behind a small letter, and before the last capital of a run: "userID", "HTTPCode".
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return [word for word in re.split(r"[^a-z0-9]+", spaced.lower()) if word]


def guess_feature(facts: ColumnFacts) -> FeatureGuess:
    """The feature that a column most likely is."""
    length = length_of_vectors(facts.present) if facts.kind is Values.TEXT else 0
    if length and facts.num_distinct > 1:
        why = f"every text is {length} numbers ({percent(facts.null_share)} null)"
        return FeatureGuess(Vector(name=facts.name, dim=length), why)
    left_out = _useless(facts)
    if left_out:
        return FeatureGuess(None, left_out)
    # Before the rules for whole numbers: no id has marks between its thousands.
    if facts.is_marked and facts.kind in (Values.WHOLE, Values.NUMBERS):
        return _dense(facts, "numbers with marks between thousands or signs around them")
    match facts.kind:
        case Values.LISTS_OF_NUMBERS:
            return _vector(facts)
        case Values.LISTS_OF_IDS:
            return _list(facts, facts.values, separator="")
        case Values.TRUTH:
            return FeatureGuess(Categorical(name=facts.name), "true or false")
        case Values.TEXT:
            guess = _text(facts)
            return replace(guess, warnings=(*_may_be_fractions(facts), *guess.warnings))
        case Values.WHOLE:
            return _whole(facts)
        case Values.NUMBERS:
            return _dense(facts, "numbers with fractions")
        case Values.DATES:
            why = "dates are no feature as they are; derive hour or weekday, or use the column as time"
            return FeatureGuess(None, why)
        case _:
            return FeatureGuess(None, f"no feature is made of type {facts.dtype}")


def _useless(facts: ColumnFacts) -> str:
    """Say why a column can teach a model nothing, or return ""."""
    lists = facts.kind in (Values.LISTS_OF_IDS, Values.LISTS_OF_NUMBERS)
    if facts.kind is Values.NOTHING:
        return "it is empty"
    if lists or facts.kind is Values.OTHER:
        return ""
    # With nulls beside it, one value still says whether there is any.
    if facts.num_distinct == 1 and facts.null_share == 0:
        return "it is constant"
    if facts.is_marked or len(facts.present) < MIN_ROWS_FOR_ROW_IDS or facts.kind not in (Values.WHOLE, Values.TEXT):
        return ""
    if facts.distinct_share > 0.999 and (facts.kind is Values.TEXT or _looks_like_row_number(facts)):
        return "every row has its own value, so it looks like a row id"
    return ""


def _looks_like_row_number(facts: ColumnFacts) -> bool:
    if set(words(facts.name)) & _NUMBER_WORDS:
        return False
    steps = np.diff(np.sort(facts.present.to_numpy()))
    # A sample has gaps: steps count only where all rows were read.
    even = facts.num_sampled >= facts.num_rows and bool((steps == steps[0]).all())
    named = bool(set(words(facts.name)) & {"id", "ids", "index", "idx", "row", "key", "uid", "uuid", "no", "nr"})
    return even or named or facts.present.is_sorted()


def _vector(facts: ColumnFacts) -> FeatureGuess:
    lengths = facts.present.list.len()
    shortest = int(number(lengths.min()))
    longest = int(number(lengths.max()))
    if shortest == longest and longest > 0:
        return FeatureGuess(
            Vector(name=facts.name, dim=longest),
            f"every list has {longest} numbers ({percent(facts.null_share)} null)",
        )
    return FeatureGuess(
        None, f"lists of numbers of unlike length ({shortest} to {longest}) are neither vectors nor ids"
    )


def _list(facts: ColumnFacts, lists: pl.Series, *, separator: str) -> FeatureGuess:
    """A multi-hot list or a sequence, from a list column or separated text."""
    lengths = lists.list.len().fill_null(0)
    filled = lists.filter((lengths > 1) & lists.is_not_null())
    # Of lists with two ids and more, as one alone cannot repeat.
    repeats = number((filled.list.n_unique() < filled.list.len()).mean()) if len(filled) else 0.0
    elements = lists.drop_nulls().explode()
    shown = ", ".join(str(element)[:30] for element in elements.drop_nulls().unique(maintain_order=True).head(3))
    longest = int(number(lengths.max()))
    how = f"text with {separator!r} between ids" if separator else "lists of ids"
    evidence = (
        f"{elements.n_unique():,} distinct ids {facts.scope}, {lengths.mean():.1f} a row, at most {longest}, "
        f"{percent(number((lengths == 0).mean()))} empty, e.g. {shown}"
    )
    named = set(words(facts.name)) & _HISTORY_WORDS
    spaces = Spaces.STRIP if has_spaces(lists) else Spaces.KEEP
    padding = find_padding(lists)
    warnings: list[str] = []
    if padding:
        filled = f"{facts.name!r}: lists are filled up to {longest} with {padding!r} at their ends, which is no id"
        warnings.append(f'{filled}; padding = "{padding}" in the schema takes it away')
        # What lists were filled up with would count as an id that repeats.
        stripped = lists.list.eval(pl.element().filter(pl.element().cast(pl.String) != padding))
        repeats = number((stripped.list.n_unique() < stripped.list.len()).mean())
    if spaces is Spaces.STRIP:
        warnings.append(f'{facts.name!r}: ids have spaces around them, which spaces = "strip" in the schema takes away')
    if named or repeats >= 0.05:
        why = f"the name says {min(named)}" if named else f"{percent(repeats)} of the lists hold an id more than once"
        feature = Sequence(
            name=facts.name,
            separator=separator,
            # Room for histories that are longer than any of the sample.
            max_length=max(longest, 100) if longest <= 200 else 100,
            padding=padding,
            spaces=spaces,
        )
        why = f"{why}; use multi_hot if order means nothing"
        return FeatureGuess(feature, why, warnings=tuple(warnings), evidence=evidence)
    multi_hot = MultiHot(name=facts.name, separator=separator, padding=padding, spaces=spaces)
    return FeatureGuess(multi_hot, how, warnings=tuple(warnings), evidence=evidence)


def _text(facts: ColumnFacts) -> FeatureGuess:
    unique = facts.present.unique(maintain_order=True)
    # Written as JSON, a list has brackets that would become part of ids.
    if facts.present.str.contains(r"^\s*[\[{].*[\]}]\s*$").head(1000).all():
        return FeatureGuess(None, "it looks like JSON; write it as a list column, or as a|b|c")
    separator = find_separator(unique)
    if separator:
        lists = facts.values.str.split(separator)
        # Their parts repeat as well, but they are no ids.
        if set(words(facts.name)) & {"price", "prices", "cost", "amount"}:
            return FeatureGuess(None, "lists of numbers, by the name")
        return _list(facts, lists, separator=separator)
    mean_length = number(unique.str.len_chars().mean())
    if facts.distinct_share > 0.9 and len(facts.present) >= MIN_ROWS_FOR_ROW_IDS:
        return FeatureGuess(None, "nearly every row has its own text, so it looks like a row id")
    if mean_length > 60 and facts.distinct_share > 0.3:
        return FeatureGuess(None, f"free text of {mean_length:.0f} characters")
    # Too few of them to be a separator for sure, so it is only said.
    divided = unique.filter(unique.str.contains(r"[^|\s][|][^|\s]")).head(1).to_list()
    advice = 'if it divides ids, set kind = "multi_hot" and separator = "|"'
    notes = tuple(f"{facts.name!r}: some texts have '|', such as {text[:80]!r}: {advice}" for text in divided)
    return FeatureGuess(Categorical(name=facts.name), "text that comes back", notes)


def _may_be_fractions(facts: ColumnFacts) -> tuple[str, ...]:
    """Say of texts such as 60,7 and 60, which are read as lists of one or two ids, that they may be numbers."""
    texts = facts.present.str.strip_chars()
    pairs = texts.filter(texts.str.contains(r"^[1-9]\d*,\d{1,3}$|^0,\d{1,3}$"))
    # A single cell that fits no list or number of this form decides against it.
    if not len(pairs) or not texts.str.contains(r"^(0|[1-9]\d*)(,\d{1,3})?$").all():
        return ()
    written = DECIMAL_COMMA.block(facts.name)
    number_meant = pairs[0].replace(",", ".")
    return (
        f"{facts.name!r}: {pairs[0]!r} is read as text or as two ids, and no number, since some cells have one part "
        f"alone, or no second part begins with 0; where it is {number_meant} say in the schema {written}, "
        'and kind = "dense" for its feature',
    )


def find_separator(unique: pl.Series) -> str:
    r"""Return the separator of ids in the distinct texts of a column ("Action|Comedy"), or "".

    A separator must be in a good part of the cells and make few distinct parts out of many: titles divided at spaces
    hardly repeat their words, genres do. Spaces and commas, common in prose, must show much more of both.
    """
    for separator, least_share, least_repeat in (
        ("|", 0.05, 1.2),
        ("^", 0.05, 1.2),
        (";", 0.2, 2.0),
        (", ", 0.5, 8.0),
        (",", 0.5, 4.0),
        (" ", 0.6, 15.0),
    ):
        share = number(unique.str.contains(separator, literal=True).mean())
        if len(unique) < 3 or share < least_share:
            continue
        # Spaces beside a separator belong to no part.
        parts = unique.head(20_000).str.split(separator).explode().drop_nulls().str.strip_chars()
        if len(parts) / max(parts.n_unique(), 1) >= least_repeat and number(parts.str.len_chars().mean()) <= 40:
            return separator
    return ""


def _whole(facts: ColumnFacts) -> FeatureGuess:
    values = facts.present
    minus_one = values == -1
    # One negative number alone, −1, means nothing more often than it measures something.
    is_mark = facts.minimum == -1 and facts.num_distinct > 2 and number(values.filter(~minus_one).min()) >= 0
    if not is_mark:
        return _whole_numbers(facts, values)
    guess = _whole_numbers(facts, values.filter(~minus_one))
    note = (
        f"{facts.name!r}: -1 stands in {percent(number(minus_one.mean()))} of the rows, among numbers from 0 on; if it "
        'means that there is no value, write missing = ["-1"] above the first block of the schema, with other texts '
        "that mean nothing: it holds for all columns"
    )
    return replace(guess, warnings=(*guess.warnings, note))


def _whole_numbers(facts: ColumnFacts, values: pl.Series) -> FeatureGuess:
    """Guess by the values given, which are those of the column but for a mark of nothing."""
    named = words(facts.name)
    # The last word says what the name is of: "user_count" is a count, and "count_id" an id.
    last = next((word for word in reversed(named) if word in _ID_WORDS or word in _NUMBER_WORDS), "")
    categorical = Categorical(name=facts.name)
    if facts.num_distinct <= 2:
        return FeatureGuess(categorical, "two values")
    if last in _ID_WORDS:
        return FeatureGuess(categorical, f"ids, the name says {last}")
    if last in _NUMBER_WORDS and facts.num_distinct > 20:
        return _dense(facts, f"a quantity, the name says {last}")
    if number(values.min()) < 0 and facts.num_distinct > 10:
        return _dense(facts, "whole numbers below zero, which ids rarely are")
    if _counts(values):
        return _dense(facts, "whole numbers whose small values are the frequent ones, as counts are")
    if facts.num_distinct <= _FEW:
        return FeatureGuess(categorical, "few whole numbers")
    why = 'whole numbers without the shape of counts, so ids; say kind = "dense" if they measure something'
    return FeatureGuess(categorical, why)


def _counts(values: pl.Series) -> bool:
    """True if frequencies fall with the value, from 0 or 1 on: rank correlation below −0.8 over the first values.

    Ids that were given out one after the other may be like that, too, where the first ones are the most active. But
    then nearly every one up to the largest is there, of which counts, whose large values are rare, have no hundred.
    """
    counts = values.value_counts().sort(values.name)
    # Counts begin at 0 or 1, and ids may as well, so this alone decides nothing.
    if counts.height < 8 or int(counts[values.name][0]) > 1:
        return False
    if counts.height > _MAX_WITHOUT_GAPS and counts.height > 0.9 * int(counts[values.name][-1]):
        return False
    frequency = counts["count"].head(40).to_numpy().astype(float)
    # The place of each frequency among all: the correlation of ranks is Spearman's.
    ranks = np.argsort(np.argsort(frequency)).astype(float)
    return bool(np.corrcoef(np.arange(ranks.size), ranks)[0, 1] < -0.8)


def _dense(facts: ColumnFacts, why: str) -> FeatureGuess:
    values = facts.present.cast(pl.Float64)
    values = values.filter(values.is_finite())
    bottom, low, middle, high, top = (number(values.quantile(q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0))
    # The distance of the extreme from the middle, in widths of the middle half.
    skewed = max(top - middle, middle - bottom) > 10 * max(high - low, 1e-9)
    transform = NumericTransform.LOG1P_STANDARDISE if skewed else NumericTransform.STANDARDISE
    # Ten digits, so that the schema is readable.
    missing = float(f"{middle:.10g}")  # also where none is missing yet: a later row may lack it, and 0 may be far out
    shape = f"from {short_number(facts.minimum)} to {short_number(facts.maximum)}, half below {short_number(middle)}"
    step = "log1p, as the extremes are far out" if skewed else "no log, as no value is far out"
    filled = f"; missing ones {'would ' if facts.null_share == 0 else ''}count as {short_number(missing)}"
    infinite = len(values) < len(facts.present)
    warnings = (f"{facts.name!r}: infinite values are bad rows",) if infinite else ()
    return FeatureGuess(
        Dense(name=facts.name, transform=transform, missing=missing),
        f"{why}, {shape}; {step}{filled}",
        warnings,
    )
