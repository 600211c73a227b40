"""How strongly two features interact: the mean |cosine| of their pooled embeddings over samples.

A tower compresses the features inside it together; features of different towers meet only afterwards, compressed. So
the partitioner needs to know who belongs together. A trained flat model knows: a dot-product interaction pulls the
vectors of features that matter to each other into the same directions, and pushes those that do not apart.

    I_ij = mean over samples b of |cos(e_bi, e_bj)|,   I_ii = 1,   0 ≤ I ≤ 1
    e_bi (D,)   pooled embedding of feature i in sample b

The absolute value counts repulsion as much as attraction. Independent random directions do not give 0 but
√(2/(π·D)) on average, 0.2 for D = 16: differences of I matter, not its level.

All vectors must lie in *one* space of D numbers, since a cosine between different spaces means nothing. Tables of
different widths are brought there first: by the model's own learned projections where it has them (DLRM), which is
where its products are taken. A model without products (DCNv2, DNN) learns which columns to combine in its weights, and
no cosine sees that: on data with two planted groups, DLRM's embeddings gave 0.32 within and 0.20 across and the groups
exactly, DCNv2's 0.21 and 0.20 and no groups. Probe a DLRM, whatever is trained afterwards. Where widths differ without
projections, `pad_fields` fills up with zeros, which keeps the lengths and compares the first columns.

A sample in which a vector is zero (an empty list) has no cosine and does not count for that feature's pairs; a pair
that is never present together gets 0. Reference: the probe of the tower partitioner in Luo et al., "Disaggregated
Multi-Tower" (arXiv 2403.00877). Cost: B·F²·D multiplications a batch, in chunks that bound the memory; sums in FP64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ziggurat.errors import DataError, NumericsError

_CHUNK_NUMBERS = 1 << 23  # cosines held at once: 32 MiB


class InteractionSums:
    """Running sums of |cosine| over batches.

    Args:
        num_features: F.

    Attributes:
        num_samples: samples seen.
    """

    def __init__(self, num_features: int) -> None:
        self.num_samples = 0
        self._sums = torch.zeros(num_features, num_features, dtype=torch.float64)
        self._counts = torch.zeros_like(self._sums)

    @torch.no_grad()
    def add(self, fields_BFD: Float[Tensor, "B F D"]) -> None:
        """Add the pooled embeddings of a batch.

        Raises:
            NumericsError: they are not finite.
        """
        num_features = len(self._sums)
        assert fields_BFD.shape[1] == num_features
        for chunk_BFD in fields_BFD.float().split(max(1, _CHUNK_NUMBERS // max(1, num_features**2))):
            lengths_BF = torch.linalg.vector_norm(chunk_BFD, dim=2)
            if not bool(torch.isfinite(lengths_BF).all()):
                raise NumericsError(
                    expected="finite embeddings",
                    found="NaN, infinity, or numbers too large to square",
                    where=f"pooled embeddings of sample {self.num_samples} or later",
                    ways_out="probe an earlier checkpoint; `ziggurat evaluate RUN DATA` shows whether its metrics hold",
                )
            present_BF = lengths_BF > 0
            unit_BFD = chunk_BFD / torch.where(present_BF, lengths_BF, 1.0).unsqueeze(2)
            # Rounding may pass 1.
            cosines_BFF = torch.bmm(unit_BFD, unit_BFD.transpose(1, 2)).abs_().clamp_(max=1.0)
            self._sums += cosines_BFF.sum(0, dtype=torch.float64).to(self._sums.device)
            present = present_BF.to(dtype=torch.float64, device=self._sums.device)
            self._counts += present.T @ present
            self.num_samples += len(chunk_BFD)

    @property
    def matrix(self) -> Float64[Tensor, "F F"]:
        """I so far: symmetric, ones on the diagonal.

        Raises:
            DataError: no sample was added.
        """
        if not self.num_samples:
            raise DataError(
                expected="at least one sample to probe",
                found="none",
                where="InteractionSums",
                ways_out="add batches of the training data first",
            )
        mean = self._sums / self._counts.clamp(min=1)
        # A product of matrices may round (i, j) and (j, i) differently.
        return ((mean + mean.T) / 2).fill_diagonal_(1.0)


def pad_fields(pooled_BT: Float[Tensor, "B T"], *, field_dims: Sequence[int]) -> Float[Tensor, "B F D"]:
    """Fields side by side to one vector of the widest dim each, narrower ones filled with zeros; see the module.

    Args:
        pooled_BT: what `EmbeddingTables` puts out.
        field_dims: columns of each field, in order.
    """
    widest = max(field_dims)
    if min(field_dims) == widest:
        return pooled_BT.view(len(pooled_BT), len(field_dims), widest)
    fields = pooled_BT.split(tuple(field_dims), dim=1)
    return torch.stack([torch.nn.functional.pad(field, (0, widest - field.shape[1])) for field in fields], dim=1)
