"""Batch: the samples of one step, as tensors. What every layer above the data speaks.

Features with one row a sample lie feature-major in one matrix, so the common path (Criteo has 26 of them) has no
offsets at all. Lists are *jagged*: all rows one after the other, feature-major, and offsets that cut them.

    single   feature  sample 0  1  2          jagged   feature  sample 0  sample 1  sample 2
             user         [ 7  4  7 ]                  genres       [5 9]     []        [3]
             item         [ 3  8  5 ]                  tags         [2]       [2 6]     []

    single = [[7, 4, 7], [3, 8, 5]]           values  = [5, 9, 3, 2, 2, 6]
                                              offsets = [0, 2, 2, 3, 4, 6, 6]   (num features · batch size + 1)

Sequences that are read event by event, not pooled, come in groups that share offsets: the ids of a history, what was
done with them, when, and what is known of each item all have the same lengths, so one set of offsets cuts them all.
Equal histories of several samples may be kept once: `inverse` then says which one belongs to each sample. Sources of
your own fill `sequences`; a schema's `Sequence` features are lists in `jagged`, and what a model gets of those that are
not pooled is in `Embedded.sequences`. Its `Moments` come as a group of their own, with the one value `time`.

    history   sample 0      1    2        offsets = [0, 2, 3]     (unique sequences + 1)
    item      [ 7 4 ]     [ 9 ]  = 0      inverse = [0, 1, 0]     (one entry a sample)
    action    [ 1 2 ]     [ 1 ]  = 0

Features whose values repeat from sample to sample may be kept once too: `repeated` holds groups of them, each with its
distinct combinations and one inverse (`jagged.py` draws it; `batches/repeats.py` finds them). Their lists are then not
in `jagged`; `single` has all its features all the same, a row a sample costs little. `expanded` writes everything out.

A batch knows its tensors by name (`tensors`): whatever moves, stores or counts them asks for those, so that a new part
of a batch reaches all of them. `map` makes the same batch of other tensors, `rows` one of fewer samples.
Loaders of the package make valid batches. `validate_batch` checks others: trainers call it for each batch of a source
of your own, and nothing inside a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from ziggurat.features.batches.checks import validate_batch
from ziggurat.features.batches.packed import HostCopy, pack
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import JaggedRows, ListSizes, RepeatedRows, SequenceGroup, moments_group

__all__ = ["Batch", "JaggedRows", "RepeatedRows", "SequenceGroup", "validate_batch"]

NO_GROUP = 0  # the group of rows that have none: such rows are of nobody, and not of one user


@dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Batch:
    """Samples of one step; the order of columns is that of an `InputSpec`.

    Args:
        dense: (B, N) numbers after their transforms.
        single: (S, B) rows, feature-major.
        jagged: lists of rows for J features; those in `repeated` are not among them.
        vectors: one (B, dim) tensor for each vector feature, by name; of a history of vectors (B, words) int32, see
            `VectorHistory`.
        sequences: groups of sequences that are not pooled, by name.
        repeated: groups of features of which each distinct combination of values is kept once; see `expanded`.
        labels: (B, L), FP64 where one is a number (`InputSpec.has_number_labels`); empty second axis when predicting.
        weights: (B,) sample weights, or None.
        groups: (B,) group of each sample for GAUC, `NO_GROUP` where it is missing, or None.
        row_ids: (B,) position of each sample over all raw files in order; the sample ledger hashes them.
        extras: whatever else a model or loss reads, by name; first axis B (scores of a teacher, for example).
        host: of a batch on a GPU, what it was copied from: asking there for sizes waits for nothing (`on_host`).

    Example:
        >>> from ziggurat.testing.batches import random_batch, small_inputs
        >>> batch = random_batch(small_inputs(num_dense=3, num_single=2), 5)
        >>> batch.dense.shape, batch.single.shape, batch.rows(0, 2).batch_size
        (torch.Size([5, 3]), torch.Size([2, 5]), 2)
    """

    dense: Float32[Tensor, "B N"]
    single: Int64[Tensor, "S B"]
    jagged: JaggedRows = field(default_factory=JaggedRows.empty)
    vectors: dict[str, Float32[Tensor, "B D"] | Int32[Tensor, "B W"]] = field(default_factory=dict)
    sequences: dict[str, SequenceGroup] = field(default_factory=dict)
    repeated: tuple[RepeatedRows, ...] = ()
    labels: Float[Tensor, "B L"]
    weights: Float32[Tensor, "B"] | None = None
    groups: Int64[Tensor, "B"] | None = None
    row_ids: Int64[Tensor, "B"]
    extras: dict[str, Tensor] = field(default_factory=dict)
    host: HostCopy | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in self.tensors().items() if value.numel())
        return f"Batch({self.batch_size:,} samples on {self.dense.device}: {sizes})"

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return self.dense.shape[0]

    @property
    def on_host(self) -> Batch | None:
        """A batch in host memory whose rows are those of this one; itself there, None where nobody kept one."""
        if self.single.device.type == "cpu":
            return self
        # Only where the parts are still those that were copied: a batch that somebody changed with `replace` carries
        # the host copy of the old one along.
        kept = self.host
        return kept.batch if kept is not None and kept.single is self.single and kept.lists is self.jagged else None

    @staticmethod
    def empty(inputs: InputSpec) -> Batch:
        """A batch of no samples."""
        rows = torch.empty(0, dtype=torch.int64)
        return Batch(
            dense=torch.empty(0, len(inputs.dense)),
            single=rows.view(len(inputs.single), 0),
            jagged=JaggedRows.empty(),
            vectors=zero_vectors(inputs, 0),
            sequences={spec.name: moments_group(rows, rows.new_zeros(1)) for spec in inputs.moments},
            labels=torch.empty(0, len(inputs.labels), dtype=_label_dtype(inputs)),
            weights=torch.empty(0) if inputs.has_weights else None,
            groups=rows if inputs.has_groups else None,
            row_ids=rows,
            extras={spec.name: torch.empty((0, spec.dim) if spec.dim else 0) for spec in inputs.extras},
        )

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with `change` applied to each of its tensors."""

        def maybe(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        def each(named: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: change(tensor) for name, tensor in named.items()}

        return Batch(
            dense=change(self.dense),
            single=change(self.single),
            jagged=JaggedRows(change(self.jagged.values), change(self.jagged.offsets)),
            vectors=each(self.vectors),
            sequences={
                name: SequenceGroup(
                    values=each(group.values), offsets=change(group.offsets), inverse=maybe(group.inverse)
                )
                for name, group in self.sequences.items()
            },
            repeated=tuple(
                replace(
                    group,
                    single=change(group.single),
                    jagged=JaggedRows(change(group.jagged.values), change(group.jagged.offsets)),
                    inverse=change(group.inverse),
                )
                for group in self.repeated
            ),
            labels=change(self.labels),
            weights=maybe(self.weights),
            groups=maybe(self.groups),
            row_ids=change(self.row_ids),
            extras=each(self.extras),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the batch by a name of its own, as in `vectors.title` or `sequences.history.item`."""
        named: dict[str, Tensor | None] = {
            "dense": self.dense,
            "single": self.single,
            "jagged.values": self.jagged.values,
            "jagged.offsets": self.jagged.offsets,
            **{f"vectors.{name}": value for name, value in self.vectors.items()},
            "labels": self.labels,
            "weights": self.weights,
            "groups": self.groups,
            "row_ids": self.row_ids,
            **{f"extras.{name}": value for name, value in self.extras.items()},
        }
        for name, group in self.sequences.items():
            named |= {f"sequences.{name}.{kind}": value for kind, value in group.values.items()}
            named |= {f"sequences.{name}:offsets": group.offsets, f"sequences.{name}:inverse": group.inverse}
        for number, group in enumerate(self.repeated):
            named |= {f"repeated.{number}.single": group.single, f"repeated.{number}.inverse": group.inverse}
            named |= {f"repeated.{number}.values": group.jagged.values}
            named |= {f"repeated.{number}.offsets": group.jagged.offsets}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def rows(self, first: int, last: int) -> Batch:
        """Samples `first` to `last` as a batch; what is feature-major or jagged is copied, the rest are views."""
        samples = slice(first, last)
        kept = self.on_host
        single = self.single[:, samples].contiguous()
        bounds = None if kept is None else kept.jagged.offsets
        jagged = self.jagged.rows(first, last, batch_size=self.batch_size, bounds=bounds)
        return Batch(
            dense=self.dense[samples],
            single=single,
            jagged=jagged,
            vectors={name: vector[samples] for name, vector in self.vectors.items()},
            sequences={name: group.rows(first, last) for name, group in self.sequences.items()},
            repeated=tuple(group.rows(first, last) for group in self.repeated),
            labels=self.labels[samples],
            weights=None if self.weights is None else self.weights[samples],
            groups=None if self.groups is None else self.groups[samples],
            row_ids=self.row_ids[samples],
            extras={name: value[samples] for name, value in self.extras.items()},
            host=None if kept is None or kept is self else HostCopy(kept.rows(first, last), single, jagged),
        )

    def take(self, samples_S: Int64[Tensor, "S"]) -> Batch:
        """These samples as a batch, in this order, any number of times each; everything is copied."""
        return Batch(
            dense=self.dense[samples_S],
            single=self.single[:, samples_S],
            jagged=self.jagged.take(samples_S, batch_size=self.batch_size),
            vectors={name: vector[samples_S] for name, vector in self.vectors.items()},
            sequences={name: group.expanded().take(samples_S) for name, group in self.sequences.items()},
            repeated=tuple(group.take(samples_S) for group in self.repeated),
            labels=self.labels[samples_S],
            weights=None if self.weights is None else self.weights[samples_S],
            groups=None if self.groups is None else self.groups[samples_S],
            # Row ids stay in host memory when a batch travels to a GPU.
            row_ids=self.row_ids[samples_S.to(self.row_ids.device)],
            extras={name: value[samples_S] for name, value in self.extras.items()},
        )

    @staticmethod
    def stacked(parts: Sequence[Batch]) -> Batch:
        """Batches of the same inputs, one after the other; none of them has `sequences`, none is deduplicated."""
        assert parts, "at least one batch"
        assert not any(part.sequences or part.repeated for part in parts), "expanded by who stacks them"
        first = parts[0]
        weights = [part.weights for part in parts if part.weights is not None]
        groups = [part.groups for part in parts if part.groups is not None]
        assert len(weights) in (0, len(parts)), "batches of the same inputs"
        assert len(groups) in (0, len(parts)), "batches of the same inputs"
        return Batch(
            dense=torch.cat([part.dense for part in parts]),
            single=torch.cat([part.single for part in parts], dim=1),
            jagged=JaggedRows.stacked([(part.jagged, part.batch_size) for part in parts]),
            vectors={name: torch.cat([part.vectors[name] for part in parts]) for name in first.vectors},
            labels=torch.cat([part.labels for part in parts]),
            weights=torch.cat(weights) if weights else None,
            groups=torch.cat(groups) if groups else None,
            row_ids=torch.cat([part.row_ids for part in parts]),
            extras={name: torch.cat([part.extras[name] for part in parts]) for name in first.extras},
        )

    def lists(self, position: int) -> tuple[JaggedRows, Int64[Tensor, "B"] | None]:
        """The lists of the feature at this position of `InputSpec.jagged`, and which one each sample has.

        The second is None where there is one list a sample.
        """
        kept = self.on_host
        for number, group in enumerate(self.repeated):
            if position in group.features.jagged:
                bounds = None if kept is None else kept.repeated[number].jagged.offsets
                return group.lists(position, bounds=bounds), group.inverse
        bounds = None if kept is None else kept.jagged.offsets
        # Lists of deduplicated features are not in `jagged`: the others stand closer together there.
        gone = sum(at < position for group in self.repeated for at in group.features.jagged)
        return self.jagged.of(position - gone, batch_size=self.batch_size, bounds=bounds), None

    def sizes(self, position: int) -> ListSizes | None:
        """Return sizes of a feature's lists on a GPU; None in host memory, which can be asked, and without a copy."""
        kept = self.on_host
        if kept is None or kept is self:
            return None
        lists, inverse_B = kept.lists(position)
        lengths = lists.offsets.diff()
        return ListSizes.of(lengths if inverse_B is None else lengths[inverse_B])

    def expanded(self) -> Batch:
        """The same batch without `repeated`, every list where it belongs: what a deduplicated batch means."""
        if not self.repeated:
            return self
        size = self.batch_size
        kept = self.on_host
        if not size:
            return replace(self, repeated=())
        found: dict[int, JaggedRows] = {}
        for group in self.repeated:
            for position in group.features.jagged:
                sizes = self.sizes(position)  # of a batch on a GPU that the host knows
                number = None if sizes is None else sizes.num_rows
                lists = self.lists(position)[0]
                found[position] = lists.take(group.inverse, batch_size=group.num_slices, num_rows=number)
        num_plain = (len(self.jagged.offsets) - 1) // size
        bounds = None if kept is None else kept.jagged.offsets
        # Those that were never deduplicated fill the gaps, in their order.
        plain = iter([self.jagged.of(index, batch_size=size, bounds=bounds) for index in range(num_plain)])
        parts = [found[at] if at in found else next(plain) for at in range(num_plain + len(found))]
        return replace(self, jagged=JaggedRows.joined(parts), repeated=())

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device (no copy where it already is); `row_ids` stay, only the host reads them.

        To a GPU everything travels in one copy, ids in 32 bits where they fit; see `batches/packed.py`.
        """
        device = torch.device(device)
        if device == self.dense.device:
            return self
        # Locked memory is copied without the host waiting for it.
        if device.type == "cuda" and self.dense.device.type == "cpu":
            return pack(self, is_locked=torch.cuda.is_available()).to(device)
        # Row ids are for the ledger and for errors, which only the host asks for.
        return self.map(lambda tensor: tensor if tensor is self.row_ids else tensor.to(device, non_blocking=True))


def zero_vectors(
    inputs: InputSpec, size: int, *, device: torch.device | str = "cpu"
) -> dict[str, Float32[Tensor, "B D"] | Int32[Tensor, "B W"]]:
    """Return vectors of zeros for so many samples, and histories of none, as `Batch.vectors` holds them."""
    return {
        spec.name: torch.zeros(
            size, spec.width, dtype=torch.float32 if spec.history is None else torch.int32, device=device
        )
        for spec in inputs.vectors
    }


def _label_dtype(inputs: InputSpec) -> torch.dtype:
    return torch.float64 if inputs.has_number_labels else torch.float32
