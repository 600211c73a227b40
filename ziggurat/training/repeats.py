"""Which features of the training data are deduplicated: decided once, on a batch of the data, and written down.

A batch with slices (`Batch.repeated`) saves lookups, pooling and exchange of what repeats, and costs a copy. So a group
of features is deduplicated only if a batch has at least `MIN_FACTOR` samples for each slice, measured on as many rows
as a batch has, as they lie in the files: the first ones, or where all of their lists are empty the last ones. A shuffle
of rows takes sessions apart: with it batches stay plain.

All ranks read the same rows for it and come to the same answer, and so does a run that is resumed.
"""

from __future__ import annotations

from ziggurat.data.encoded.loader import Deduplicate, Shuffle
from ziggurat.data.encoded.records import table_to_batch
from ziggurat.data.source import DataSource, LoaderSource
from ziggurat.features.batches.repeats import MIN_FACTOR, Repeats, find_groups, measure_repeats
from ziggurat.features.jagged import FeatureGroup
from ziggurat.models import Model
from ziggurat.parallel.parallelize import Parallel
from ziggurat.parallel.prioritised.choice import Exchange

_TOGETHER = (Shuffle.SESSIONS, Shuffle.SESSION_LANES)  # orders that keep the rows of a session together


def deduplicate_source(source: DataSource, model: Model, *, parallel: Parallel | None = None) -> dict[str, str]:
    """Let a source of encoded data deduplicate what pays; returns lines for the start-up report, none where unasked."""
    if not isinstance(source, LoaderSource):
        return {}
    loader = source.loader
    loader.groups = ()
    if loader.config.deduplicate is Deduplicate.OFF:
        return {"repeats": "kept: deduplicate = off"} if loader.shuffle in _TOGETHER else {}
    if loader.shuffle in (Shuffle.BUFFER, Shuffle.LANES):
        inputs = loader.dataset.inputs
        told = "kept: a shuffle of rows takes sessions apart (shuffle = session_lanes keeps their rows together)"
        return {"repeats": told} if inputs.has_sessions and inputs.jagged else {}
    if parallel is not None and parallel.topology.world_size > 1 and parallel.config.exchange is not Exchange.PLAIN:
        told = f"kept: exchange = {parallel.config.exchange.value} sends rows of samples, not of slices"
        return {"repeats": told} if loader.dataset.inputs.jagged else {}
    if not model.exploits_repeats:
        return {"repeats": f"kept: {type(model).__name__} computes nothing once for equal samples"}
    if model.draws is not None:
        return {"repeats": "kept: items are drawn for each block of samples, and stand between them"}
    inputs = loader.dataset.inputs
    sizes = loader.dataset.group_sizes
    if not any(sizes):
        return {}
    size = loader.config.batch_size
    filled = [index for index, rows in enumerate(sizes) if rows]
    batch = table_to_batch(loader.dataset.read_group(filled[0]).slice(0, size), inputs)
    if not batch.jagged.values.numel():  # files in the order of time begin with empty histories
        last = loader.dataset.read_group(filled[-1])
        batch = table_to_batch(last.slice(max(0, last.num_rows - size)), inputs)
    groups = find_groups(batch, inputs)
    loader.groups = tuple(group.features for group in groups)
    if groups:
        lines = {f"repeats {number + 1}": _line(group) for number, group in enumerate(groups)}
        return lines | _users(model, loader.groups, parallel=parallel)
    best = max((each for each in measure_repeats(batch, inputs) if each.features.jagged), key=_factor, default=None)
    if best is None:
        return {"repeats": "kept: no lists"}
    return {
        "repeats": f"kept: {best.num_samples:,} rows have {best.num_slices:,} distinct values of {best.names[0]}, "
        f"factor {best.factor:.2f}, and it pays from {MIN_FACTOR} on"
    }


def _users(model: Model, groups: tuple[FeatureGroup, ...], *, parallel: Parallel | None) -> dict[str, str]:
    """Say what computes once for equal samples: parts of the model, the exchange, and which towers."""
    used = [*model.exploits_repeats, *(model.slice_modules if model.gives_slices else ())]
    if parallel is not None:
        used.append("exchange between ranks")
    lines = {"repeats are used by": ", ".join(used)}
    transform = None if parallel is None else parallel.fields.towers
    if transform is None:
        return lines
    towers = len(transform.towers)
    on_slices = transform.slice_hops(groups).towers_on_slices()
    numbers = ", ".join(map(str, on_slices)) or "none"
    told = f"{numbers} of {towers} (from 0) compute and send slices"
    if len(on_slices) < towers:
        told += "; the others have features that do not repeat, or not together, and compute on samples"
    return lines | {"repeats in towers": told}


def _factor(repeats: Repeats) -> float:
    return repeats.factor


def _line(group: Repeats) -> str:
    names = ", ".join(group.names[:8]) + (f" and {len(group.names) - 8} more" if len(group.names) > 8 else "")
    return (
        f"{names}: {group.num_slices:,} distinct in {group.num_samples:,} rows (factor {group.factor:.2f}), "
        f"{group.num_kept:,} of {group.num_values:,} list rows kept"
    )
