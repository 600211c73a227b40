"""RankingModel: the base of the built-in models, whose dense network is one function of numbers, fields and vectors.

    batch ──► embeddings ──► pooled (B, T) ──► towers, if any ──► fields (B, X) ─┐
          ──► dense ───────────────────────────────────────────► (B, N) ────────┼──► interact ──► logits (B, L)
          ──► vectors ─────────────────────────────────────────► (B, dim) each ─┘

What every model is to the layers above it stands in `model.py`; `interact` is how most built-in models write their
`forward_dense`, and nothing outside of a model calls it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec
from ziggurat.models.blocks.closing_maps import closing_maps_of
from ziggurat.models.blocks.output_biases import output_biases_of, starting_biases_of
from ziggurat.models.contract.model import Embedded, Model, Outputs
from ziggurat.models.towers.layer import TowerLayer


class RankingModel(Model):
    """The base of the built-in models, which give one logit for each label of their `InputSpec`.

    Subclasses are final, and implement `interact`.

    Attributes:
        reads_sequences: True for a model that reads un-pooled lists.

    Raises:
        ConfigError: there are un-pooled lists, and the model reads none.
    """

    reads_sequences: ClassVar[bool] = False
    pools_histories: ClassVar[bool] = True
    exploits_repeats: ClassVar[tuple[str, ...]] = ("lookups", "pooling")

    @check_arguments
    def __init__(self, inputs: InputSpec, *, embeddings: EmbeddingTables, towers: TowerLayer | None = None) -> None:
        super().__init__(inputs, embeddings=embeddings, towers=towers)
        if inputs.sequences and not self.reads_sequences:
            raise ConfigError(
                expected="lists that are pooled: this model reads one vector a feature",
                found=f"pooling = none for {', '.join(spec.name for spec in inputs.sequences)}",
                where=f"features of the schema, model {type(self).__name__}",
                ways_out=("set pooling = mean or sum in the schema", "take a model that reads sequences: din"),
            )

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The dense network on numbers, fields and vectors."""
        return self.as_outputs(self.interact(embedded.dense, embedded.fields, self.vectors_of(embedded)))

    def output_biases(self) -> Sequence[Tensor]:
        """Those of the first-order term, else of the heads; a model whose output is another one says where they are."""
        return output_biases_of(self, num_labels=len(self.inputs.labels))

    def starting_biases(self, logits: Sequence[float]) -> Sequence[float]:
        """See `Model.starting_biases`."""
        return starting_biases_of(self, logits)

    def closing_maps(self) -> Sequence[nn.Linear]:
        """Those of the only heads; a model whose output is another one names its maps."""
        return closing_maps_of(self)

    @abstractmethod
    def interact(
        self,
        dense_BN: Float[Tensor, "B N"],
        fields_BX: Float[Tensor, "B X"],
        vectors: dict[str, Float[Tensor, "B V"]],
    ) -> Float[Tensor, "B L"]:
        """Make what becomes the logits, from numbers, all fields side by side, and pretrained vectors by feature name.

        Of a label that is a number it is in deviations from the mean; `as_outputs` turns it into the label's units.
        """
