"""Rankers of one history on the candidates of an event log: published models beside `sequence_ranker`, for comparisons.

    samples of a log with labels     history  history_rating  history_times  asked_at  item   like
    (`data/events/candidates.py`)    [x y]    [5 3]           [1 2]          [3]       z      1
                                       │        │               │              │        │
    HistoryInput                     lists    actions          times        asked_at  targets

Each model reads the whole of it: items, what is known of them, what was done, and when; DIN and RankMixer read no
times.
What differs from their own defaults is what all share here: one head of (200, 80), two heads of attention. Nothing of
them is tuned on any log: `ziggurat compare … --trials K` lets validation data choose.
"""

from __future__ import annotations

from ziggurat.features.events import ASKED_AT, HISTORY, HISTORY_TIMES, of_history
from ziggurat.features.schema import Schema
from ziggurat.models import (
    BSTConfig,
    DIENConfig,
    DINConfig,
    MLPConfig,
    ModelConfig,
    OneTransConfig,
    RankMixerConfig,
    TransActConfig,
)
from ziggurat.models.sequence.rankers.history import HistoryInput
from ziggurat.models.sequence.rankers.rankmixer import HistoryPooling

_DEEP, _NUM_HEADS = MLPConfig(hidden_dims=(200, 80)), 2


def history_of(schema: Schema) -> HistoryInput:
    """The history that the samples of a log with labels have.

    Args:
        schema: of the events, with [events], [items] and labels.
    """
    others = [name for name in schema.item_settings.features if name != schema.item_settings.id]
    return HistoryInput(
        lists=(HISTORY, *(of_history(name) for name in others)),
        targets=(schema.item_settings.id, *others),
        actions=tuple(of_history(name) for name in schema.event_settings.actions),
        times=HISTORY_TIMES,
        asked_at=ASKED_AT,
    )


def history_rankers(schema: Schema) -> dict[str, ModelConfig]:
    """Published rankers of one history by name, told what the history of a log's samples is.

    Args:
        schema: of the events, with [events], [items] and labels.
    """
    history = history_of(schema)
    return {
        "din": DINConfig(histories=history.lists, targets=history.targets, actions=history.actions, deep=_DEEP),
        "dien": DIENConfig(history=history, deep=_DEEP),
        "bst": BSTConfig(history=history, num_heads=_NUM_HEADS, deep=_DEEP),
        "transact": TransActConfig(history=history, num_heads=_NUM_HEADS, deep=_DEEP),
        "onetrans": OneTransConfig(history=history, num_heads=_NUM_HEADS, deep=_DEEP),
        "rankmixer": RankMixerConfig(
            history=HistoryInput(lists=history.lists, targets=history.targets, actions=history.actions),
            pooling=HistoryPooling.ATTENTION,
            deep=_DEEP,
        ),
    }
