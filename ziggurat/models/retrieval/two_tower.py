"""TwoTower: users and items as vectors whose inner product says how well they go together (Yi et al., RecSys 2019).

    user and moment ──► UserEncoder ──► u (D) ─┐
                                               ├─► ⟨u, i⟩ / τ ──► sampled softmax over the items of a block
    item ─────────────► ItemEncoder ──► i (D) ─┘

Item vectors do not depend on who asks, so they are computed once for a whole catalogue, and the best of millions of
items for a user are found by an index. Which features describe the item is said by the schema (`[items]`). A history of
items that the user liked (a list that shares the item's table) makes a vector for users never seen before, too.

The loss is in `sampled_softmax.py`: a sample whose label is positive is a question whose answer is its item; the other
items of its block of `negatives_block` consecutive samples are the negatives, positive or not, and beside them or in
their place items that are drawn (`contract/negatives.py`). How often an item is one of them (logQ) is counted exactly
in the training data (`observe`), and kept in the buffer `item_counts`, and so in checkpoints. An OverArch
(`over_arch.py`) may score what was found anew; its loss is added.

Several labels share the vector of a user, or have one each over the same item vectors (`user_vectors = per_task`; task
heads over one index, as SilverTorch has them, arXiv 2511.14881): one search then asks for all tasks together.

The logit of every label is ⟨u, i⟩ / τ. It ranks items for a user, and so AUC, GAUC and NDCG mean what they always do;
it is no log odds, so its sigmoid is no probability, and log loss and calibration say nothing. Whether the model finds
the right items among all is said by full ranking (`training/metrics/full_ranking.py`).

Cost: that of the encoders, and 2·n²·D FLOPs a block of n samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.batches.permutation import feature_names
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.models.contract.losses import LossSums, labelled_weights
from ziggurat.models.contract.model import Embedded, Model, Outputs
from ziggurat.models.contract.negatives import CANDIDATES, DrawnLayout, NegativesConfig, NegativesKind
from ziggurat.models.contract.reads import Reads
from ziggurat.models.retrieval.encoders import EncoderConfig, ItemEncoder, UserEncoder, VectorLength, side_of
from ziggurat.models.retrieval.over_arch import OverArch, OverArchConfig, OverArchKind, OverArchLearning, found_softmax
from ziggurat.models.retrieval.retrieval_inputs import check_retrieval_inputs
from ziggurat.models.retrieval.sampled_softmax import Pool, corrected, in_blocks
from ziggurat.models.retrieval.two_tower_choices import Correction, Temperature, UserVectors
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.typed import Count, Dim, PositiveFloat, checked

_SAMPLES = "samples"  # places of the samples that have a user
_WEIGHT = "over_arch."  # before the names of its weights in `Outputs.named`


@dataclass(frozen=True, kw_only=True)
@checked
class TwoTowerConfig:
    """Settings of the model `TwoTower`.

    Args:
        embedding_dim: columns of each table.
        output_dim: D, columns of the vectors.
        user: the user's encoder.
        item: the item's encoder.
        user_vectors: shared by all labels, or one a label (per_task); see `UserVectors`.
        length: unit or free; see `VectorLength`.
        temperature: τ, or where it starts. With free vectors 1 is usual.
        temperature_is: fixed or learned.
        correction: log_q or none; see `Correction`.
        negatives_block: n, consecutive samples whose items are each other's negatives. The batch size (of a rank) must
            be a multiple of it.
        negatives: where further negatives come from.
        over_arch: what scores found items anew, and how it learns.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.
    """

    finds_items: ClassVar[bool] = True

    reads: ClassVar[Reads] = Reads.ITEMS

    kind: Literal["two_tower"] = "two_tower"
    embedding_dim: Dim = 32
    output_dim: Dim = 64
    user: EncoderConfig = field(default_factory=EncoderConfig)
    item: EncoderConfig = field(default_factory=EncoderConfig)
    user_vectors: UserVectors = UserVectors.SHARED
    length: VectorLength = VectorLength.UNIT
    temperature: PositiveFloat = 0.1
    temperature_is: Temperature = Temperature.FIXED
    correction: Correction = Correction.LOG_Q
    negatives_block: Count = 512
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    over_arch: OverArchConfig = field(default_factory=OverArchConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    tower_module: TowerModuleConfig = field(default_factory=TowerModuleConfig)

    def __post_init__(self) -> None:
        if self.negatives_block < 2 or not math.isfinite(self.temperature):
            raise ConfigError(
                expected="a finite temperature, and negatives_block of 2 or more: a sample alone has no negatives",
                found=f"temperature = {self.temperature}, negatives_block = {self.negatives_block}",
                where="two_tower settings",
                ways_out="correct the number",
            )

        alone = self.over_arch.kind is OverArchKind.NONE and self.negatives.kind is not NegativesKind.MINED
        if self.user_vectors is UserVectors.PER_TASK and not alone:
            raise ConfigError(
                expected="one vector of a user for an OverArch, and to mine negatives by",
                found=f"user_vectors = per_task, over_arch.kind = {self.over_arch.kind.value}, "
                f"negatives.kind = {self.negatives.kind.value}",
                where="two_tower settings",
                ways_out=('user_vectors = "shared"', 'over_arch.kind = "none", negatives.kind = "mixed"'),
            )

    @property
    def coupled_samples(self) -> int:
        """Consecutive samples that the loss looks at together; see `Model.coupled_samples`."""
        return self.negatives_block

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Columns of every table: those of the schema, else `embedding_dim`."""
        return inputs.table_columns(self.embedding_dim)

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> TwoTower:
        """The model on tables of these columns."""
        return TwoTower(self, inputs=inputs, embeddings=embeddings, towers=towers)


