"""Jagged parts of a batch: lists, sequences, and features whose values repeat from sample to sample.

    JaggedRows      one list a sample and feature, all rows one after the other, and offsets that cut them
    SequenceGroup   kinds of information on the same events, which share one set of offsets
    RepeatedRows    features that repeat together: every distinct combination once, and which one each sample has

The last is the grouped form of inverse-keyed jagged tensors (Zhao et al., "RecD: deduplication for end-to-end deep
learning recommendation model training infrastructure", MLSys 2023, arXiv 2211.05239): U distinct *slices*, and one
`inverse` (B,) for the whole group.

    sample   0       1       2       3                     slices   0       1
    history  [7 4]   [7 4]   [9]     [7 4]          ──►    history  [7 4]   [9]        inverse = [0, 0, 1, 0]
    tags     [2]     [2]     []      [2]                   tags     [2]     []
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64
from torch import Tensor


def offsets_of(lengths: Tensor) -> Tensor:
    """Return where lists of these lengths begin, one after the other, and where the last one ends: (n + 1,) int64."""
    offsets = lengths.new_zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


@dataclass(frozen=True, slots=True)
class ListSizes:
    """Sizes of lists that lie on a GPU, known to the host from the copy of the batch that it kept.

    Args:
        num_rows: of the lists of all samples together.
        longest: no sample has a longer list.
        longer: how many lists have more than t rows, t = 0 … longest − 1; None where nobody has counted.
    """

    num_rows: int
    longest: int
    longer: tuple[int, ...] | None = None

    @staticmethod
    def of(lengths_B: Int64[Tensor, "B"]) -> ListSizes:
        """The sizes of lists of these lengths, in host memory."""
        # bincount counts lists by their length; its running sum up to t, those of at most t rows. A list of n rows is
        # longer than t for n values of t, so that these counts add up to all rows.
        longer = (len(lengths_B) - torch.bincount(lengths_B).cumsum(0)[:-1]).tolist()
        return ListSizes(sum(longer), len(longer), tuple(longer))


@dataclass(frozen=True, slots=True)
class JaggedRows:
    """Lists of rows, feature-major.

    Feature j of sample b is `values[offsets[j·B + b] : offsets[j·B + b + 1]]`.

    Args:
        values: rows of all lists.
        offsets: where each list begins, and where the last one ends.
        num_rows: rows of all lists of each feature, where whoever made this was told; None: the offsets know.
        filled: () int64, how many of `values` are rows of lists, where there is room for more; None: all of them.
    """

    values: Int64[Tensor, "N"]
    offsets: Int64[Tensor, "J*B+1"]
    num_rows: tuple[int, ...] | None = None
    filled: Int64[Tensor, ""] | None = None

    @staticmethod
    def empty() -> JaggedRows:
        """No features at all."""
        return JaggedRows(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    def lengths(self, *, num_features: int) -> Int64[Tensor, "J B"]:
        """Rows of every list."""
        return self.offsets.diff().view(num_features, -1)

    def rows(self, first: int, last: int, *, batch_size: int, bounds: Tensor | None = None) -> JaggedRows:
        """The lists of samples `first` to `last`; values are copied.

        Args:
            first: sample.
            last: sample behind the last one.
            batch_size: samples that there are.
            bounds: equal to `offsets`, in host memory, where those are not.
        """
        num_features = (len(self.offsets) - 1) // batch_size if batch_size else 0
        if num_features == 0:
            return JaggedRows(self.values, self.offsets[:1])
        lengths_JB = self.offsets.diff().view(num_features, batch_size)[:, first:last]
        bounds = self.offsets if bounds is None else bounds
        # Feature-major: the bounds of one sample lie batch_size apart.
        begins = bounds[first::batch_size][:num_features].tolist()
        ends = bounds[last::batch_size][:num_features].tolist()
        values = [self.values[begin:end] for begin, end in zip(begins, ends, strict=True)]
        return JaggedRows(torch.cat(values), offsets_of(lengths_JB.reshape(-1)))

    def take(self, samples_S: Int64[Tensor, "S"], *, batch_size: int, num_rows: int | None = None) -> JaggedRows:
        """The lists of these samples, in this order, any number of times each; values are copied.

        Args:
            samples_S: numbers from 0 to the batch size - 1.
            batch_size: samples that there are.
            num_rows: of the result, where the host knows it; else it waits for a GPU to say.
        """
        num_features = (len(self.offsets) - 1) // batch_size if batch_size else 0
        if num_features == 0:
            return JaggedRows(self.values, self.offsets[:1])
        lengths = self.offsets.diff().view(num_features, batch_size)[:, samples_S].reshape(-1)
        starts = self.offsets[:-1].view(num_features, batch_size)[:, samples_S].reshape(-1)
        offsets = offsets_of(lengths)
        at_N = torch.arange(int(offsets[-1]) if num_rows is None else num_rows, device=offsets.device)
        # Without output_size, the host would wait for a GPU to count the rows.
        at_N += (starts - offsets[:-1]).repeat_interleave(lengths, output_size=len(at_N))
        return JaggedRows(self.values[at_N], offsets)

    def of(self, feature: int, *, batch_size: int, bounds: Tensor | None = None) -> JaggedRows:
        """The lists of one feature (views), their offsets from 0; `bounds` as in `rows`."""
        first = feature * batch_size
        last = (feature + 1) * batch_size
        bounds = self.offsets if bounds is None else bounds
        offsets = self.offsets[first : last + 1]
        return JaggedRows(self.values[int(bounds[first]) : int(bounds[last])], offsets - offsets[0])

    @staticmethod
    def stacked(parts: Sequence[tuple[JaggedRows, int]]) -> JaggedRows:
        """The lists of several batches of the same features, given with their sizes, one batch after the other."""
        full = [(rows, size) for rows, size in parts if size]
        num_features = (len(full[0][0].offsets) - 1) // full[0][1] if full else 0
        # Without features there are no lists to stack, and any part stands for the result.
        if not num_features:
            return parts[0][0]
        # Feature-major: every size-th offset is where the lists of a feature begin.
        bounds = [rows.offsets[::size].tolist() for rows, size in full]
        values = [
            rows.values[bound[feature] : bound[feature + 1]]
            for feature in range(num_features)
            for (rows, _), bound in zip(full, bounds, strict=True)
        ]
        lengths = torch.cat([rows.lengths(num_features=num_features) for rows, _ in full], dim=1)
        return JaggedRows(torch.cat(values), offsets_of(lengths.reshape(-1)))

    @staticmethod
    def joined(parts: list[JaggedRows]) -> JaggedRows:
        """Features one after the other, all of the same samples."""
        if not parts:
            return JaggedRows.empty()
        lengths = torch.cat([part.offsets.diff() for part in parts])
        return JaggedRows(torch.cat([part.values for part in parts]), offsets_of(lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceGroup:
    """Sequences of events that share their lengths: ids, actions, times, side information.

    Event t of sequence s is `values[name][offsets[s] + t]`. Without `inverse` sequence s is that of sample s.

    Args:
        values: one tensor for each kind of information; first axis N, all events one after the other.
        offsets: (S + 1,) where each sequence begins; S = B without `inverse`.
        inverse: (B,) the sequence of each sample, where equal sequences are kept once; None: one a sample.
    """

    values: dict[str, Tensor]
    offsets: Int64[Tensor, "S+1"]
    inverse: Int64[Tensor, "B"] | None = None

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return len(self.offsets) - 1 if self.inverse is None else len(self.inverse)

    def expanded(self) -> SequenceGroup:
        """The same with one sequence a sample and no `inverse`: what it means, written out."""
        if self.inverse is None:
            return self
        return self.take(self.inverse)

    def rows(self, first: int, last: int) -> SequenceGroup:
        """The sequences of samples `first` to `last`; those that only other samples have are left out."""
        if self.inverse is None:
            begin = int(self.offsets[first])
            end = int(self.offsets[last])
            values = {name: value[begin:end] for name, value in self.values.items()}
            return SequenceGroup(values=values, offsets=self.offsets[first : last + 1] - begin)
        # Numbered anew: sequences that none of these samples has are not carried along.
        kept, inverse = torch.unique(self.inverse[first:last], return_inverse=True)
        return replace(self.take(kept), inverse=inverse)

    def take(self, sequences_S: Int64[Tensor, "S"]) -> SequenceGroup:
        """The sequences of these numbers, in this order, and no `inverse`."""
        lengths_S = self.offsets.diff()[sequences_S]
        offsets = offsets_of(lengths_S)
        # How far each sequence moves: event t of the result is event t + shift of its sequence here.
        shift_S = self.offsets[sequences_S] - offsets[:-1]
        num_events = int(offsets[-1])
        shift_N = shift_S.repeat_interleave(lengths_S, output_size=num_events)
        events_N = torch.arange(num_events, device=offsets.device) + shift_N
        return SequenceGroup(values={name: value[events_N] for name, value in self.values.items()}, offsets=offsets)


MOMENT = "time"  # the one value of a group of moments


def moments_group(times: Int64[Tensor, "N"], offsets: Int64[Tensor, "B+1"]) -> SequenceGroup:
    """Times of samples, as a batch holds them."""
    return SequenceGroup(values={MOMENT: times}, offsets=offsets)


@dataclass(frozen=True, slots=True)
class FeatureGroup:
    """Features that are deduplicated together.

    Args:
        single: positions in `InputSpec.single`, rising.
        jagged: positions in `InputSpec.jagged`, rising.
    """

    single: tuple[int, ...] = ()
    jagged: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRows:
    """Features that repeat together, each distinct combination of their values once. See the module's docstring.

    Args:
        features: which ones.
        single: (s, U) rows of the features with one row a sample.
        jagged: lists of the others, for U slices.
        inverse: (B,) the slice of each sample.
    """

    features: FeatureGroup
    single: Int64[Tensor, "s U"]
    jagged: JaggedRows
    inverse: Int64[Tensor, "B"]

    @property
    def num_slices(self) -> int:
        """Distinct combinations U."""
        return self.single.shape[1]

    @property
    def batch_size(self) -> int:
        """Number of samples B."""
        return len(self.inverse)

    def lists(self, position: int, *, bounds: Tensor | None = None) -> JaggedRows:
        """The lists of the feature at this position of `InputSpec.jagged`, one a slice; `bounds` as in `rows`."""
        return self.jagged.of(self.features.jagged.index(position), batch_size=self.num_slices, bounds=bounds)

    def rows(self, first: int, last: int) -> RepeatedRows:
        """Samples `first` to `last`; slices that only other samples have are left out."""
        return self._of_samples(self.inverse[first:last])

    def take(self, samples_S: Int64[Tensor, "S"]) -> RepeatedRows:
        """These samples, in this order; slices that only other samples have are left out."""
        return self._of_samples(self.inverse[samples_S])

    def _of_samples(self, inverse_S: Tensor) -> RepeatedRows:
        # Numbered anew: slices that none of these samples has are not carried along.
        kept, inverse = torch.unique(inverse_S, return_inverse=True)
        return replace(
            self,
            single=self.single[:, kept],
            jagged=self.jagged.take(kept, batch_size=self.num_slices),
            inverse=inverse,
        )
