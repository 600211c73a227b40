"""Graph: edges with weights in CSR form, and that of users and items with the weights of LightGCN.

    offsets   0     2        5          row r has the edges offsets[r] … offsets[r + 1]
    columns   [3 4] [0 1 4]             the neighbours, ascending
    weights   [a b] [c d e]

Users and items are the nodes of one graph, users first. An edge between user u and item i has the weight
1 / √(d_u · d_i), d the number of neighbours (He et al., "LightGCN", SIGIR 2020, arXiv 2002.02126, equation 3). That
matrix is symmetric: it is its own transpose, so a backward pass is the same product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float32, Int32, Int64
from torch import Tensor

from ziggurat.errors import BoundsError
from ziggurat.features.jagged import offsets_of


@dataclass(frozen=True)
class Graph:
    """A sparse matrix of R rows and `num_columns` columns; all tensors on one device.

    Args:
        offsets: where the edges of each row begin, and the end of the last.
        columns: of each edge.
        weights: of each edge.
        num_columns: rows of what is propagated.
        is_symmetric: whether it equals its transpose, which is then not made.
    """

    offsets: Int64[Tensor, "R+1"]
    columns: Int32[Tensor, "E"]
    weights: Float32[Tensor, "E"]
    num_columns: int
    is_symmetric: bool = False

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.offsets) - 1

    @property
    def num_edges(self) -> int:
        """E."""
        return len(self.columns)

    @property
    def device(self) -> torch.device:
        """Return the device of its tensors."""
        return self.offsets.device

    def rows_of_edges(self) -> Int64[Tensor, "E"]:
        """Return the row of each edge."""
        rows_R = torch.arange(self.num_rows, device=self.device)
        return rows_R.repeat_interleave(self.offsets.diff(), output_size=self.num_edges)

    def transposed(self) -> Graph:
        """Return the graph with rows and columns exchanged; edges of equal ends keep their order."""
        if self.is_symmetric:
            return self
        # Stable, so that a sum over edges has one order.
        order_E = self.columns.argsort(stable=True)
        counts_C = torch.bincount(self.columns, minlength=self.num_columns)
        rows_E = self.rows_of_edges().int()
        return Graph(
            offsets=offsets_of(counts_C),
            columns=rows_E[order_E],
            weights=self.weights[order_E],
            num_columns=self.num_rows,
        )

    def to(self, device: torch.device) -> Graph:
        """Return it on a device."""
        if self.device == device:
            return self
        tensors = (each.to(device) for each in (self.offsets, self.columns, self.weights))
        return Graph(*tensors, num_columns=self.num_columns, is_symmetric=self.is_symmetric)


def user_item_graph(
    users_E: Int64[Tensor, "E"], items_E: Int64[Tensor, "E"], *, num_users: int, num_items: int
) -> Graph:
    """Return the symmetric graph of users (nodes 0 …) and items (nodes num_users …), with the weights of LightGCN.

    Args:
        users_E: the user of each event; a pair that comes again is one edge.
        items_E: the item of each event.
        num_users: users, those without an event included.
        num_items: likewise.

    Raises:
        BoundsError: a user or an item outside of these.
    """
    for name, numbers_E, size in (("user", users_E, num_users), ("item", items_E, num_items)):
        if len(numbers_E) and bool(((numbers_E < 0) | (numbers_E >= size)).any()):
            raise BoundsError(
                expected=f"numbers of {name}s from 0 to {size - 1:,}",
                found=f"{int(numbers_E.min()):,} to {int(numbers_E.max()):,}",
                where="edges of a graph of users and items",
                ways_out=f"say how many {name}s there are",
            )
    # One number a pair: sorted by user, then by item, each once.
    pairs_E = torch.unique(users_E * num_items + items_E)
    users_E = pairs_E // num_items
    items_E = pairs_E % num_items
    degrees_U = torch.bincount(users_E, minlength=num_users)
    degrees_I = torch.bincount(items_E, minlength=num_items)
    weights_E = (degrees_U[users_E] * degrees_I[items_E]).double().rsqrt().float()
    # Stable: the users of an item ascend, as its edges come by user.
    by_item_E = items_E.argsort(stable=True)
    return Graph(
        offsets=offsets_of(torch.cat([degrees_U, degrees_I])),
        columns=torch.cat([items_E + num_users, users_E[by_item_E]]).int(),
        weights=torch.cat([weights_E, weights_E[by_item_E]]),
        num_columns=num_users + num_items,
        is_symmetric=True,
    )