class TwoTower(Model):
    """A vector for the user and one for the item, trained so that their inner product finds the items that are liked.

    Attributes:
        num_vectors: V, vectors of a user: one, or one for each label.
        user_encoder: from user features to vectors.
        item_encoder: from item features to vectors.
        over_arch: scores of pairs of vectors, or None.
        item_counts: (rows of the item's table,) samples of the training data with this item; zeros until `observe`.
        log_temperature: ln τ.

    Raises:
        SchemaError: the schema does not say which features describe the item, one side has none, or a label is no
            binary one.
        ConfigError: a list is not pooled, or a tower has features of both sides.
    """

    observes = True
    finds_items = True
    exploits_repeats = ("lookups", "pooling")

    @check_arguments
    def __init__(
        self,
        config: TwoTowerConfig,
        *,
        inputs: InputSpec,
        embeddings: EmbeddingTables,
        towers: TowerLayer | None = None,
    ) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        self.config = config
        items = check_retrieval_inputs(inputs)
        user_names = {name for name in feature_names(inputs) if name not in items.features}
        dim = config.embedding_dim if towers is None else towers.dim
        sides = [
            side_of(inputs, names=names, field_dims=self.field_dims, towers=towers)
            for names in (user_names, set(items.features))
        ]
        sizes = {"dim": dim, "output_dim": config.output_dim, "length": config.length}
        self.num_vectors = len(inputs.labels) if config.user_vectors is UserVectors.PER_TASK else 1
        self.user_encoder = UserEncoder(config.user, num_vectors=self.num_vectors, side=sides[0], **sizes)
        self.item_encoder = ItemEncoder(config.item, side=sides[1], **sizes)
        # (1,), not (): FSDP shards no tensor without dimensions.
        log_temperature = torch.tensor([math.log(config.temperature)])
        if config.temperature_is is Temperature.LEARNED:
            self.log_temperature = nn.Parameter(log_temperature)
        else:
            self.register_buffer("log_temperature", log_temperature)
        self.over_arch = config.over_arch.build(config.output_dim)
        self.draws = config.negatives if config.negatives.extra_samples else None
        self._item = [spec.name for spec in inputs.single].index(items.id)
        table = inputs.table(inputs.single[self._item].table)
        self.register_buffer("item_counts", torch.zeros(table.num_rows, dtype=torch.int64))
        self.item_counts: Tensor

    @property
    def coupled_samples(self) -> int:
        """n: the items of so many consecutive samples are each other's negatives."""
        return self.config.negatives_block

    @property
    def has_observed(self) -> bool:
        """True once items were counted, or where nothing needs it."""
        return self.config.correction is Correction.NONE or bool(self.item_counts.any())

    def observe(self, batches: Iterable[Batch]) -> None:
        """Count the items of the training samples, each sample once, whatever its label."""
        counts = torch.zeros_like(self.item_counts)
        for batch in batches:
            rows = batch.single[self._item].to(counts.device)
            counts += torch.bincount(rows, minlength=len(counts))
        # In place: the buffer is part of checkpoints, and may be on a device.
        self.item_counts.copy_(counts)

    def user_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the users of a batch, FP32, the mean where tasks have their own; items do not matter."""
        found = self._vectors(batch, self.user_encoder, "user")
        return found if self.num_vectors == 1 else found.unflatten(1, (self.num_vectors, -1)).mean(1)

    def task_vectors(self, batch: Batch) -> Float[Tensor, "B V D"]:
        """All vectors of the users of a batch, FP32, in the order of the labels."""
        return self._vectors(batch, self.user_encoder, "user").unflatten(1, (self.num_vectors, -1))

    def item_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the items of a batch, FP32; what it says of users does not matter."""
        return self._vectors(batch, self.item_encoder, "item")

    def coupled_in(self, batch: Batch) -> int:
        """n, or n + m where items were drawn for the batch."""
        return self.coupled_samples + (self.config.negatives.extra_samples if CANDIDATES in batch.extras else 0)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return the places of the samples that have a user, in a batch that items were drawn for."""
        layout = self._layout(batch)
        return {} if layout is None else {_SAMPLES: layout.samples().to(batch.dense.device)}

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """Both vectors, and their inner product over τ as the logit of every label; drawn items have no user: 0."""
        item_BD = self.item_encoder(embedded)
        user_BX = self._users(embedded, item_BD)
        # 1 / τ, by its logarithm: positive whatever is learned.
        scale_1 = (-self.log_temperature.float()).exp()
        users = user_BX.split(item_BD.shape[1], dim=1)
        logits_BV = torch.cat([(user_BD * item_BD).sum(dim=1, keepdim=True) for user_BD in users], dim=1) * scale_1
        named = {"user": user_BX, "item": item_BD, "scale": scale_1}
        if self.over_arch is not None:
            on_top = self.config.over_arch.learning is OverArchLearning.ON_TOP
            # Detached, the over-arch learns from vectors that its loss does not move.
            vectors = (user_BX.detach(), item_BD.detach()) if on_top else (user_BX, item_BD)
            named |= {"user_parts": self.over_arch.user_parts(vectors[0])}
            named |= {"item_parts": self.over_arch.item_parts(vectors[1])}
            named |= {f"{_WEIGHT}{name}": value for name, value in self.over_arch.pair_weights().items()}
        # Labels that share a vector share its logit.
        return Outputs(logits=logits_BV.expand(-1, len(self.inputs.labels)), named=named)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Sampled softmax of the samples that are positive (`sampled_softmax.py`), and that of the OverArch.

        Raises:
            ConfigError: negatives are to be drawn, and nobody drew any for this batch.
        """
        self._require_drawn(batch)
        places = self._places(batch)
        weights_BL = self._weights(batch)
        pool = self._pool(batch)
        user_ZnX, item_ZCD = self._blocks(outputs.named["user"], outputs.named["item"], places)
        losses = []
        for user_ZnD in user_ZnX.split(item_ZCD.shape[2], dim=2):
            scores_ZnC = torch.bmm(user_ZnD, item_ZCD.transpose(1, 2)) * outputs.named["scale"]
            # −∞ where a candidate is no negative of the question.
            masked_ZnC = corrected(scores_ZnC, pool)
            # A sample's own item is candidate i of its block: the diagonal.
            losses_Zn = masked_ZnC.logsumexp(dim=2) - masked_ZnC.diagonal(dim1=1, dim2=2)
            if self.over_arch is not None:
                # What is hardest is chosen by retrieval, and not learned from here.
                found_ZnC = scores_ZnC.detach().masked_fill(masked_ZnC == -torch.inf, -torch.inf)
                again_Zn = self._over_arch_losses(self.over_arch, outputs, places, pool, found_ZnC)
                losses_Zn = losses_Zn + self.config.over_arch.weight * again_Zn
            losses.append(losses_Zn.flatten())
        samples_S = places[0]
        # What filled up the last block is cut off.
        losses_SV = torch.stack(losses, dim=1)[: len(samples_S)]
        weights_SL = weights_BL[samples_S]
        # A sample that is no question must not lend the sum a NaN of its own weightlessness: 0 · inf.
        losses_SL = torch.where(weights_SL > 0, losses_SV, 0.0)
        return LossSums(total=(losses_SL * weights_SL).sum(dim=0), weight=weights_BL.sum(dim=0))

    def loss_weight(self, batch: Batch) -> Float[Tensor, "L"]:
        """The weight of the positive samples, for each label."""
        return self._weights(batch).sum(dim=0)

    def _weights(self, batch: Batch) -> Float[Tensor, "B L"]:
        """Return how much each sample counts as a question: its weight, times its label."""
        known_BL = torch.where(batch.labels.isnan(), 0.0, batch.labels).float()
        return labelled_weights(batch.labels, batch.weights, inputs=self.inputs) * known_BL

    def _users(self, embedded: Embedded, item_BD: Tensor) -> Float[Tensor, "B VD"]:
        """Vectors of users; zeros where a drawn item stands."""
        samples_S = embedded.named.get(_SAMPLES)
        if samples_S is None:
            return self.user_encoder(embedded)
        some = Embedded(
            dense=embedded.dense[samples_S],
            fields=embedded.fields[samples_S],
            vectors={name: vector[samples_S] for name, vector in embedded.vectors.items()},
        )
        users_SX = self.user_encoder(some)
        return item_BD.new_zeros(len(item_BD), users_SX.shape[1]).index_copy(0, samples_S, users_SX)

    def _over_arch_losses(
        self,
        over_arch: OverArch,
        outputs: Outputs,
        places: tuple[Tensor, Tensor],
        pool: Pool,
        found_ZnC: Float[Tensor, "Z n C"],
    ) -> Float[Tensor, "Z n"]:
        """Softmax of the OverArch over the candidates of each sample that retrieval scores highest."""
        named = outputs.named
        user_ZnU, item_ZCX = self._blocks(named["user_parts"], named["item_parts"], places)
        num_blocks, size, num_candidates = found_ZnC.shape
        num = min(self.config.over_arch.hardest, num_candidates)
        width = item_ZCX.shape[2]
        best_ZnK, at_ZnK = found_ZnC.topk(num, dim=2)
        places_ZNX = at_ZnK.flatten(1).unsqueeze(2).expand(-1, -1, width)
        chosen_NKX = item_ZCX.gather(1, places_ZNX).reshape(num_blocks * size, num, width)
        weights = {name.removeprefix(_WEIGHT): value for name, value in named.items() if name.startswith(_WEIGHT)}
        scores_NK = over_arch.scores(user_ZnU.flatten(0, 1), chosen_NKX, weights=weights) * named["scale"]
        scores_ZnK = scores_NK.view_as(at_ZnK)
        if pool.log_q is not None:
            scores_ZnK = scores_ZnK - pool.log_q.unsqueeze(1).expand(-1, size, -1).gather(2, at_ZnK)
        is_own_ZnK = at_ZnK == torch.arange(size, device=at_ZnK.device).unsqueeze(1)
        return found_softmax(scores_ZnK, is_own=is_own_ZnK, allowed=best_ZnK > -torch.inf)

    def _layout(self, batch: Batch) -> DrawnLayout | None:
        """Return the layout of drawn items in the batch; None where there are none."""
        if CANDIDATES not in batch.extras:
            return None
        return DrawnLayout(batch.batch_size, self.coupled_samples, self.config.negatives.num_drawn)

    def _places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Places of the samples (S,) and of the drawn items of each block (Z, m)."""
        layout = self._layout(batch)
        device = batch.dense.device
        if layout is None:
            num_blocks = -(-batch.batch_size // self.coupled_samples)
            samples_S = torch.arange(batch.batch_size, device=device)
            return samples_S, samples_S.new_empty(num_blocks, 0)
        return layout.samples().to(device), layout.drawn_items().to(device)

    def _blocks(
        self, users_BU: Tensor, items_BX: Tensor, places: tuple[Tensor, Tensor]
    ) -> tuple[Float[Tensor, "Z n U"], Float[Tensor, "Z C X"]]:
        """Gather what belongs to the samples of each block, and to its candidates."""
        samples_S, drawn_Zm = places
        # FP32, whatever the network computes in: losses are taken of these scores.
        user_ZnU, own_ZnX = (in_blocks(each.float()[samples_S], self.coupled_samples) for each in (users_BU, items_BX))
        return user_ZnU, torch.cat([own_ZnX, items_BX.float()[drawn_Zm]], dim=1)

    def _pool(self, batch: Batch) -> Pool:
        size, (samples_S, drawn_Zm) = self.config.negatives_block, self._places(batch)
        candidates_B = batch.extras.get(CANDIDATES, batch.single[self._item])
        # −1 is no item: what fills up the last block is nobody's negative.
        own_Zn = in_blocks(candidates_B[samples_S], size, fill=-1)
        drawn_rows_Zm = candidates_B[drawn_Zm]
        weights_SL = self._weights(batch)[samples_S]
        return Pool(
            rows=torch.cat([own_Zn, drawn_rows_Zm], dim=1),
            groups=None if batch.groups is None else in_blocks(batch.groups[samples_S], size),
            is_positive=in_blocks((weights_SL > 0).any(dim=1), size),
            log_q=self._log_q(own_Zn, drawn_rows_Zm) if self.config.correction is Correction.LOG_Q else None,
            takes_block=self.config.negatives.kind is not NegativesKind.UNIFORM,
        )

    def _log_q(self, own_Zn: Tensor, drawn_Zm: Tensor) -> Float[Tensor, "Z C"]:
        """The ln of how often each candidate is expected among those of its block; see `contract/negatives.py`.

        Without drawn items the number of samples of a block is left out: it is the same for all of them.
        """
        kind = self.config.negatives.kind
        counts = self.item_counts
        # −1 of filling would index the last row; its ln q is not used.
        rows_ZC = torch.cat([own_Zn, drawn_Zm], dim=1).clamp(min=0)
        # An item that training never saw counts as seen once: ln 0 would decide everything.
        shares_ZC = counts[rows_ZC].clamp(min=1).float().log() - counts.sum().clamp(min=1).log()
        if kind is NegativesKind.IN_BATCH:
            return torch.where(torch.cat([own_Zn, drawn_Zm], dim=1) < 0, 0.0, shares_ZC)
        if kind is NegativesKind.UNIFORM:
            # m / N for every candidate: it drops out of the softmax.
            return torch.zeros_like(shares_ZC)
        # Share of the data times the samples of the block.
        expected_ZC = shares_ZC.exp() * (own_Zn >= 0).sum(dim=1, keepdim=True)
        if kind is NegativesKind.MIXED:
            # Items of the training data, among which those drawn uniformly were drawn.
            num_items = (counts[NUM_RESERVED_ROWS:] > 0).sum().clamp(min=1)
            return (expected_ZC + drawn_Zm.shape[1] / num_items).log()
        certain_Zm = torch.zeros_like(drawn_Zm, dtype=torch.float32)
        # A block of none but padding has no candidates to correct.
        return torch.cat([expected_ZC[:, : own_Zn.shape[1]].clamp(min=1e-30).log(), certain_Zm], dim=1)

    def _require_drawn(self, batch: Batch) -> None:
        if self.draws is None or not batch.batch_size or CANDIDATES in batch.extras:
            return
        raise ConfigError(
            expected=f"a batch that {self.draws.num_drawn} items were drawn for, block by block",
            found="one of samples alone",
            where=f"two_tower, negatives.kind = {self.draws.kind.value}",
            ways_out=(
                "train with zg.Trainer or zg.train on a data set, which draws them",
                "DrawnNegatives(…).extended(batch, step=…) of ziggurat/training/negatives.py",
                'negatives.kind = "in_batch"',
            ),
        )

    def _vectors(self, batch: Batch, encoder: nn.Module, name: str) -> Float[Tensor, "B D"]:
        embedded = self.embed(batch)
        if self.slots.network is not None:  # spread over ranks: whole weights are found through it alone
            return self.dense_outputs(embedded).named[name]
        return encoder(embedded)
