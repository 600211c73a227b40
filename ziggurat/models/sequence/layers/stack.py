"""SequenceStack: layers over events one after the other, and histories whose keys and values are computed once.

    full forward     history and b candidates through all layers: (n + b) rows
    remembered       history once: keys and values of each layer are kept;
                     candidates in micro-batches: b rows through all layers, attending to what was kept
    new events       only they are computed; their keys and values are put behind what was kept

Candidates see the history and themselves only, so micro-batches change nothing: the outputs are those of the full
forward, but for the order in which products are added up. n events and b candidates in micro-batches of m cost
n²·d + b·n·d instead of (b/m)·(n + m)²·d.

Where an event is asked at the time of the next one (`AskedAt.NEXT`), that time was not known when the last event of a
history was computed; so where times are kept, that event is computed again when new ones come.

Source: M-FALCON, Zhai et al., arXiv 2402.17152, section 3.4 and Appendix H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ziggurat.errors import ConfigError, DataError
from ziggurat.features.jagged import offsets_of
from ziggurat.models.contract.model import Unpooled
from ziggurat.models.sequence.layers.layer import SequenceLayer
from ziggurat.models.sequence.layers.places import (
    AskedAt,
    Attention,
    SequencePlaces,
    asked_times,
    cut_lists,
    join_lists,
)
from ziggurat.ops.attention.choose import jagged_attention
from ziggurat.ops.attention.problem import AttentionMask, JaggedLayout, Spans


@dataclass(frozen=True, kw_only=True)
class RememberedHistories:
    """Keys and values of histories, layer by layer.

    Args:
        keys_values: of each layer, jagged like the histories.
        offsets: where histories begin.
        times: of the events, where a layer asks for them.
        last_events: (B, D) the input of each history's last event; zeros for an empty one.
    """

    keys_values: tuple[tuple[Tensor, Tensor], ...]
    offsets: Int64[Tensor, "B+1"]
    times: Int64[Tensor, "N"] | None
    last_events: Float[Tensor, "B D"]


class SequenceStack(nn.Module):
    """Layers one after the other, with one mask and one rule for times.

    Args:
        layers: HSTU layers, softmax blocks, or any other `SequenceLayer`.
        mask: context and maximum attention length of all layers.
        asked: the time that an event of a history is asked at.

    Attributes:
        attention: what layers attend with; parallelism puts one that reaches over ranks in its place.
    """

    def __init__(
        self, layers: Sequence[SequenceLayer], *, mask: AttentionMask | None = None, asked: AskedAt = AskedAt.NEXT
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.mask = AttentionMask() if mask is None else mask
        self.asked = asked
        self.attention: Attention = jagged_attention

    def forward(self, events_ND: Float[Tensor, "N D"], *, places: SequencePlaces) -> Float[Tensor, "N D"]:
        """All events through all layers.

        Args:
            events_ND: vectors of the events, sequence after sequence.
            places: from `places_of`, or made by hand.
        """
        for layer in self.layers:
            events_ND = layer(events_ND, places=places)
        return events_ND

    def encode(self, history: Unpooled, *, times: Int64[Tensor, "N"] | None = None) -> Unpooled:
        """Histories of a batch through all layers; one that several samples share, once.

        Args:
            history: what a model's `unpooled` gave, with slices or without.
            times: of its events.
        """
        places = self.places_of(history.offsets, times=times, longest=history.longest)
        return replace(history, values=self(history.values, places=places))

    def places_of(
        self,
        offsets: Int64[Tensor, "B+1"],
        *,
        times: Int64[Tensor, "N"] | None = None,
        num_targets: Int64[Tensor, "B"] | None = None,
        last: Int64[Tensor, "B"] | None = None,
        spans: Spans | None = None,
        longest: int | None = None,
    ) -> SequencePlaces:
        """Places of histories with their candidates, by this stack's mask and rule for times.

        Args:
            offsets: where sequences begin.
            times: of the events; of a candidate: when it is asked.
            num_targets: candidates at the end of each sequence.
            last: when the last event of a history without candidates is asked; None: at its own time.
            spans: of histories that are pieces of longer ones; `last` is then what comes after each piece.
            longest: no whole history is longer; None where only a device knows.

        Raises:
            DataError: times are no int64, or not one an event.
        """
        longest = longest if spans is None else None
        layout = JaggedLayout(offsets=offsets, num_targets=num_targets, mask=self.mask, spans=spans, longest=longest)
        if times is None:
            return SequencePlaces(layout=layout, attention=self.attention)
        asked = asked_times(times, offsets=offsets, asked=self.asked, last=last)
        if num_targets is not None:
            counts = offsets.diff()
            starts, lengths = (0, counts) if spans is None else (spans.query_starts, spans.lengths)
            before = (offsets[:-1] - starts).repeat_interleave(counts, output_size=len(times))
            history = (lengths - num_targets).repeat_interleave(counts, output_size=len(times))
            position = torch.arange(len(times), device=before.device) - before
            # The last event of a history and all candidates are asked at their own time.
            asked = torch.where(position >= history - 1, times, asked)
        return SequencePlaces(layout=layout, key_times=times, query_times=asked, attention=self.attention)

    def remember(
        self, events_ND: Float[Tensor, "N D"], *, offsets: Int64[Tensor, "B+1"], times: Int64[Tensor, "N"] | None = None
    ) -> tuple[Float[Tensor, "N D"], RememberedHistories]:
        """Outputs of histories, and their keys and values.

        Args:
            events_ND: vectors of the events.
            offsets: where histories begin.
            times: of the events.
        """
        lengths = offsets.diff()
        last = events_ND.new_zeros(len(lengths), events_ND.shape[1])
        # Their inputs, not their outputs: the last event may have to be computed again (`extend`).
        last[lengths > 0] = events_ND[offsets[1:][lengths > 0] - 1]
        places = self.places_of(offsets, times=times)
        kept = []
        for layer in self._layers():
            projected = layer.project(events_ND)
            kept.append((projected.k, projected.v))
            gathered = layer.attend(projected.q, projected.k, projected.v, places)
            events_ND = layer.finish(events_ND, gathered, projected.rest)
        return events_ND, RememberedHistories(keys_values=tuple(kept), offsets=offsets, times=times, last_events=last)

    def score(
        self,
        candidates_MD: Float[Tensor, "M D"],
        *,
        offsets: Int64[Tensor, "B+1"],
        histories: RememberedHistories,
        asked_at: Int64[Tensor, "B"] | None = None,
        micro_batch: int = 0,
    ) -> Float[Tensor, "M D"]:
        """Outputs of candidates behind remembered histories.

        Args:
            candidates_MD: vectors of the candidates, history after history.
            offsets: which candidates belong to which history; a history may have none.
            histories: what `remember` or `extend` gave.
            asked_at: time of each history's question; needed where histories have times.
            micro_batch: candidates of a history that are computed at once; 0: all.

        Raises:
            DataError: candidates or times do not belong to the histories.
        """
        self._check(offsets, candidates_MD, histories, asked_at)
        lengths = offsets.diff()
        outputs = torch.zeros_like(candidates_MD)
        most = int(lengths.max()) if len(lengths) else 0
        step = micro_batch or max(1, most)
        position = torch.arange(len(candidates_MD), device=offsets.device) - offsets[:-1].repeat_interleave(lengths)
        for first in range(0, most, step):
            chosen = (position >= first) & (position < first + step)
            asked = (lengths - first).clamp(0, step)
            times = None if asked_at is None else asked_at.repeat_interleave(asked)
            outputs[chosen] = self._behind(candidates_MD[chosen], asked, histories, times=(times, times), targets=True)[
                0
            ]
        return outputs

    def score_samples(
        self,
        candidates_BD: Float[Tensor, "B D"],
        *,
        inverse: Int64[Tensor, "B"],
        histories: RememberedHistories,
        asked_at: Int64[Tensor, "U"] | None = None,
    ) -> Float[Tensor, "B D"]:
        """Outputs of one candidate a sample, of samples that share histories: as `score`, in the order of samples.

        Args:
            candidates_BD: vectors of the candidates.
            inverse: the history of each sample, as `Unpooled.inverse`.
            histories: what `remember` gave for the slices.
            asked_at: time of each history's question; needed where histories have times.
        """
        # `score` wants the candidates of a history side by side.
        order_B = torch.argsort(inverse, stable=True)
        counts_U = torch.bincount(inverse, minlength=len(histories.offsets) - 1)
        scored_BD = self.score(
            candidates_BD[order_B], offsets=offsets_of(counts_U), histories=histories, asked_at=asked_at
        )
        return scored_BD[torch.argsort(order_B)]

    def extend(
        self,
        events_MD: Float[Tensor, "M D"],
        *,
        offsets: Int64[Tensor, "B+1"],
        histories: RememberedHistories,
        times: Int64[Tensor, "M"] | None = None,
    ) -> RememberedHistories:
        """Histories with new events behind them; only these (and where times count, the last one before) are computed.

        Args:
            events_MD: vectors of the new events.
            offsets: which events belong to which history.
            histories: what `remember` or `extend` gave.
            times: of the new events; needed where histories have times.

        Raises:
            ConfigError: the mask has context, which would have to see the new events.
            DataError: events or times do not belong to the histories.
        """
        if self.mask.context:
            raise ConfigError(
                expected="a mask without context, so that old events do not see new ones",
                found=f"context = {self.mask.context}",
                where="extending remembered histories",
                ways_out=("call remember again with the whole history",),
            )
        self._check(offsets, events_MD, histories, times)
        last = histories.last_events
        if histories.times is not None and times is not None:
            lengths = histories.offsets.diff()
            # The last event was computed before anybody knew when the next one comes (see the top).
            again = (lengths > 0).to(torch.int64)
            events_MD, _ = join_lists(last[again > 0], events_MD, offsets=(offsets_of(again), offsets))
            old = histories.times[histories.offsets[1:][again > 0] - 1]
            times, offsets = join_lists(old, times, offsets=(offsets_of(again), offsets))
            histories = _without_last(histories, keep=lengths - again)
        asked = None if times is None else asked_times(times, offsets=offsets, asked=self.asked)
        _, kept, joined = self._behind(events_MD, offsets.diff(), histories, times=(asked, times), targets=False)
        grown = offsets.diff() > 0
        # A copy: the histories that were given stay as they are.
        last = last.clone()
        last[grown] = events_MD[offsets[1:][grown] - 1]
        all_times = None
        if times is not None and histories.times is not None:
            all_times, _ = join_lists(histories.times, times, offsets=(histories.offsets, offsets))
        return RememberedHistories(keys_values=kept, offsets=joined, times=all_times, last_events=last)

    def _behind(
        self,
        events_MD: Tensor,
        lengths: Tensor,
        histories: RememberedHistories,
        *,
        times: tuple[Tensor | None, Tensor | None],
        targets: bool,
    ) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...], Tensor]:
        """Outputs, all keys and values, and their offsets, of rows that follow histories."""
        offsets = offsets_of(lengths)
        both = (histories.offsets, offsets)
        joined = offsets_of(histories.offsets.diff() + lengths)
        key_times = None
        if histories.times is not None and times[1] is not None:
            key_times, joined = join_lists(histories.times, times[1], offsets=both)
        layout = JaggedLayout(
            offsets=joined, query_offsets=offsets, num_targets=lengths if targets else None, mask=self.mask
        )
        places = SequencePlaces(layout=layout, key_times=key_times, query_times=times[0])
        kept: list[tuple[Tensor, Tensor]] = []
        for layer, (old_k, old_v) in zip(self._layers(), histories.keys_values, strict=True):
            projected = layer.project(events_MD)
            k, _ = join_lists(old_k, projected.k, offsets=both)
            v, _ = join_lists(old_v, projected.v, offsets=both)
            kept.append((k, v))
            events_MD = layer.finish(events_MD, layer.attend(projected.q, k, v, places), projected.rest)
        return events_MD, tuple(kept), joined

    def _layers(self) -> list[SequenceLayer]:
        return [layer for layer in self.layers if isinstance(layer, SequenceLayer)]

    def _check(self, offsets: Tensor, rows: Tensor, histories: RememberedHistories, times: Tensor | None) -> None:
        fits = len(offsets) == len(histories.offsets) and int(offsets[0]) == 0 and int(offsets[-1]) == len(rows)
        if not fits or bool((offsets.diff() < 0).any()):
            raise DataError(
                expected=f"offsets of {len(histories.offsets) - 1} histories, from 0 to {len(rows)}",
                found=str(offsets.tolist()[:20]),
                where="rows behind remembered histories",
                ways_out="a history without rows repeats its offset",
            )
        if (times is None) != (histories.times is None):
            raise DataError(
                expected="times exactly where the histories have times",
                found="no times" if times is None else "times",
                where="rows behind remembered histories",
                ways_out="give both remember and this call times, or neither",
            )


def _without_last(histories: RememberedHistories, *, keep: Tensor) -> RememberedHistories:
    """Histories cut to their first `keep` events."""
    cut = {"offsets": histories.offsets, "keep": keep}
    kept = tuple((cut_lists(k, **cut), cut_lists(v, **cut)) for k, v in histories.keys_values)
    times = None if histories.times is None else cut_lists(histories.times, **cut)
    return replace(histories, keys_values=kept, offsets=offsets_of(keep), times=times)
