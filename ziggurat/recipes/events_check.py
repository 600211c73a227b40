"""Whether model and schema go together in events: refused before the first file is read, with the recipe that fits.

schema                         models that learn from it
[events] and a [[label]]       sequence_ranker, and those that read one history
[events] without labels        next_item: the recipes table_hstu, table_sasrec, table_gsasrec
no [events]                    all but these two
"""

from __future__ import annotations

from ziggurat.errors import SchemaError
from ziggurat.features.events import HISTORY, NEXT_ITEM
from ziggurat.features.schema import Schema
from ziggurat.models import ModelConfig
from ziggurat.models.contract.reads import Reads, reads_of

_RANKER = "ziggurat train table_sequence_ranker ranks the candidates of events by their labels"
_NEXT = "ziggurat train table_hstu (or table_sasrec) finds the next item of events without labels"
_SAMPLES = "ziggurat train table_dlrm learns from rows that are samples"
_GUIDE = "see docs/guides/long-histories.md"


def check_events(schema: Schema, *, model: ModelConfig) -> None:
    """Refuse a schema with [events] for a model of samples, and one without for a model of events.

    Raises:
        SchemaError: they do not go together; names the recipe that fits.
    """
    reads = reads_of(model)
    labels = [label.name for label in schema.labels]
    if schema.events is None:
        made_by_hand = any(feature.name == HISTORY for feature in schema.features)
        if reads is not None and reads.is_of_events and not made_by_hand:
            wanted = "[events]" if reads is Reads.NEXT_ITEMS else "[events] and a [[label]]"
            raise _wrong(model, f"a schema with {wanted}", "no [events]", f"add {wanted} to it: {_GUIDE}", _SAMPLES)
    elif reads is Reads.NEXT_ITEMS:
        if labels and NEXT_ITEM not in labels:
            found = f"labels {', '.join(labels)}"
            way_out = f"take each [[label]] out of the schema: {_NEXT}"
            raise _wrong(
                model, "a schema with [events] and no labels: what comes next is asked", found, _RANKER, way_out
            )
    elif reads is Reads.CANDIDATES:
        if not labels:
            way_out = f"add a [[label]], such as what was bought: {_GUIDE}"
            raise _wrong(model, "a schema with [events] and a [[label]]", "[events] and no labels", _NEXT, way_out)
    elif reads is not None and not reads.learns_from_events:
        way_out = "take [events] out of the schema: each row is then a sample"
        expected = "a schema of samples: this model reads no histories"
        raise _wrong(model, expected, "a schema with [events]", _RANKER if labels else _NEXT, way_out)


def _wrong(model: ModelConfig, expected: str, found: str, *ways_out: str) -> SchemaError:
    where = f"the schema, for model {model.kind!r}"
    return SchemaError(expected=expected, found=found, where=where, ways_out=ways_out)
