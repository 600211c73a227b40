"""A ranking model whose time is its history: STU layers over events, the mean of what they give, and an MLP."""

from __future__ import annotations

import torch

from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables
from ziggurat.features.inputs import InputSpec
from ziggurat.models import Embedded, Model, Outputs
from ziggurat.models.blocks.mlp import MLP, MLPConfig
from ziggurat.models.sequence.layers.hstu import HSTULayer, stu
from ziggurat.models.sequence.layers.stack import SequenceStack
from ziggurat.ops.attention.problem import AttentionMask


class HistoryEncoder(Model):
    """Logits from the numbers, the pooled fields and the mean of an encoded history.

    Args:
        inputs: with one list that is not pooled.
        dim: columns of tables.
        num_layers: of the encoder.
        reach: events that an event sees, so that cost grows with the length.
    """

    reads_slices = True
    slice_modules = ("encoder",)

    def __init__(self, inputs: InputSpec, *, dim: int, num_layers: int, reach: int) -> None:
        super().__init__(inputs, embeddings=EmbeddingTables(inputs, EmbeddingConfig(dim=dim)))
        layers = [
            HSTULayer(stu(dim=dim, max_length=1 << 15, num_heads=2, head_dim=dim // 2)) for _ in range(num_layers)
        ]
        self.encoder = SequenceStack(layers, mask=AttentionMask(max_attention_length=reach))
        (history,) = inputs.sequences
        self._history = history.name
        width = len(inputs.dense) + sum(self.embeddings.field_dims) + dim
        self.head = MLP(width, config=MLPConfig(hidden_dims=(64,)), output_dim=len(inputs.labels))

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The history through the encoder, its mean beside everything else through the MLP."""
        encoded = self.encoder.encode(embedded.sequences[self._history])
        mean_BD = encoded.mean() if encoded.inverse is None else encoded.mean()[encoded.inverse]
        both = torch.cat([mean_BD, embedded.fields, embedded.dense], dim=1)
        return Outputs(logits=self.head(both))
