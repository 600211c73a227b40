"""TwoTower: users and items as vectors whose inner product says how well they go together (Yi et al., RecSys 2019).

    user and moment ──► UserEncoder ──► u (D) ─┐
                                               ├─► ⟨u, i⟩ / τ ──► sampled softmax over the items of a block
    item ─────────────► ItemEncoder ──► i (D) ─┘

Item vectors do not depend on who asks, so they are computed once for a whole catalogue, and the best of millions of
items for a user are found by an index. Which features describe the item is said by the schema (`[items]`). A history of
items that the user liked (a list that shares the item's table) makes a vector for users never seen before, too.

The loss is in `sampled_softmax.py`: a sample whose label is positive is a question whose answer is its item; the other
items of its block of `negatives_block` consecutive samples are the negatives, positive or not. How often an item is one
of them (logQ) is counted exactly in the training data
(`observe`), and kept in the buffer `item_counts`, and so in checkpoints.

The logit of every label is ⟨u, i⟩ / τ. It ranks items for a user, and so AUC, GAUC and NDCG mean what they always do;
it is no log odds, so its sigmoid is no probability, and log loss and calibration say nothing. Whether the model finds
the right items among all is said by full ranking (`training/metrics/full_ranking.py`).

Cost: that of the encoders, and 2·n²·D FLOPs a block of n samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.items import Items
from ziggurat.features.permutation import feature_names
from ziggurat.features.schema import Task
from ziggurat.models.contract.losses import LossSums, labelled_weights
from ziggurat.models.contract.model import Embedded, Model, Outputs
from ziggurat.models.retrieval.encoders import EncoderConfig, ItemEncoder, UserEncoder, VectorLength, side_of
from ziggurat.models.retrieval.sampled_softmax import Pool, in_blocks, sampled_softmax
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.typed import Count, Dim, PositiveFloat, checked


class Temperature(StrEnum):
    """Whether τ is a setting or a weight."""

    FIXED = "fixed"
    LEARNED = "learned"  # ln τ is a weight that starts at the setting


class Correction(StrEnum):
    """Whether scores are corrected for how often an item is drawn."""

    LOG_Q = "log_q"
    NONE = "none"  # popular items are then pushed down: the model learns p(item | user) / p(item)


@dataclass(frozen=True, kw_only=True)
@checked
class TwoTowerConfig:
    """Settings of the model `TwoTower`.

    Args:
        embedding_dim: columns of each table.
        output_dim: D, columns of the vectors.
        user: the user's encoder.
        item: the item's encoder.
        length: unit or free; see `VectorLength`.
        temperature: τ, or where it starts. With free vectors 1 is usual.
        temperature_is: fixed or learned.
        correction: log_q or none; see `Correction`.
        negatives_block: n, consecutive samples whose items are each other's negatives. The batch size (of a rank) must
            be a multiple of it.
        embedding: tables: optimizer, kernel, starting weights.
        tower_module: what towers compute; unused unless the model has towers.
    """

    finds_items: ClassVar[bool] = True

    kind: Literal["two_tower"] = "two_tower"
    embedding_dim: Dim = 32
    output_dim: Dim = 64
    user: EncoderConfig = field(default_factory=EncoderConfig)
    item: EncoderConfig = field(default_factory=EncoderConfig)
    length: VectorLength = VectorLength.UNIT
    temperature: PositiveFloat = 0.1
    temperature_is: Temperature = Temperature.FIXED
    correction: Correction = Correction.LOG_Q
    negatives_block: Count = 512
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
        user_encoder: from user features to vectors.
        item_encoder: from item features to vectors.
        item_counts: (rows of the item's table,) samples of the training data with this item; zeros until `observe`.
        log_temperature: ln τ.

    Raises:
        SchemaError: the schema does not say which features describe the item, one side has none, or a label is no
            binary one.
        ConfigError: a list is not pooled, or a tower has features of both sides.
    """

    observes = True
    finds_items = True

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
        self.user_encoder = UserEncoder(config.user, side=sides[0], **sizes)
        self.item_encoder = ItemEncoder(config.item, side=sides[1], **sizes)
        log_temperature = torch.tensor([math.log(config.temperature)])
        if config.temperature_is is Temperature.LEARNED:
            self.log_temperature = nn.Parameter(log_temperature)
        else:
            self.register_buffer("log_temperature", log_temperature)
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
        self.item_counts.copy_(counts)

    def user_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the users of a batch, FP32; what it says of items does not matter."""
        return self._vectors(batch, self.user_encoder, "user")

    def item_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """The vectors of the items of a batch, FP32; what it says of users does not matter."""
        return self._vectors(batch, self.item_encoder, "item")

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """Both vectors, and their inner product over τ as the logit of every label."""
        user_BD, item_BD = self.user_encoder(embedded), self.item_encoder(embedded)
        scale_1 = (-self.log_temperature.float()).exp()
        logits_B1 = (user_BD * item_BD).sum(dim=1, keepdim=True) * scale_1
        named = {"user": user_BD, "item": item_BD, "scale": scale_1}
        return Outputs(logits=logits_B1.expand(-1, len(self.inputs.labels)), named=named)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Sampled softmax of the samples that are positive; see `sampled_softmax.py`."""
        size, weights_BL = self.config.negatives_block, self._weights(batch)
        user_ZnD, item_ZnD = (in_blocks(outputs.named[name].float(), size) for name in ("user", "item"))
        scores_Znn = torch.bmm(user_ZnD, item_ZnD.transpose(1, 2)) * outputs.named["scale"]
        losses_B = sampled_softmax(scores_Znn, self._pool(batch)).flatten()[: batch.batch_size]
        # A sample that is no question must not lend the sum a NaN of its own weightlessness: 0 · inf.
        losses_BL = torch.where(weights_BL > 0, losses_B.unsqueeze(1), 0.0)
        return LossSums(total=(losses_BL * weights_BL).sum(dim=0), weight=weights_BL.sum(dim=0))

    def loss_weight(self, batch: Batch) -> Float[Tensor, "L"]:
        """The weight of the positive samples, for each label."""
        return self._weights(batch).sum(dim=0)

    def _weights(self, batch: Batch) -> Float[Tensor, "B L"]:
        """What each sample counts as a question: its weight, times its label."""
        known_BL = torch.where(batch.labels.isnan(), 0.0, batch.labels)
        return labelled_weights(batch.labels, batch.weights, inputs=self.inputs) * known_BL

    def _pool(self, batch: Batch) -> Pool:
        size, rows_B = self.config.negatives_block, batch.single[self._item]
        log_q = None
        if self.config.correction is Correction.LOG_Q:
            counts_B = self.item_counts[rows_B].clamp(min=1).float()
            log_q = in_blocks(counts_B.log() - self.item_counts.sum().clamp(min=1).log(), size)
        return Pool(
            rows=in_blocks(rows_B, size, fill=-1),
            groups=None if batch.groups is None else in_blocks(batch.groups, size),
            is_positive=in_blocks((self._weights(batch) > 0).any(dim=1), size),
            log_q=log_q,
        )

    def _vectors(self, batch: Batch, encoder: nn.Module, name: str) -> Float[Tensor, "B D"]:
        embedded = self.embed(batch)
        if "forward_dense" in self.__dict__:  # spread over ranks: whole weights are found through it alone
            return self.forward_dense(embedded).named[name]
        return encoder(embedded)


