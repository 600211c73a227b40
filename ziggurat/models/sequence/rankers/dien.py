"""DIEN: how an interest came to be what it is: two recurrences over a history (Zhou et al., arXiv 1809.03672).

    interest     h_t  = GRU(e_t, h_{t−1})                       what the user was interested in at event t
    attention    a_t  = softmax_t(h_t W q)                      how much of it the candidate q touches
    evolution    h'_t = AUGRU(h_t, a_t, h'_{t−1})               only interests that q touches move the state
    x₀ = [fields, numbers, vectors, h'_T]   ──►   MLP   ──►   logits

    auxiliary    L_aux = −Σ_t ln σ(⟨h_t, e_{t+1}⟩) + ln σ(−⟨h_t, ê_{t+1}⟩)          L = L_labels + α L_aux

h_t has to tell the next event e_{t+1} from another one, ê_{t+1}: without it, h_t would learn from the last event alone.
ê is an event that the batch has elsewhere, drawn anew in each step (the released data draws it once, with the same
chances), or stands in lists of its own (`negatives`). Evaluation has no auxiliary loss.

α = 1 is the released code's, which takes the mean over events (and over padding, which nothing has here), and an MLP on
[h_t, e_{t+1}] instead of the product (`auxiliary_score = mlp`); the paper's equation is the sum over events
(`auxiliary_over = sum`). The released code also hands Σ e_t and q ⊙ Σ e_t to the MLP (`sums = added`), and has Dice in
it; here `deep` says what it has.

Events of all histories that stand at the same place are one product of matrices; nothing is padded
(`ops/recurrent/jagged_gru.py`). Cost of an event of E numbers, forward: 26·E² FLOPs, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.dense_inputs import NumericInput
from ziggurat.models.blocks.flat_inputs import FlatInputs
from ziggurat.models.blocks.heads import Heads, HeadSharing
from ziggurat.models.blocks.mlp import MLP, Init, MLPConfig, initialise
from ziggurat.models.contract.losses import LossSums, add_sample_losses
from ziggurat.models.contract.model import Embedded, Outputs, Unpooled
from ziggurat.models.contract.ranking_model import RankingModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.din import AttentionActivation, AttentionWeights, DINConfig, TargetAttention, softmax_of_lists
from ziggurat.models.sequence.next_item_inputs import last_of_each
from ziggurat.models.sequence.rankers.history import History, HistoryInput, HistoryRankerConfig, from_latest
from ziggurat.ops.recurrent.jagged_gru import UpdateGate, jagged_gru
from ziggurat.ops.to_device import to_device
from ziggurat.precision.products import Linear
from ziggurat.typed import Dim, FloatOrZero, checked

_NEGATIVES, _AUXILIARY = "negatives", "auxiliary"


class Evolution(StrEnum):
    """Ways in which attention enters the second recurrence."""

    AUGRU = "augru"  # it scales the update gate: as published
    AGRU = "agru"  # it is the update gate
    AIGRU = "aigru"  # it scales the inputs
    GRU = "gru"  # not at all


class InterestAttention(StrEnum):
    """Functions that give the score of a state and the candidate."""

    BILINEAR = "bilinear"  # h W q: as published
    DOT = "dot"  # ⟨h, q⟩
    MLP = "mlp"  # as in DIN


class AuxiliaryScore(StrEnum):
    """Functions that score how well an event follows a state."""

    PRODUCT = "product"  # ⟨h, e⟩: as published
    MLP = "mlp"  # of [h, e]: the released code


class AuxiliaryOver(StrEnum):
    """Ways to reduce the losses of a history's events to one."""

    MEAN = "mean"  # over a history's own events; the released code also counts its padding
    SUM = "sum"  # the paper's equation


class HistorySums(StrEnum):
    """Choice of whether sums of the history enter the MLP."""

    NONE = "none"
    ADDED = "added"  # Σ e_t and q ⊙ Σ e_t: the released code


