"""TowerEmbedding: an `EmbeddingBagCollection` with towers behind it, on one device.

    KeyedJaggedTensor ─► EmbeddingBagCollection ─► (B, T) in the collection's order ─► TowerLayer ─► (B, Σ O_t)

It is an ordinary module: it runs, trains and saves without a process group, and is what the sharded form must equal.
The columns are those of tower 0, of tower 1, …; inside a tower those of its output fields. With `field_dims` all equal
to D, `output.view(B, -1, D)` is what a dot interaction takes.

Features are called by the keys of the collection's output: the name of the feature, or `feature@table` for a feature
that looks up several tables.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, JaggedSpec, TableSpec
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.models.towers.modules import TowerModuleConfig
from ziggurat.plan import Towers


class TowerEmbedding(nn.Module):
    """An `EmbeddingBagCollection` of TorchRec with tower modules behind it, on one device.

    Args:
        ebc: the collection; taken over as it is, its weights too.
        towers: which features form a tower.
        config: of the tower modules; by default one linear map a feature, without compression.
        dim: N, for which `config.compression` says how much smaller outputs are; 0: that of the tables.
        seed: of the weights of the tower modules.

    Attributes:
        inputs: features and tables in our words.
        tower_layer: the tower modules, and figures about them (`report()`, `compression_ratio`).
        field_dims: numbers of each field that comes out.
        output_dim: Σ O_t.

    Raises:
        PlanError: the towers do not fit the features.
        ConfigError: not an `EmbeddingBagCollection`, tables of several dims and no `dim`, or a compression that does
            not fit.
    """

    def __init__(
        self,
        ebc: EmbeddingBagCollection,
        towers: Towers,
        config: TowerModuleConfig | None = None,
        *,
        dim: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if type(ebc) is not EmbeddingBagCollection:
            raise ConfigError(
                expected="an EmbeddingBagCollection of TorchRec, not yet sharded",
                found=type(ebc).__name__,
                where="TowerEmbedding",
                ways_out=(
                    "wrap the collection before DistributedModelParallel",
                    "towers need pooled embeddings: an EmbeddingCollection gives sequences",
                ),
            )
        tables = ebc.embedding_bag_configs()
        dims = sorted({table.embedding_dim for table in tables})
        if not dim and len(dims) > 1:
            raise ConfigError(
                expected="one embedding_dim for all tables, or dim = N, from which compressed fields follow",
                found=f"tables of {', '.join(map(str, dims))} columns",
                where="TowerEmbedding",
                ways_out=f"TowerEmbedding(…, dim={dims[-1]})",
            )
        names = get_embedding_names_by_table(tables)
        self.inputs = InputSpec(
            jagged=tuple(
                JaggedSpec(name=name, table=table.name)
                for table, of_table in zip(tables, names, strict=True)
                for name in of_table
            ),
            tables=tuple(
                TableSpec(name=table.name, num_rows=table.num_embeddings, embedding_dim=table.embedding_dim)
                for table in tables
            ),
        )
        self.ebc = ebc
        self.tower_layer = TowerLayer(
            config or TowerModuleConfig(),
            inputs=self.inputs,
            field_dims=[self.inputs.table(field.table).embedding_dim for field in self.inputs.fields],
            towers=towers,
            dim=dim or dims[0],
            seed=seed,
        )
        self.dim = dim or dims[0]
        self.seed = seed
        self.field_dims = self.tower_layer.field_dims
        self.output_dim = self.tower_layer.output_dim

    @property
    def towers(self) -> Towers:
        """The features that form each tower."""
        return self.tower_layer.towers

    @property
    def tables(self) -> dict[str, str]:
        """The table of each feature."""
        return {field.name: field.table for field in self.inputs.fields}

    def forward(self, features: KeyedJaggedTensor) -> Float[Tensor, "B X"]:
        """Outputs of all towers side by side.

        Args:
            features: at least those of the collection, in any order.
        """
        return self.tower_layer(self.ebc(features).values())
