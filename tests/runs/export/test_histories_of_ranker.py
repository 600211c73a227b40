"""Which rankers of events go behind which next-item runs is said before anything is loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runs.scores.test_candidate_scores import SCHEMA, next_schema
from ziggurat.errors import ConfigError
from ziggurat.features.schema_io import schema_from_toml
from ziggurat.runs.export.histories_of_ranker import context_columns, refuse_absent, schema_for_both

FINDS, RANKS = schema_from_toml(next_schema(), "next.toml"), schema_from_toml(SCHEMA, "ranker.toml")
COLUMNS = ("user", "film", "genre", "verb", "tossed", "country", "time")


def test_a_log_is_read_for_both() -> None:
    both = schema_for_both(FINDS, RANKS, where="test")
    assert both.events is not None
    assert both.events.actions == ("verb", "tossed")
    assert both.events.max_length == 12  # the longer of the two: each model cuts its own
    assert not both.labels
    assert context_columns(RANKS) == {"country": "country"}
    refuse_absent(FINDS, RANKS, columns=COLUMNS, where="test")


def test_runs_that_do_not_go_together_are_refused() -> None:
    assert RANKS.events is not None
    pooled = replace(RANKS, events=replace(RANKS.events, pool_by="verb", pools=("liked", "seen")))
    first, second, *rest = RANKS.features
    renamed = replace(RANKS, features=(first, replace(second, column="kind"), *rest))
    for other, found in ((pooled, "a history for each of liked, seen"), (renamed, "other columns for genre")):
        with pytest.raises(ConfigError, match=found):
            schema_for_both(FINDS, other, where="test")
    with pytest.raises(ConfigError, match="user, time and item user, time, film and user, when, film"):
        schema_for_both(FINDS, replace(RANKS, time="when"), where="test")
    with pytest.raises(ConfigError, match="samples, which have no histories"):
        schema_for_both(replace(FINDS, events=None), RANKS, where="test")
    for column in ("tossed", "country"):
        with pytest.raises(ConfigError, match=f"no column {column}"):
            refuse_absent(FINDS, RANKS, columns=[name for name in COLUMNS if name != column], where="test")