@dataclass(frozen=True, kw_only=True)
@checked
class DIENConfig(HistoryRankerConfig):
    """Settings of the model `DIEN`.

    Args:
        embedding_dim: D, columns of each table.
        history: which lists are the history.
        evolution: how attention enters the second recurrence.
        attention: what gives the score of a state and the candidate.
        weights: what scores become over a history: softmax or plain.
        attention_dims: hidden layers, with ReLU, of attention = mlp.
        alpha: α, the weight of the auxiliary loss; 0: there is none.
        auxiliary_score: what says how well an event follows a state.
        auxiliary_over: how the losses of a history's events become one.
        auxiliary_dims: hidden layers of auxiliary_score = mlp.
        negatives: for each list of the history the list with what did not happen, event by event; () draws events of
            the batch.
        sums: whether sums of the history enter the MLP.
        deep: hidden layers of the MLP.
        numeric: how numbers enter; see `NumericInput`.
        bottom: hidden layers of the bottom MLP. Unused unless numeric is bottom_mlp.
        heads: one MLP for all labels, or one each.
        init: starting weights of the dense network.
        embedding: tables: optimizer, kernel, starting weights.
    """

    reads: ClassVar[Reads] = Reads.A_HISTORY

    kind: Literal["dien"] = "dien"
    embedding_dim: Dim = 16
    history: HistoryInput = field(default_factory=HistoryInput)
    evolution: Evolution = Evolution.AUGRU
    attention: InterestAttention = InterestAttention.BILINEAR
    weights: AttentionWeights = AttentionWeights.SOFTMAX
    attention_dims: tuple[Dim, ...] = (80, 40)
    alpha: FloatOrZero = 1.0
    auxiliary_score: AuxiliaryScore = AuxiliaryScore.PRODUCT
    auxiliary_over: AuxiliaryOver = AuxiliaryOver.MEAN
    auxiliary_dims: tuple[Dim, ...] = (100, 50)
    negatives: tuple[str, ...] = ()
    sums: HistorySums = HistorySums.NONE
    deep: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(200, 80)))
    numeric: NumericInput = NumericInput.FIELDS
    bottom: MLPConfig = field(default_factory=lambda: MLPConfig(hidden_dims=(512, 256)))
    heads: HeadSharing = HeadSharing.SHARED
    init: Init = Init.TORCH
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)

    def model_class(self) -> type[DIEN]:
        """The class of the model."""
        return DIEN

    def unpooled(self, inputs: InputSpec) -> tuple[str, ...]:
        """The lists of the history, and those of what did not happen, whatever the schema says."""
        return (*super().unpooled(inputs), *self.negatives)


