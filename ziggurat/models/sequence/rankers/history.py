"""History: what a ranker of one history reads: lists side by side, their times, and the same things of the candidate.

    lists     items       [ i1  i2  i3 ]      targets   item       i*       event      e_t = [items_t, brands_t, acts_t]
              brands      [ b1  b2  b3 ]                brand      b*       candidate  q   = [i*,      b*,       0     ]
    actions   acts        [ a1  a2  a3 ]
    times     seen_at     [ t1  t2  t3 ]      asked_at  now        t*       age        max(0, t* − t_t)

Lists of one history describe the same events, so they have one length in every sample; this is checked in every batch.
Events stand in order of time, the latest last. All vectors stay jagged: nothing is padded.

What needs more than the shapes of the lists (ages; which events a later layer keeps) is found with the batch, in
`Model.further`, so that the dense network has one graph for all batches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingTables
from ziggurat.errors import ConfigError, DataError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.contract.model import Embedded, Unpooled
from ziggurat.models.sequence.next_item_inputs import question_times
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.attention.time_buckets import time_buckets
from ziggurat.typed import checked

AGES = "ages"  # in `Embedded.named`: of every event


@dataclass(frozen=True, kw_only=True)
@checked
class HistoryInput:
    """Lists that are the history, and the features of the candidate that belong to them.

    Args:
        lists: list features that describe the same events; () for every ordered one that shares its table with a
            feature of one row a sample.
        targets: for each list the feature that says the same of the candidate; () for the first that shares its table.
        actions: lists that say what was done with an item; the candidate has nothing of the kind.
        times: feature of kind moments with the time of each event; "" for none.
        asked_at: feature of kind moments with one time, that of the question; "" for the time of the latest event.
    """

    lists: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    actions: tuple[str, ...] = ()
    times: str = ""
    asked_at: str = ""

    def __post_init__(self) -> None:
        if (self.targets and len(self.targets) != len(self.lists)) or (self.asked_at and not self.times):
            raise ConfigError(
                expected="a target for each list, and times where there is asked_at",
                found=f"lists {self.lists}, targets {self.targets}, times {self.times!r}, asked_at {self.asked_at!r}",
                where="settings of the model, history",
                ways_out="name them: --model.history.lists LIST,LIST --model.history.targets FEATURE,FEATURE",
            )

    def names(self, inputs: InputSpec, *, model: str) -> tuple[str, ...]:
        """Every list of the history, actions last; see `pairs_of`."""
        pairs = pairs_of(self.lists, self.targets, inputs=inputs, where=f"{model}, model.history")
        return (*(name for name, _ in pairs), *self.actions)


def pairs_of(
    lists: tuple[str, ...], targets: tuple[str, ...], *, inputs: InputSpec, where: str
) -> list[tuple[str, str]]:
    """Every pair of a list and the feature of the candidate in the same table.

    Args:
        lists: () for every ordered list that shares its table with a feature of one row a sample.
        targets: () for the first such feature of each.
        inputs: of the model.
        where: the settings, for the error.

    Raises:
        ConfigError: there is no list, a name is unknown, or a target is not in the list's table.
    """
    jagged = {each.name: each for each in inputs.jagged}
    single = {each.name: each.table for each in inputs.single}
    names = lists or tuple(each.name for each in inputs.jagged if each.ordered and each.table in single.values())
    given = targets or tuple(
        next((other for other, table in single.items() if name in jagged and table == jagged[name].table), "")
        for name in names
    )
    pairs = list(zip(names, given, strict=True))
    bad = [
        f"{name} → {target or 'none'}"
        for name, target in pairs
        if name not in jagged or target not in single or jagged[name].table != single[target]
    ]
    if bad or not pairs:
        raise ConfigError(
            expected="histories (list features), each with a target of one row a sample in the same table",
            found=", ".join(bad) or f"no ordered list that shares a table, among {', '.join(jagged) or 'no lists'}",
            where=where,
            ways_out=("name them", "give the history's feature the target's table in the schema", "take another model"),
        )
    return pairs


def refuse_unread(names: set[str], inputs: InputSpec, *, model: str) -> None:
    """Refuse un-pooled lists that a model does not read.

    Args:
        names: lists that it reads.
        inputs: of the model.
        model: its name, for the error.

    Raises:
        ConfigError: there are others.
    """
    others = [spec.name for spec in inputs.sequences if spec.name not in names]
    if others:
        raise ConfigError(
            expected=f"un-pooled lists that {model} attends to: {', '.join(sorted(names))}",
            found=f"pooling = none for {', '.join(others)}",
            where="features of the schema",
            ways_out=("name them as a history in the model's settings", "set pooling = mean or sum in the schema"),
        )


class HistoryRankerConfig:
    """Shared settings of rankers of one history; a config derives from them, and names its model.

    Attributes:
        embedding_dim: D, columns of each table.
        history: which lists are the history.
    """

    embedding_dim: int
    history: HistoryInput

    def model_class(self) -> type[Any]:
        """The class of the model, which is built as `Model(config, inputs=…, embeddings=…)`."""
        raise NotImplementedError

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else D."""
        return inputs.table_columns(self.embedding_dim)

    def unpooled(self, inputs: InputSpec) -> tuple[str, ...]:
        """The lists of the history, whatever the schema says."""
        return self.history.names(inputs, model=self.model_class().__name__)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> Any:
        """The model on tables of these columns."""
        del towers  # none: these configs have no `tower_module`
        return self.model_class()(self, inputs=inputs, embeddings=embeddings)


