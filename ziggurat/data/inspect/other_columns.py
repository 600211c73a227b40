"""Guesses that depend on other columns: what gives the label away, and lists that share a table with an item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import polars as pl

from ziggurat.data.inspect.column_facts import ColumnFacts, Values, number, percent
from ziggurat.data.inspect.column_roles import (
    LEAK_AUC,
    SUSPECT_AUC,
    RoleGuess,
    is_outcome,
    label_values,
    single_column_auc,
)
from ziggurat.data.inspect.column_rules import FeatureGuess, words
from ziggurat.features.schema import Feature, Label


def refuse_leaks(
    guesses: dict[str, FeatureGuess], by_name: Mapping[str, ColumnFacts], labels: Sequence[RoleGuess]
) -> list[str]:
    """Leave out features that give the first label away, in place; warns of those that nearly do."""
    warnings: list[str] = []
    label: Label | None = labels[0].label if labels else None
    if label is None:
        return warnings
    y = label_values(by_name[labels[0].column], label) if label.task.has_positives else None
    for name, guess in guesses.items():
        if guess.feature is None:
            continue
        auc = single_column_auc(by_name[name], y) if y is not None else 0.5
        if auc >= LEAK_AUC:
            why = f"it alone orders {label.name!r} with AUC {auc:.4f}, so it was probably known only afterwards"
        elif is_outcome(by_name[name]):
            why = "a rating is an outcome, like the label, and known only afterwards"
        elif auc >= SUSPECT_AUC:
            why = f"it alone orders {label.name!r} with AUC {auc:.3f}: was it known beforehand?"
            warnings.append(f"{name!r}: {why}")
            guesses[name] = replace(guess, reason=f"{guess.reason}; {why}")
            continue
        else:
            continue
        warnings.append(f"{name!r} was left out: {why}")
        guesses[name] = FeatureGuess(None, why)
    return warnings


def share_tables(guesses: dict[str, FeatureGuess], by_name: Mapping[str, ColumnFacts]) -> None:
    """Let a list of items look up the table of the item column, if names and ids agree; in place."""
    for name, guess in guesses.items():
        feature = None if guess.feature is None else guess.feature.id_lists
        if feature is None:
            continue
        elements = feature.divided(by_name[name].values).drop_nulls().explode()
        ids = elements.drop_nulls().cast(pl.String).str.strip_chars().unique()
        ids = ids.filter(ids != feature.padding) if feature.padding else ids
        for other, candidate in guesses.items():
            stem = [word for word in words(other) if word not in ("id", "ids")]
            is_id = candidate.feature is not None and candidate.feature.is_id
            if not is_id or not stem or by_name[other].kind is Values.TRUTH:
                continue
            related = set(stem) <= {word.rstrip("s") for word in words(name)} | set(words(name))
            known = by_name[other].present.cast(pl.String).unique()
            overlap = number(ids.is_in(known.implode()).mean())
            if related and overlap >= 0.3:
                shared: Feature = replace(feature, table=other)
                reason = f"{guess.reason}; shares the table of {other}: {percent(overlap)} of its ids are found there"
                guesses[name] = replace(guess, feature=shared, reason=reason)
                break