def check_retrieval_inputs(inputs: InputSpec) -> Items:
    """The items of the inputs, after a look at what vectors of users and items need.

    Raises:
        SchemaError: there are no items, no user feature, or a label that is not binary.
        ConfigError: a list that is not pooled.
    """
    items = inputs.items
    if items is None:
        raise SchemaError(
            expected="a schema that says which features describe the item",
            found="no items",
            where="inputs of model two_tower",
            ways_out=(
                'in the schema: [items], and below it id = "movie_id", features = ["movie_id", "genres"]',
                "take a ranking model: dlrm, dcn_v2",
            ),
        )
    if not set(feature_names(inputs)) - set(items.features):
        raise SchemaError(
            expected="at least one feature of the user or the moment",
            found=f"item features only: {', '.join(items.features)}",
            where="inputs of model two_tower",
            ways_out=("take features out of [items]", "add a feature of the user, or a history of items"),
        )
    numbers = [label.name for label in inputs.labels if label.task is not Task.BINARY]
    if numbers:
        raise SchemaError(
            expected="binary labels: a positive sample is a question whose answer is its item",
            found=f"task = regression for {', '.join(numbers)}",
            where="labels of the schema, model two_tower",
            ways_out=("say what is liked: positive_from = 4.0", "take a ranking model"),
        )
    if inputs.sequences:
        raise ConfigError(
            expected="lists that are pooled: the encoders read one vector a feature",
            found=f"pooling = none for {', '.join(spec.name for spec in inputs.sequences)}",
            where="features of the schema, model two_tower",
            ways_out="set pooling = mean or sum in the schema",
        )
    return items