class History:
    """Reads the events of a history, and the candidate as one of them.

    Args:
        config: which lists.
        inputs: of the model, whose lists are un-pooled already.
        columns: of every table.
        model: its name, for errors.
        beside: further lists of the model that have a row for each event.

    Attributes:
        event_dim: E, numbers of an event.
        target_dim: those of them that a candidate has.
        max_length: n, events of the longest history: a constant of the model.
        joined: all that has as many rows as the history has events.

    Raises:
        ConfigError: lists that cannot be one history, or that are no features.
    """

    def __init__(
        self,
        config: HistoryInput,
        *,
        inputs: InputSpec,
        columns: dict[str, int],
        model: str,
        beside: tuple[str, ...] = (),
    ) -> None:
        self.config = config
        self.names = config.names(inputs, model=model)
        pairs = pairs_of(config.lists, config.targets, inputs=inputs, where=f"{model}, model.history")
        specs = {each.name: each for each in inputs.jagged}
        self.max_length = _checked_length(config, (*self.names, *beside), pairs, inputs=inputs)
        refuse_unread({*self.names, *beside}, inputs, model=model)
        self.joined = (*self.names, *beside, *([config.times] if config.times else []))
        dims = {name: columns[specs[name].table] for name in self.names}
        self.event_dim = sum(dims.values())
        self.target_dim = sum(dims[name] for name, _ in pairs)
        self._at = {name: [spec.name for spec in inputs.jagged].index(name) for name in (*self.names, *beside)}
        self._first = next(iter(self._at.values()))
        begins = {}
        place = 0
        for spec in inputs.fields:
            # Columns of pooled fields stand in the order of the inputs; candidates are read from there.
            begins[spec.name] = place
            place += columns[spec.table]
        self._columns = [(begins[target], dims[name]) for name, target in pairs]

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """The age of every event, where the history has times; refuses lists that are no history.

        Raises:
            DataError: lists of one history differ in length, or are longer than the features allow.
        """
        offsets_B1 = self.offsets_of(batch)
        return {AGES: self._ages(batch, offsets_B1)} if self.config.times else {}

    def offsets_of(self, batch: Batch) -> Int64[Tensor, "B+1"]:
        """Return where each sample's events begin; check all lists, in the copy on the host where there is one."""
        self._check(batch.on_host or batch)
        return self._offsets(batch, self._first)

    def lengths_of(self, batch: Batch) -> Int64[Tensor, "B"]:
        """Events of each sample, in host memory where it has a copy of the batch."""
        return self._offsets(batch.on_host or batch, self._first).diff()

    def _check(self, batch: Batch) -> None:
        """Refuse lists that are no history."""
        found = [self._offsets(batch, at) for at in self._at.values()]
        for name, other in zip(self._at, found, strict=True):
            if not torch.equal(other, found[0]):
                # Offsets differ first behind the sample whose lists do.
                sample = int((other != found[0]).nonzero()[0]) - 1
                raise DataError(
                    expected=f"as many rows in {name!r} as in {self.names[0]!r}: both describe the same events",
                    found=f"{int(other.diff()[sample])} and {int(found[0].diff()[sample])}",
                    where=f"sample {sample} of a batch (row {int(batch.row_ids[sample])} of the data)",
                    ways_out=("name the lists of one history: --model.history.lists", "mend the data"),
                )
        lengths = found[0].diff()
        if len(lengths) and int(lengths.max()) > self.max_length:
            raise DataError(
                expected=f"at most {self.max_length} events, the max_length of {self.names[0]!r}",
                found=str(int(lengths.max())),
                where="lists of a batch",
                ways_out=("cut the lists to their latest rows", "raise max_length in the schema"),
            )

    def events(self, embedded: Embedded) -> Unpooled:
        """E numbers for each event, one list a sample."""
        parts = [embedded.sequences[name].expanded() for name in self.names]
        if len(parts) == 1:
            return parts[0]
        return replace(parts[0], values=torch.cat([part.values for part in parts], dim=1))

    def target(self, embedded: Embedded) -> Float[Tensor, "B T"]:
        """Return the part of an event's vector that a candidate has."""
        return torch.cat([embedded.fields[:, begin : begin + dim] for begin, dim in self._columns], dim=1)

    def candidate(self, embedded: Embedded) -> Float[Tensor, "B E"]:
        """The candidate as an event: zeros for what was done."""
        return nn.functional.pad(self.target(embedded), (0, self.event_dim - self.target_dim))

    def _offsets(self, batch: Batch, position: int) -> Int64[Tensor, "B+1"]:
        lists, inverse_B = batch.lists(position)
        if inverse_B is None:
            return lists.offsets
        # Slices are shared, so each sample takes the length of its slice.
        lengths_B = lists.offsets.diff()[inverse_B]
        return nn.functional.pad(lengths_B.cumsum(0), (1, 0))

    def _ages(self, batch: Batch, offsets_B1: Int64[Tensor, "B+1"]) -> Int64[Tensor, "N"]:
        names = [each for each in (self.config.times, self.config.asked_at) if each]
        absent = [name for name in names if name not in batch.sequences]
        if absent:
            raise DataError(
                expected=f"times of the events: {', '.join(names)}",
                found=f"no {', '.join(absent)} in a batch",
                where="model.history.times",
                ways_out="give samples these features, of kind moments",
            )
        kept = batch.on_host
        on_host = None if kept is None else self._offsets(kept, self._first)
        names = {"times": self.config.times, "asked_at": self.config.asked_at}
        times_N, asked_B = question_times(batch, offsets_B1, on_host=on_host, **names)
        # An event later than the question counts as just now.
        return (asked_B.repeat_interleave(offsets_B1.diff(), output_size=len(times_N)) - times_N).clamp(min=0)


