"""Add a model over a graph: LightGCN whose nodes are their own neighbours, as in graph convolutions.

    LightGCN     A_rc = 1 / √(d_r · d_c)                     for each edge
    here         A_rc = 1 / √((d_r + 1) · (d_c + 1))         for each edge, and for each node that has one with itself

A layer then keeps a part of each node's own vector, 1 / (d + 1), instead of none: vectors change less from layer to
layer, least those of users with few items. Tables, loss, negatives, evaluation, ranks and exports are LightGCN's. A
node without an edge gets no loop: its own row was never trained, and it has the mean vector of all others, as there.

    ziggurat train table_lightgcn --model self_loops:SelfLoopsConfig --data.train visits.parquet --schema visits.toml

Source: Kipf and Welling, "Semi-supervised classification with graph convolutional networks", ICLR 2017, arXiv
1609.02907, section 2.2 (the renormalisation trick). He et al., "LightGCN", SIGIR 2020, arXiv 2002.02126, section 3.2.1
says why its authors leave them out: the average over layers holds layer 0 already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ziggurat.embeddings import EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models import LightGCN, LightGCNConfig
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.graph.graph import Graph


@dataclass(frozen=True, kw_only=True)
class SelfLoopsConfig(LightGCNConfig):
    """Settings of the model `SelfLoops`, which are those of LightGCN."""

    kind: str = "self_loops"  # type: ignore[assignment]

    def build(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> SelfLoops:
        """Return the model on tables of these columns."""
        del towers  # none: this config has no `tower_module`
        return SelfLoops(self, inputs=inputs, embeddings=embeddings)


class SelfLoops(LightGCN):
    """LightGCN over a graph in which each node with an edge has one with itself."""

    def observe(self, batches: Iterable[Batch]) -> None:
        """Make the graph of the training samples, and add the loops."""
        super().observe(batches)
        assert self.graph is not None, "it has been observed"
        self.graph = with_self_loops(self.graph)


def with_self_loops(graph: Graph) -> Graph:
    """Return a symmetric graph with an edge from each node that has one to itself, and weights of the new degrees."""
    degrees_N = graph.offsets.diff()
    loops_L = torch.arange(graph.num_rows, device=graph.device)[degrees_N > 0]
    rows_E = torch.cat([graph.rows_of_edges(), loops_L])
    columns_E = torch.cat([graph.columns.long(), loops_L])
    # By row and then by column, as edges lie in a graph.
    order_E = (rows_E * graph.num_columns + columns_E).argsort()
    rows_E = rows_E[order_E]
    columns_E = columns_E[order_E]
    with_loop_N = degrees_N + (degrees_N > 0)
    weights_E = (with_loop_N[rows_E] * with_loop_N[columns_E]).double().rsqrt().float()
    return Graph(
        offsets=torch.cat([with_loop_N.new_zeros(1), with_loop_N.cumsum(0)]),
        columns=columns_E.int(),
        weights=weights_E,
        num_columns=graph.num_columns,
        is_symmetric=True,
    )
