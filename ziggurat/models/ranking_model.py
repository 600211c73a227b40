"""RankingModel: what every ranking model is to the layers above it.

    batch ──► embeddings ──► pooled (B, T) ─┐
          ──► dense      ──► (B, N) ────────┼──► interact ──► logits (B, L), one a label
          ──► vectors    ──► (B, dim) each ─┘

The two halves are kept apart because they differ in everything else: embeddings are huge, sparse and updated row by
row by their own optimizer; `interact` is small dense torch code that is compiled, autocast, and replicated. A model is
written for one device; no process group, optimizer or file appears in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec


class RankingModel(nn.Module, ABC):
    """Scores samples: one logit for each label of its `InputSpec`.

    Subclasses are final, and implement `interact` and `linears_on_raw_inputs`. Names of submodules are the keys of
    checkpoints.

    Args:
        inputs: names, order and sizes of what is in a batch.
        embeddings: the tables; `embeddings.field_dims` must fit the model.
    """

    def __init__(self, inputs: InputSpec, *, embeddings: EmbeddingTables) -> None:
        super().__init__()
        self.inputs = inputs
        self.embeddings = embeddings

    def forward(self, batch: Batch) -> Float[Tensor, "B L"]:
        """Logits of every sample and label (a regression label's logit is its predicted value)."""
        return self.interact(batch.dense, self.embeddings(batch), batch.vectors)

    @abstractmethod
    def interact(
        self,
        dense_BN: Float[Tensor, "B N"],
        pooled_BT: Float[Tensor, "B T"],
        vectors: dict[str, Float[Tensor, "B V"]],
    ) -> Float[Tensor, "B L"]:
        """The dense network: pure torch operations, traceable as one graph.

        Args:
            dense_BN: numbers after their transforms.
            pooled_BT: pooled embeddings of all fields, side by side in the order of `inputs.fields`.
            vectors: pretrained vectors by feature name.
        """

    @abstractmethod
    def linears_on_raw_inputs(self) -> list[nn.Module]:
        """Linear maps whose input needs no gradient; their backward pass is one product, not two."""