def _checked_length(
    config: HistoryInput, names: tuple[str, ...], pairs: list[tuple[str, str]], *, inputs: InputSpec
) -> int:
    """The longest history, the same for all that describes its events."""
    specs = {each.name: each for each in inputs.jagged}
    moments = {each.name: each.max_length for each in inputs.moments}
    unknown = [name for name in names if name not in specs]
    unknown += [name for name in (config.times, config.asked_at) if name and name not in moments]
    targets = [target for _, target in pairs]
    twice = [name for name in names if names.count(name) > 1]
    twice += [name for name, target in pairs if targets.count(target) > 1]
    lengths = {name: specs[name].max_length for name in names if name in specs}
    lengths |= {config.times: moments[config.times]} if config.times in moments else {}
    if unknown or twice or len(set(lengths.values())) > 1:
        uneven = ", ".join(f"{name} of {length}" for name, length in lengths.items())
        raise ConfigError(
            expected="one history: lists that describe the same events, each in its own way, of one max_length, and "
            "times of kind moments",
            found=", ".join(
                [
                    *(f"no feature {name!r}" for name in unknown),
                    *(f"{name!r}, which another says too" for name in twice),
                ]
            )
            or f"max_length: {uneven}",
            where="settings of the model, history",
            ways_out=(
                "name the lists of one history: --model.history.lists clicked_items,clicked_brands",
                "give all of them one max_length in the schema",
                "din reads several histories",
            ),
        )
    return next(iter(lengths.values()))


