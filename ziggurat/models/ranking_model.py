"""RankingModel: what every ranking model is to the layers above it.

    batch ──► embeddings ──► pooled (B, T) ──► towers, if any ──► fields (B, X) ─┐
          ──► dense ───────────────────────────────────────────► (B, N) ────────┼──► interact ──► logits (B, L)
          ──► vectors ─────────────────────────────────────────► (B, dim) each ─┘

The parts are kept apart because they differ in everything else: embeddings are huge, sparse and updated row by row by
their own optimizer; tower modules live where their tables live; `interact` is small dense torch code that is compiled,
autocast, and replicated. Without towers the fields are the pooled embeddings themselves. A model is written for one
device; no process group, optimizer or file appears in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.embeddings import EmbeddingTables
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models.towers import TowerLayer


class RankingModel(nn.Module, ABC):
    """Scores samples: one logit for each label of its `InputSpec`.

    Subclasses are final, and implement `interact` and `linears_on_raw_inputs`. Names of submodules are the keys of
    checkpoints.

    Args:
        inputs: names, order and sizes of what is in a batch.
        embeddings: the tables; `embeddings.field_dims` must fit the model.
        towers: groups of features behind tower modules; None for a flat model.
    """

    def __init__(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> None:
        super().__init__()
        self.inputs = inputs
        self.embeddings = embeddings
        self.towers = towers

    @property
    def field_dims(self) -> tuple[int, ...]:
        """Numbers of each field that `interact` sees: outputs of the towers, or pooled embeddings."""
        return self.embeddings.field_dims if self.towers is None else self.towers.field_dims

    def forward(self, batch: Batch) -> Float[Tensor, "B L"]:
        """Logits of every sample and label (a regression label's logit is its predicted value)."""
        return self.interact(batch.dense, self.fields(batch), batch.vectors)

    def fields(self, batch: Batch) -> Float[Tensor, "B X"]:
        """Everything below the interaction: embeddings, then towers if there are any; X = Σ field_dims.

        Under autocast the tower modules compute in its dtype, as `interact` does; the lookup never does.
        """
        with torch.autocast(batch.dense.device.type, enabled=False):
            pooled_BT = self.embeddings(batch)
        return pooled_BT if self.towers is None else self.towers(pooled_BT)

    @abstractmethod
    def interact(
        self,
        dense_BN: Float[Tensor, "B N"],
        fields_BX: Float[Tensor, "B X"],
        vectors: dict[str, Float[Tensor, "B V"]],
    ) -> Float[Tensor, "B L"]:
        """The dense network: pure torch operations, traceable as one graph.

        Args:
            dense_BN: numbers after their transforms.
            fields_BX: all fields side by side, as `fields` returns them: pooled embeddings in the order of
                `inputs.fields`, or the outputs of the towers.
            vectors: pretrained vectors by feature name.
        """

    @abstractmethod
    def linears_on_raw_inputs(self) -> list[nn.Module]:
        """Linear maps whose input needs no gradient; their backward pass is one product, not two."""
