"""Edge sampling of ES-SpMM: of a row with more than W edges, W of them take part (Lin et al., arXiv 2104.10716).

    row of n edges        0 1 2 3 4 5 6 7 8 9 …           n ≤ W: all of them
    bucket                (first + ⌊k·n / W⌋) mod n       the row is cut into W buckets of neighbours
    fast_rand             (first + k·p) mod n             p prime: one multiplication an edge, no two edges alike

On a GPU the chosen edges of a row fit into shared memory, and nothing of a row is read that does not take part. The
graph stays as it is; every call may sample anew: `first` follows from a seed and the row.

    first = upper 31 bits of mix(seed + row·G), mod n     splitmix64 (`ops/mixed_bits.py`); 0 in every row for seed 0

So over the seeds an edge of a row is each of the W chosen ones equally often: it takes part in W of n of them. The
weights of a row that was cut are multiplied by n / W (`rescales`), so that its sum is right in the mean over seeds.
Sums of products by row and seed would not do in place of mixed bits: a row whose number is a multiple of n would begin
at edge 0 with every seed, and leave out the same neighbours for ever.

The paper names both strategies; the numbers above (where a bucket begins, the prime, how a seed enters) are this
package's.

`sampled` makes a smaller graph, and defines the result. `propagation.propagate(…, sampling=…)` samples while it adds
up, as the paper does; a training step, which goes through the edges 2·K times, takes the smaller graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.features.jagged import offsets_of
from ziggurat.ops.graph.graph import Graph
from ziggurat.ops.mixed_bits import GOLDEN_SIGNED, mix, shifted
from ziggurat.typed import Count, checked

PRIME = 2_147_483_647  # above any number of edges of a row, so it has no divisor in common with one
_FIRST_BITS = 31


class EdgeStrategy(StrEnum):
    """Choices of which edges of a long row take part."""

    BUCKET = "bucket"
    FAST_RAND = "fast_rand"


@dataclass(frozen=True, kw_only=True)
@checked
class EdgeSampling:
    """Settings of the sampling of edges.

    Args:
        width: W, edges of a row that take part at most.
        strategy: bucket or fast_rand; see `EdgeStrategy`.
        rescales: whether the weights of a row that was cut grow by n / W.
        seed: another one chooses other edges; 0: every row begins at its first edge.
    """

    width: Count
    strategy: EdgeStrategy = EdgeStrategy.FAST_RAND
    rescales: bool = True
    seed: int = 0

    @property
    def key(self) -> int:
        """The seed as the kernels take it, a number of 63 bits."""
        return self.seed % (1 << 63)


def sampled(graph: Graph, sampling: EdgeSampling) -> Graph:
    """Return the graph of the edges that take part: rows, and within them chosen edges in the order of k."""
    lengths_R = graph.offsets.diff()
    kept_R = lengths_R.clamp(max=sampling.width)
    offsets_R1 = offsets_of(kept_R)
    rows_E = torch.arange(graph.num_rows, device=graph.device).repeat_interleave(kept_R)
    k_E = torch.arange(len(rows_E), device=graph.device) - offsets_R1[rows_E]
    lengths_E = lengths_R[rows_E]
    some_E = chosen_edges(k_E, rows=rows_E, lengths=lengths_E, sampling=sampling)
    chosen_E = torch.where(lengths_E > sampling.width, some_E, k_E)
    places_E = graph.offsets[rows_E] + chosen_E
    weights_E = graph.weights[places_E]
    if sampling.rescales:
        factors_R = torch.where(lengths_R > sampling.width, lengths_R.float() / sampling.width, 1.0)
        weights_E = weights_E * factors_R[rows_E]
    return Graph(offsets=offsets_R1, columns=graph.columns[places_E], weights=weights_E, num_columns=graph.num_columns)


def chosen_edges(
    k_E: Int64[Tensor, "E"], *, rows: Int64[Tensor, "E"], lengths: Int64[Tensor, "E"], sampling: EdgeSampling
) -> Int64[Tensor, "E"]:
    """Return which edge of its row is the k-th that takes part.

    Args:
        k_E: 0 … W − 1.
        rows: the row of each.
        lengths: n, the edges of that row; the answer is for rows of more than W.
        sampling: the settings.
    """
    # Another row, another beginning, but for a seed of 0: hubs would else all leave out the same neighbours.
    bits_E = shifted(mix(rows * GOLDEN_SIGNED + sampling.key), 64 - _FIRST_BITS)
    first_E = bits_E % lengths if sampling.key else torch.zeros_like(rows)
    if sampling.strategy is EdgeStrategy.BUCKET:
        return (first_E + k_E * lengths // sampling.width) % lengths
    return (first_E + k_E * (PRIME % lengths)) % lengths