def append_rows(
    values_N: Float[Tensor, "N *X"], rows_BT: Float[Tensor, "B T *X"], *, lists: Unpooled
) -> tuple[Float[Tensor, "M *X"], Int64[Tensor, "N"], Int64[Tensor, "B T"]]:
    """Jagged rows with T more behind those of each sample; and where both stand.

    Args:
        values_N: one row for each event.
        rows_BT: what follows the events of each sample.
        lists: where samples begin among the events.
    """
    num_samples, num_rows = rows_BT.shape[:2]
    device = values_N.device
    # Sample b has the rows of the b samples before it in front.
    places_N = torch.arange(values_N.shape[0], device=device) + num_rows * lists.samples
    behind_B = lists.offsets[1:] + num_rows * torch.arange(num_samples, device=device)
    places_BT = behind_B.unsqueeze(1) + torch.arange(num_rows, device=device)
    joined = values_N.new_zeros(values_N.shape[0] + num_samples * num_rows, *values_N.shape[1:])
    joined = joined.index_copy(0, places_N, values_N)
    return joined.index_copy(0, places_BT.flatten(), rows_BT.flatten(0, 1).to(joined.dtype)), places_N, places_BT


def offsets_with(lists: Unpooled, *, num_rows: int) -> Int64[Tensor, "B+1"]:
    """Return where samples begin once `append_rows` has put rows behind each of them."""
    return lists.offsets + num_rows * torch.arange(lists.offsets.shape[0], device=lists.offsets.device)


def longest_with(lists: Unpooled, *, num_rows: int) -> int | None:
    """No sample has more once `append_rows` has put rows behind each; None where only a device knows."""
    return None if lists.longest is None else lists.longest + num_rows


def from_latest(lists: Unpooled) -> Int64[Tensor, "N"]:
    """The place of each event counted back from the latest one, which is 0."""
    events_N = torch.arange(lists.values.shape[0], device=lists.values.device)
    return lists.offsets[1:][lists.samples] - 1 - events_N


class EventPosition(StrEnum):
    """Choice of the position that an event is given."""

    AUTO = "auto"  # time where model.history.times names them, else order
    TIME = "time"  # how long before the question it was, in buckets that grow
    ORDER = "order"  # how many events before the question it was
    NONE = "none"


class PositionVectors(nn.Module):
    """A learned vector for where an event stands: by order, or by the bucket of its age; the candidate has the first.

    Buckets: ⌊ln(max(1, age)) / 0.301⌋, as the time bias of HSTU.

    Args:
        kind: not `none`.
        history: whose events.
        dim: numbers of a vector.
        num_buckets: of ages; the last one stands for everything longer.

    Raises:
        ConfigError: by time, but the history has no times.
    """

    def __init__(self, kind: EventPosition, *, history: History, dim: int, num_buckets: int) -> None:
        super().__init__()
        has_times = bool(history.config.times)
        self.by_time = kind is EventPosition.TIME or (kind is EventPosition.AUTO and has_times)
        if self.by_time and not has_times:
            raise ConfigError(
                expected="model.history.times, the feature with the times of events",
                found="none",
                where="model.positions = time",
                ways_out=("--model.history.times FEATURE, of kind moments", "--model.positions order"),
            )
        # One more than events: the candidate stands at 0.
        self.vectors = nn.Embedding(num_buckets if self.by_time else history.max_length + 1, dim)
        nn.init.trunc_normal_(self.vectors.weight, std=0.02)

    def forward(self, events: Unpooled, ages_N: Int64[Tensor, "N"] | None) -> Float[Tensor, "N D"]:
        """The vector of each event."""
        if self.by_time:
            assert ages_N is not None, "found with the batch"
            return self.vectors(time_buckets(ages_N, num_buckets=self.vectors.num_embeddings))
        # The candidate has place 0.
        return self.vectors(from_latest(events) + 1)

    def of_candidate(self, num_samples: int) -> Float[Tensor, "B D"]:
        """The vector of the candidate of each sample."""
        return self.vectors.weight[:1].expand(num_samples, -1)