class Recurrence(nn.Module):
    """A gated recurrent unit over jagged events, whose state has as many numbers as an event.

    Args:
        dim: of an event and of the state.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.of_event = Linear(dim, 3 * dim)
        self.of_state = Linear(dim, 3 * dim)

    def forward(
        self, events: Unpooled, *, attention_N: Float[Tensor, "N"] | None = None, gate: UpdateGate = UpdateGate.GRU
    ) -> Unpooled:
        """The state after each event."""
        states_ND = jagged_gru(
            self.of_event(events.values),
            self.of_state.weight,
            self.of_state.bias,
            offsets=events.offsets,
            attention_N=attention_N,
            gate=gate,
            longer=None if events.sizes is None else events.sizes.longer,
            linear=None if self.of_state.arithmetic.is_native else self.of_state.arithmetic.linear,
        )
        return replace(events, values=states_ND)


class Interests(nn.Module):
    """Computes a weight for each state of a history, given the candidate.

    Args:
        dim: of a state and of the candidate.
        config: of the model.
    """

    def __init__(self, dim: int, *, config: DIENConfig) -> None:
        super().__init__()
        self.config = config
        self.bilinear = Linear(dim, dim, bias=False) if config.attention is InterestAttention.BILINEAR else None
        as_din = DINConfig(
            attention_dims=config.attention_dims,
            attention_activation=AttentionActivation.RELU,
            weights=config.weights,
        )
        self.mlp = TargetAttention(dim, config=as_din) if config.attention is InterestAttention.MLP else None

    def forward(self, candidate_BE: Float[Tensor, "B E"], states: Unpooled) -> Float[Tensor, "N"]:
        """The weight of each event."""
        # It takes its own softmax, as `weights` says.
        if self.mlp is not None:
            return self.mlp.scores(candidate_BE, states)
        asked_BE = candidate_BE if self.bilinear is None else self.bilinear(candidate_BE)
        samples_N = states.samples
        scores_N = (states.values * asked_BE[samples_N]).sum(dim=1)
        if self.config.weights is AttentionWeights.PLAIN:
            return scores_N
        return softmax_of_lists(scores_N, samples_N, num_samples=candidate_BE.shape[0])


class DIEN(RankingModel):
    """An MLP over embeddings and the interest that a candidate touches, as it evolved over a history."""

    reads_sequences = True

    def __init__(self, config: DIENConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        columns = config.table_columns(inputs)
        self.history = History(config.history, inputs=inputs, columns=columns, model="DIEN", beside=config.negatives)
        self.joined_lists = (self.history.joined,)
        _check_negatives(config, self.history, inputs)
        dim = self.history.event_dim
        self.interest = Recurrence(dim)
        self.evolution = Recurrence(dim)
        self.attention = None if config.evolution is Evolution.GRU else Interests(dim, config=config)
        # Without the auxiliary loss its network would be weights that nothing trains.
        has_mlp = config.alpha and config.auxiliary_score is AuxiliaryScore.MLP
        hidden = MLPConfig(hidden_dims=config.auxiliary_dims)
        self.auxiliary = MLP(2 * dim, config=hidden, output_dim=1) if has_mlp else None
        num_sums = 2 if config.sums is HistorySums.ADDED else 0
        self.flat = FlatInputs(
            inputs,
            field_dims=(*self.field_dims, (1 + num_sums) * dim),
            dim=config.embedding_dim,
            numeric=config.numeric,
            bottom=config.bottom,
        )
        self.heads = Heads(
            self.flat.output_dim, config=config.deep, num_labels=len(inputs.labels), sharing=config.heads
        )
        initialise([each for each in self.children() if each is not self.embeddings], config.init)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Draw, in training, the event that each event is told from: one of the batch, or none where lists give it."""
        offsets_B1 = self.history.offsets_of(batch)
        if not self.training or not self.config.alpha:
            return {}
        # Of the copy on the host, where there is one: no GPU is asked.
        num_events = int(self.history.lengths_of(batch).sum())
        # Where lists give the negatives this draw is not read, but says that the loss is wanted.
        return {_NEGATIVES: to_device(torch.randint(max(1, num_events), (num_events,)), offsets_B1.device)}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """Both recurrences, then the MLP on x₀; in training also the auxiliary loss of each sample."""
        events = self.history.events(embedded)
        candidate_BE = self.history.candidate(embedded)
        states = self.interest(events)
        evolved = self._evolved(states, candidate_BE)
        parts = [last_of_each(evolved.values, evolved.offsets)]
        if self.config.sums is HistorySums.ADDED:
            sum_BE = torch.zeros_like(candidate_BE).index_add(0, events.samples, events.values)
            parts += [sum_BE, candidate_BE * sum_BE]
        fields_BX = torch.cat([embedded.fields, *parts], dim=1)
        named = {}
        if _NEGATIVES in embedded.named:
            named[_AUXILIARY] = self._auxiliary(states, events, embedded)
        return self.as_outputs(self.interact(embedded.dense, fields_BX, self.vectors_of(embedded)), named)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """The labels' losses, and α times the auxiliary one."""
        sums = super().loss(outputs, batch)
        if _AUXILIARY not in outputs.named:
            return sums
        losses_B = self.config.alpha * outputs.named[_AUXILIARY]
        return add_sample_losses(sums, losses_B, labels_BL=batch.labels, weights_B=batch.weights, inputs=self.inputs)

    def interact(self, dense_BN: Tensor, fields_BX: Tensor, vectors: dict[str, Tensor]) -> Tensor:
        """The MLP on x₀."""
        return self.heads(self.flat(dense_BN, fields_BX, vectors))

    def _evolved(self, states: Unpooled, candidate_BE: Float[Tensor, "B E"]) -> Unpooled:
        if self.attention is None:
            return self.evolution(states)
        weights_N = self.attention(candidate_BE, states)
        if self.config.evolution is Evolution.AIGRU:
            return self.evolution(replace(states, values=states.values * weights_N.unsqueeze(1)))
        return self.evolution(states, attention_N=weights_N, gate=UpdateGate(self.config.evolution.value))

    def _auxiliary(self, states: Unpooled, events: Unpooled, embedded: Embedded) -> Float[Tensor, "B"]:
        """The auxiliary loss of each sample; 0 for a history of fewer than two events."""
        # The latest event of a history is followed by nothing that is known.
        is_followed_N = (from_latest(events) > 0).float()
        happened_NE = self._as_candidates(events.values)
        if self.config.negatives:
            lists = [embedded.sequences[name].expanded().values for name in self.config.negatives]
            # Lists of negatives stand beside events of the same place: event t + 1's is at t + 1.
            other_NE = _following(self._as_candidates(torch.cat(lists, dim=1)))
        else:
            other_NE = happened_NE[embedded.named[_NEGATIVES]]
        follows_N = self._score(states.values, _following(happened_NE))
        # −ln σ(x) = softplus(−x), which overflows nowhere.
        losses_N = (F.softplus(-follows_N) + F.softplus(self._score(states.values, other_NE))) * is_followed_N
        zeros_B = losses_N.new_zeros(events.offsets.shape[0] - 1)
        sums_B = zeros_B.index_add(0, events.samples, losses_N)
        if self.config.auxiliary_over is AuxiliaryOver.SUM:
            return sums_B
        # n events have n − 1 that are followed.
        return sums_B / (events.offsets.diff() - 1).clamp(min=1)

    def _as_candidates(self, values_NE: Tensor) -> Tensor:
        """Events without what was done."""
        dims = self.history.target_dim, self.history.event_dim
        # Zeros in place of the actions, so that an event stays as wide as a state.
        return F.pad(values_NE[:, : dims[0]], (0, dims[1] - dims[0]))

    def _score(self, states_NE: Tensor, events_NE: Tensor) -> Float[Tensor, "N"]:
        if self.auxiliary is None:
            return (states_NE * events_NE).sum(dim=1).float()
        return self.auxiliary(torch.cat([states_NE, events_NE], dim=1)).squeeze(1).float()


def _following(values_NE: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """The row after each row; what stands behind a sample's last one does not matter."""
    return torch.cat([values_NE[1:], values_NE[-1:]])


def _check_negatives(config: DIENConfig, history: History, inputs: InputSpec) -> None:
    """Refuse lists of what did not happen that are none."""
    tables = {each.name: each.table for each in inputs.jagged}
    of_events = [tables[name] for name in history.names if name not in config.history.actions]
    if config.negatives and [tables.get(name) for name in config.negatives] != of_events:
        raise ConfigError(
            expected=f"negatives: a list of each of the tables {', '.join(of_events)}, in this order",
            found=", ".join(f"{name} of {tables.get(name, 'no table')}" for name in config.negatives),
            where="DIEN, model.negatives",
            ways_out=("name one list for each list of the history", "leave them out: events of the batch are drawn"),
        )
