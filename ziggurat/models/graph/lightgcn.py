"""LightGCN: vectors of users and items that are averages over the graph of who took what (He et al., SIGIR 2020).

    tables      user ──► x_u ─┐             E = (x + A x + … + A^K x) / (K + 1)      A: see `ops/graph/graph.py`
                item ──► x_i ─┴─► layers ──► e_u, e_i ──► ⟨e_u, e_i⟩                  the score of a pair

Nothing is learned but the tables: a layer is a weighted sum over neighbours. The graph has an edge for each user and
item of the positive training samples (`observe`); it is made again when a run is resumed, and is no part of a
checkpoint. With `num_layers = 0` this is matrix factorisation (BPR-MF).

The loss is BPR (Rendle et al., UAI 2009), one negative for each positive sample, uniform among the items that the user
did not take in training, and the penalty of the paper's code on the rows that the sample read, at layer 0:

    loss_b = ln(1 + exp(⟨e_u, e_j⟩ − ⟨e_u, e_i⟩)) + λ / 2 · (‖x_u‖² + ‖x_i‖² + ‖x_j‖²)

Which pairs a step learns from is a choice (`pairs`). `samples`: those of its batch, as equation 15 sums over all pairs,
so that a user with many items counts more. `users`: as many pairs as the batch has, each of a user drawn uniformly and
one of the user's items, as the paper's code draws them: recall and NDCG are means over users.

What is drawn follows from the seed, the step and the sample (`shortened`), so it is the same on any number of ranks and
after a resume. A user who took every item has none: j is i, and of that sample only the penalty has a gradient.

*Vectors.* Evaluation and answers need E of all rows. It is computed once after the weights changed, and kept with the
model (`propagated_users`, `propagated_items`), and so in checkpoints: a run that is loaded has no graph. A user or an
item without an edge has the mean vector of all that have one (with `num_layers = 0` its own row, as it began). An
export holds E in place of the tables and no graph at all (`for_answers`): a factorisation with the same vectors, which
any row format may pack.

*Many ranks.* Rows come from wherever the plan put them, and their gradients go back there. Each rank propagates over
the whole graph for the samples that it has, so ranks divide the batch, not the graph: a step sends all rows to every
rank, N·D numbers there and back.

Sources: He et al., "LightGCN", arXiv 2002.02126, equations 3, 4, 8 and 15. Edges that are sampled:
`ops/graph/edge_sampling.py`.

Cost of a step: 2·K products with A, each 2·E·D FLOPs, whatever the batch; the last one forward only of rows that are
asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableInit, TableOptimizerKind
from ziggurat.errors import ConfigError, SchemaError
from ziggurat.features.batch import Batch
from ziggurat.features.batches.permutation import feature_names
from ziggurat.features.inputs import InputSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.models.contract.losses import LossSums, labelled_weights
from ziggurat.models.contract.model import Embedded, Model, Outputs, SimplerModel
from ziggurat.models.contract.reads import Reads
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.retrieval.retrieval_inputs import check_retrieval_inputs
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.graph.edge_sampling import EdgeSampling, EdgeStrategy, sampled
from ziggurat.ops.graph.graph import Graph, user_item_graph
from ziggurat.ops.graph.propagation import layer_average
from ziggurat.typed import CountOrNone, Dim, FloatOrZero, checked

NEGATIVES = "lightgcn.negatives"
_EDGES = "lightgcn.edges"
_OF_NEGATIVES, _OF_EDGES, _OF_USERS, _OF_ITEMS = 0, 1 << 16, 1 << 17, (1 << 17) + 1  # purposes of random bits


class PairSampling(StrEnum):
    """Choices of the pairs of user and item that a step learns from."""

    SAMPLES = "samples"  # those of the batch: each pair once an epoch
    USERS = "users"  # of users drawn uniformly, one of the items of each


class LayerDtype(StrEnum):
    """Choices of the numbers that layers are kept in; sums are FP32 either way."""

    FP32 = "fp32"
    BF16 = "bf16"  # half the bytes of a product


@dataclass(frozen=True, kw_only=True)
@checked
class LightGCNConfig:
    """Settings of the model `LightGCN`.

    Args:
        embedding_dim: D, columns of both tables.
        num_layers: K; 0 is matrix factorisation, to which neither `layers_in` nor edges matter.
        l2: λ, of the penalty on the rows at layer 0 that a sample reads.
        pairs: which pairs a step learns from, samples or users.
        layers_in: the numbers of layers, fp32 or bf16.
        edge_width: W, edges of a row that take part in a training step at most, drawn anew for each; 0: all of them.
            Evaluation and answers take all edges. Wants layers.
        edge_strategy: how they are drawn; see `ops/graph/edge_sampling.py`.
        embedding: tables: optimizer, kernel, starting weights.
    """

    finds_items: ClassVar[bool] = True

    reads: ClassVar[Reads] = Reads.PAIRS

    kind: Literal["lightgcn"] = "lightgcn"
    embedding_dim: Dim = 64
    num_layers: CountOrNone = 3
    l2: FloatOrZero = 1e-4
    pairs: PairSampling = PairSampling.SAMPLES
    layers_in: LayerDtype = LayerDtype.FP32
    edge_width: CountOrNone = 0
    edge_strategy: EdgeStrategy = EdgeStrategy.FAST_RAND
    embedding: EmbeddingConfig = field(
        default_factory=lambda: EmbeddingConfig(
            optimizer=TableOptimizerKind.ADAM_DENSE, init=TableInit.NORMAL, init_std=0.1
        )
    )

    def __post_init__(self) -> None:
        if self.edge_width and not self.num_layers:
            raise ConfigError(
                expected="layers, in which sampled edges take part",
                found=f"edge_width = {self.edge_width} and num_layers = 0",
                where="lightgcn settings",
                ways_out=("--model.num-layers 3", "leave --model.edge-width out"),
            )

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers of layers."""
        return torch.bfloat16 if self.layers_in is LayerDtype.BF16 else torch.float32

    def table_columns(self, inputs: InputSpec) -> dict[str, int]:
        """Return D columns for every table: users and items are nodes of one graph."""
        return {table.name: self.embedding_dim for table in inputs.tables}

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> LightGCN:
        """Return the model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return LightGCN(self, inputs=inputs, embeddings=embeddings)


class LightGCN(Model):
    """A vector for each user and item, averaged over the graph of who took what.

    Attributes:
        graph: of the training data, users first; None until `observe`.
        propagated_users: (rows of the user's table, D) vectors of answers, as the bits of FP32 numbers.
        propagated_items: those of the item's table.

    Raises:
        SchemaError: the schema has not one user and one item, each a categorical feature with a table of its own.
    """

    observes = True
    finds_items = True
    looks_up_drawn_rows = True

    @check_arguments
    def __init__(self, config: LightGCNConfig, *, inputs: InputSpec, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.config = config
        self._user, self._item = _user_and_item(inputs)
        self._tables = tuple(inputs.single[index].table for index in (self._user, self._item))
        self._sizes = tuple(inputs.table(name).num_rows for name in self._tables)
        self.graph: Graph | None = None
        # Where a user's items begin, and of each of them in rising order how many items below it the user did not take,
        # as numbers that rise from user to user; see `_drawn`.
        self._first_of_user: np.ndarray = np.zeros(self._sizes[0] + 1, dtype=np.int64)
        self._free_below: np.ndarray = np.empty(0, dtype=np.int64)
        self._items_of_users: np.ndarray = np.empty(0, dtype=np.int64)
        self._is_stale = False
        if config.num_layers:
            # Integers: a step keeps a copy of float buffers, which its forward pass might change.
            shapes = [(rows, config.embedding_dim) for rows in self._sizes]
            self.register_buffer("propagated_users", torch.zeros(shapes[0], dtype=torch.int32))
            self.register_buffer("propagated_items", torch.zeros(shapes[1], dtype=torch.int32))
        self.propagated_users: Tensor
        self.propagated_items: Tensor
        self.register_state_dict_pre_hook(_refresh_before_saving)

    # ------------------------------------------------------------------------------------------------------- the graph

    @property
    def has_observed(self) -> bool:
        """True once the graph is there."""
        return self.graph is not None

    def observe(self, batches: Iterable[Batch]) -> None:
        """Make the graph: an edge for each user and item of a positive sample, where both have a row of their own."""
        users = [torch.empty(0, dtype=torch.int64)]
        items = [torch.empty(0, dtype=torch.int64)]
        for batch in batches:
            is_edge_B = (self._weights(batch) > 0).any(dim=1) & self._is_known(batch)
            users.append(batch.single[self._user][is_edge_B].cpu())
            items.append(batch.single[self._item][is_edge_B].cpu())
        users_E = torch.cat(users)
        items_E = torch.cat(items)
        num_users, num_items = self._sizes
        self.graph = user_item_graph(users_E, items_E, num_users=num_users, num_items=num_items)
        self._remember_taken(self.graph)
        self._is_stale = True

    # --------------------------------------------------------------------------------------------------------- training

    def shortened(self, batch: Batch, *, draw: StepDraw) -> Batch:
        """Draw a negative for each sample, which edges take part in the step, and the pairs if users are drawn."""
        rows_B = batch.row_ids.cpu().numpy()
        if self.config.pairs is PairSampling.USERS:
            batch = self._with_drawn_pairs(batch, rows_B, draw=draw)
        users_B = batch.single[self._user].cpu().numpy()
        items_B = batch.single[self._item].cpu().numpy()
        negatives_B = self._drawn(users_B, rows_B, items_B, draw=draw)
        extras = batch.extras | {NEGATIVES: torch.from_numpy(negatives_B).to(batch.single.device)}
        if self.config.edge_width:
            seed = int(draw.hashes(np.zeros(1, np.int64), purposes_P=np.array([_OF_EDGES]))[0, 0] >> np.uint64(40))
            # One number for the step; extras have one for each sample.
            extras[_EDGES] = torch.full((batch.batch_size,), seed, device=batch.single.device)
        return replace(batch, extras=extras)

    def embed(self, batch: Batch) -> Embedded:
        """Return the vectors that the loss or the score reads; ranks look pooled fields up, to exchange them."""
        if self.slots.fields is None:
            # One device: nothing reads them.
            return Embedded(
                dense=batch.dense, fields=batch.dense.new_zeros(batch.batch_size, 0), named=self.further(batch)
            )
        return super().embed(batch)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return the vectors of users and items; for a step, those of negatives and layer 0 as well."""
        users_B = batch.single[self._user]
        items_B = batch.single[self._item]
        is_step = torch.is_grad_enabled() and (NEGATIVES in batch.extras or not batch.batch_size)
        if not is_step:
            return {"user": self._answers(0, users_B), "item": self._answers(1, items_B)}
        self._is_stale = True
        with torch.autocast(batch.dense.device.type, enabled=False):
            return self._of_step(batch, users_B, items_B)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """Return the inner product of user and item as the logit of every label; `named` has what the loss reads."""
        named = embedded.named
        logits_B1 = (named["user"] * named["item"]).sum(dim=1, keepdim=True)
        return Outputs(logits=logits_B1.expand(-1, len(self.inputs.labels)), named=named)

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Return BPR of the positive samples, and the penalty.

        Raises:
            ConfigError: no negatives were drawn for this batch.
        """
        named = outputs.named
        if "negative" not in named:
            raise ConfigError(
                expected="a batch that negatives were drawn for",
                found="one of samples alone",
                where="lightgcn, loss",
                ways_out=(
                    "train with zg.Trainer or zg.train_run, which draw them",
                    "model.shortened(batch, draw=StepDraw(seed=0, step=0)), of ziggurat/models/contract/step_draw.py",
                ),
            )
        users_BD = named["user"]
        margins_B = (users_BD * (named["negative"] - named["item"])).sum(dim=1)
        squares_B = named["first"].square().sum(dim=1).view(3, -1).sum(dim=0)
        losses_B = F.softplus(margins_B) + 0.5 * self.config.l2 * squares_B
        weights_BL = self._weights(batch) * self._is_known(batch).unsqueeze(1)
        total_L = (weights_BL * losses_B.unsqueeze(1)).sum(dim=0)
        return LossSums(total=total_L, weight=weights_BL.sum(dim=0))

    def loss_weight(self, batch: Batch) -> Float[Tensor, "L"]:
        """Return the weight of the positive samples, for each label."""
        return (self._weights(batch) * self._is_known(batch).unsqueeze(1)).sum(dim=0)

    # -------------------------------------------------------------------------------------------------- users and items

    def user_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """Return the vectors of the users of a batch, FP32."""
        return self._answers(0, batch.single[self._user])

    def item_vectors(self, batch: Batch) -> Float[Tensor, "B D"]:
        """Return the vectors of the items of a batch, FP32."""
        return self._answers(1, batch.single[self._item])

    @torch.no_grad()
    def for_answers(self) -> SimplerModel | None:
        """Return a factorisation with the same vectors; None of one that is a factorisation already."""
        if not self.config.num_layers:
            return None
        self._refresh()
        kept = (self.propagated_users, self.propagated_items)
        return SimplerModel(
            config=replace(self.config, num_layers=0, edge_width=0),
            tables={name: each.view(torch.float32) for name, each in zip(self._tables, kept, strict=True)},
        )

    # --------------------------------------------------------------------------------------------------------- details

    def _of_step(self, batch: Batch, users_B: Tensor, items_B: Tensor) -> dict[str, Tensor]:
        negatives_B = batch.extras.get(NEGATIVES, items_B)
        if not batch.batch_size or not self.config.num_layers:
            # Two lookups, as with layers: a rank without samples takes part in the exchanges of the others.
            first_BD = self.embeddings.vectors(self._tables[0], users_B)
            both_2BD = self.embeddings.vectors(self._tables[1], torch.cat([items_B, negatives_B]))
            item_BD = both_2BD[: batch.batch_size]
            negative_BD = both_2BD[batch.batch_size :]
            first = torch.cat([first_BD, item_BD, negative_BD])
            return {"user": first_BD, "item": item_BD, "negative": negative_BD, "first": first}
        graph = self._graph_on(batch.dense.device)
        if self.config.edge_width:
            graph = sampled(graph, self._sampling(int(batch.extras[_EDGES][0])))
        x_ND = self._layer_0()
        num_users = self._sizes[0]
        nodes_3B = torch.cat([users_B, items_B + num_users, negatives_B + num_users])
        means_3BD, first_3BD = layer_average(
            graph, x_ND, num_layers=self.config.num_layers, rows=nodes_3B, dtype=self.config.dtype
        )
        user_BD, item_BD, negative_BD = means_3BD.split(batch.batch_size)
        return {"user": user_BD, "item": item_BD, "negative": negative_BD, "first": first_3BD}

    def _layer_0(self) -> Float[Tensor, "N D"]:
        """Return all rows of both tables; collective on many ranks."""
        return torch.cat([self.embeddings.all_vectors(name) for name in self._tables])

    def _sampling(self, seed: int) -> EdgeSampling:
        return EdgeSampling(width=self.config.edge_width, strategy=self.config.edge_strategy, seed=seed)

    def _graph_on(self, device: torch.device) -> Graph:
        if self.graph is None:
            raise ConfigError(
                expected="a model that has observed its training data, of which the graph is made",
                found="no graph",
                where="lightgcn, before the first step",
                ways_out=(
                    "train from a data set with zg.Trainer or zg.train_run, which let it observe",
                    "model.observe(batches), with every training sample once",
                ),
            )
        # Kept where it was used: it is moved once.
        self.graph = self.graph.to(device)
        return self.graph

    def _answers(self, side: int, rows_B: Int64[Tensor, "B"]) -> Float[Tensor, "B D"]:
        """Return the vectors of answers of users (0) or items (1)."""
        if not self.config.num_layers:
            with torch.no_grad():
                return self.embeddings.vectors(self._tables[side], rows_B)
        self._refresh()
        kept = self.propagated_items if side else self.propagated_users
        return kept.view(torch.float32)[rows_B]

    @torch.no_grad()
    def _refresh(self) -> None:
        """Propagate anew where the weights have changed; collective on many ranks."""
        # Tables that are about to be loaded hold nothing yet.
        is_open = self.embeddings.tables.is_open
        if not self._is_stale or self.graph is None or not self.config.num_layers or is_open:
            return
        graph = self._graph_on(self.propagated_users.device)
        means_ND = layer_average(graph, self._layer_0(), num_layers=self.config.num_layers, dtype=self.config.dtype)[0]
        has_edges_N = graph.offsets.diff() > 0
        sides = zip(means_ND.split(self._sizes), has_edges_N.split(self._sizes), strict=True)
        for kept, (vectors_RD, has_edges_R) in zip((self.propagated_users, self.propagated_items), sides, strict=True):
            mean_D = vectors_RD[has_edges_R].mean(dim=0) if bool(has_edges_R.any()) else vectors_RD.new_zeros(1)
            vectors_RD = torch.where(has_edges_R.unsqueeze(1), vectors_RD, mean_D)
            # The padding row of a table is zero.
            vectors_RD[0] = 0.0
            kept.view(torch.float32).copy_(vectors_RD)
        self._is_stale = False

    def _remember_taken(self, graph: Graph) -> None:
        """Prepare draws among the items that a user did not take.

        A user took items t_0 < t_1 < …, counted without the reserved rows: t_k − k items below t_k are free.
        """
        num_users, num_items = self._sizes
        self._first_of_user = graph.offsets[: num_users + 1].cpu().numpy()
        users_E = np.arange(num_users).repeat(np.diff(self._first_of_user))
        taken_E = graph.columns[: len(users_E)].cpu().numpy().astype(np.int64) - num_users - NUM_RESERVED_ROWS
        k_E = np.arange(len(users_E)) - self._first_of_user[users_E]
        self._free_below = users_E * num_items + taken_E - k_E
        self._items_of_users = taken_E + NUM_RESERVED_ROWS

    def _with_drawn_pairs(self, batch: Batch, rows_B: np.ndarray, *, draw: StepDraw) -> Batch:
        """Return as many pairs as a batch has: each of a user with an edge, drawn uniformly, and one of its items."""
        users_U = np.flatnonzero(np.diff(self._first_of_user))
        if not len(users_U):
            return batch
        # The upper 32 bits times the number: uniform but for 1 in 2^32 / number.
        bits_2B = draw.hashes(rows_B, purposes_P=np.array([_OF_USERS, _OF_ITEMS])) >> np.uint64(32)
        users_B = users_U[(bits_2B[0] * np.uint64(len(users_U)) >> np.uint64(32)).astype(np.int64)]
        first_B = self._first_of_user[users_B]
        num_items_B = (self._first_of_user[users_B + 1] - first_B).astype(np.uint64)
        items_B = self._items_of_users[first_B + (bits_2B[1] * num_items_B >> np.uint64(32)).astype(np.int64)]
        single = batch.single.clone()
        single[self._user] = torch.from_numpy(users_B).to(single.device)
        single[self._item] = torch.from_numpy(items_B).to(single.device)
        weights = None if batch.weights is None else torch.ones_like(batch.weights)
        return replace(batch, single=single, labels=torch.ones_like(batch.labels), weights=weights)

    def _drawn(self, users_B: np.ndarray, rows_B: np.ndarray, items_B: np.ndarray, *, draw: StepDraw) -> np.ndarray:
        """Return items that the users did not take, uniform among those with a row of their own.

        Args:
            users_B: the user of each sample.
            rows_B: the number of the sample, which the draw follows from.
            items_B: its item, which is the answer where the user took all.
            draw: seed and step.
        """
        first_B = self._first_of_user[users_B]
        num_free_B = self._sizes[1] - NUM_RESERVED_ROWS - (self._first_of_user[users_B + 1] - first_B)
        bits_B = draw.hashes(rows_B, purposes_P=np.array([_OF_NEGATIVES]))[0]
        # The upper 32 bits times the number: uniform but for 1 in 2^32 / number.
        free_B = ((bits_B >> np.uint64(32)) * num_free_B.astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        # The n-th free item stands behind as many of the user's items as have at most n free ones below.
        behind_B = np.searchsorted(self._free_below, users_B * self._sizes[1] + free_B, side="right") - first_B
        return np.where(num_free_B > 0, free_B + behind_B + NUM_RESERVED_ROWS, items_B)

    def _is_known(self, batch: Batch) -> Tensor:
        """Return which samples have a user and an item with rows of their own: the reserved ones are no nodes."""
        rows = batch.single
        return (rows[self._user] >= NUM_RESERVED_ROWS) & (rows[self._item] >= NUM_RESERVED_ROWS)

    def _weights(self, batch: Batch) -> Float[Tensor, "B L"]:
        """Return how much each sample counts as a positive: its weight, times its label."""
        known_BL = torch.where(batch.labels.isnan(), 0.0, batch.labels).float()
        return labelled_weights(batch.labels, batch.weights, inputs=self.inputs) * known_BL


def _refresh_before_saving(model: LightGCN, prefix: str, keep_vars: bool) -> None:
    """Let a checkpoint hold the vectors of its own weights."""
    del prefix, keep_vars
    model._refresh()


def _user_and_item(inputs: InputSpec) -> tuple[int, int]:
    """Return the places of user and item among the features with one row a sample.

    Raises:
        SchemaError: there are others, or both share a table.
    """
    items = check_retrieval_inputs(inputs, model="lightgcn")
    names = [spec.name for spec in inputs.single]
    users = [name for name in names if name not in items.features]
    others = sorted(set(feature_names(inputs)) - {items.id, *users[:1]})
    if others or len(users) != 1:
        raise SchemaError(
            expected="one categorical feature for the user and one for the item: the nodes of the graph",
            found=f"item {items.id!r}, users {users}, others {others}"[:300],
            where="inputs of model lightgcn",
            ways_out=("a schema with these two features", "two_tower, which reads any features of both sides"),
        )
    user = names.index(users[0])
    item = names.index(items.id)
    if inputs.single[user].table == inputs.single[item].table:
        raise SchemaError(
            expected="tables of their own for users and items",
            found=f"both in table {inputs.single[user].table!r}",
            where="inputs of model lightgcn",
            ways_out="take `table` out of one of the two features",
        )
    return user, item
