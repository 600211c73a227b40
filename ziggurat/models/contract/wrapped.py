"""wrap: a plain module that looks up its own tables becomes a `Model`, and so trains on one device and on many ranks.

    class Shop(nn.Module):                             model = zg.wrap(Shop(inputs))
        def __init__(self, inputs):                    zg.Trainer(model, …) · zg.parallelize(model, …)
            self.tables = EmbeddingTables(inputs, …)
        def forward(self, batch):
            return self.mlp(torch.cat([batch.dense, self.tables(batch)], dim=1))

A `Model` looks up (`embed`) apart from its dense network (`forward_dense`), because ranks exchange between the two. A
plain module does both in one call. `WrappedModel` therefore takes the tables out of the module and looks up before the
call; in the tables' place it leaves `LookedUp`, which has no weights and answers the module's own lookups with what is
there already:

    embed          embeddings(batch) ──► Batched(dense, fields, sequences, vectors, batch)
    forward_dense  network(batch), in which network.tables(batch) is `fields`, network.tables.unpooled(…) a sequence

Weights of tables are then below `embeddings` and all others below `network`: names of checkpoints, optimizers, copies
and shards of the dense network see a model like any other. The module's forward may read everything of the batch, and
it may call its tables any number of times; what it must not do is look up other rows than the batch's.

No computation is added to that of the module. It may be compiled, as long as it does not read rows of lists itself, of
which every batch has another number.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ziggurat.arguments import check_arguments
from ziggurat.embeddings import EmbeddingTables
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.models.contract.model import Embedded, Model, Outputs, Unpooled
from ziggurat.models.contract.outputs_check import checked_outputs
from ziggurat.models.towers.layer import TowerLayer

_GUIDE = "write a subclass of zg.Model (docs/guides/own-model.md)"


@dataclass(frozen=True, kw_only=True)
class Batched(Embedded):
    """Looked-up values, and the batch that a wrapped module reads.

    Args:
        batch: the samples of `fields` and `sequences`.
    """

    batch: Batch


pytree.register_dataclass(Batched)


class LookedUp(nn.Module):
    """Stands where a wrapped module had its tables, and gives it what the model has looked up.

    Args:
        tables: in whose place it stands; not kept.
    """

    def __init__(self, tables: EmbeddingTables) -> None:
        super().__init__()
        self.inputs = tables.inputs
        self.config = tables.config
        self.field_dims = tables.field_dims
        self.output_dim = tables.output_dim
        # Only during a call of the model: whoever calls the module itself finds nothing here.
        self.given: Batched | None = None

    def forward(self, batch: Batch, *, dtype: torch.dtype = torch.float32) -> Float[Tensor, "B T"]:
        """Every pooled field, in the order of `inputs.fields`."""
        return self._of(batch).fields.to(dtype)

    def unpooled(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "N D"], Int64[Tensor, "B+1"]]:
        """The vectors of a list with `pooling = "none"`; see `EmbeddingTables.unpooled`."""
        found = self._list_of(batch, name)
        return found.values.to(dtype), found.offsets

    def sequence(
        self, batch: Batch, name: str, *, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "B L D"], Bool[Tensor, "B L"]]:
        """`unpooled` with lists of one length; see `EmbeddingTables.sequence`."""
        padded_BLD, mask_BL = self._list_of(batch, name).padded()
        return padded_BLD.to(dtype), mask_BL

    def vectors(self, table: str, rows_N: Int64[Tensor, "N"], *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Refuse: only rows of the batch are looked up ahead, and a rank may not hold others."""
        del rows_N, dtype
        raise _past_the_batch(f"vectors({table!r}, …)")

    def table(self, name: str) -> Tensor:
        """Refuse: a rank may hold a part of a table, or none of it."""
        raise _past_the_batch(f"table({name!r})")

    def _list_of(self, batch: Batch, name: str) -> Unpooled:
        given = self._of(batch)
        if name not in given.sequences:
            raise ConfigError(
                expected=f"a list that is not pooled: {', '.join(given.sequences) or 'there is none'}",
                found=repr(name),
                where="lookup of a wrapped module",
                ways_out=('set pooling = "none" for the list in the schema (or its JaggedSpec)', _GUIDE),
            )
        return given.sequences[name]

    def _of(self, batch: Batch) -> Batched:
        if self.given is None:
            raise ConfigError(
                expected="a call of the model that zg.wrap returned: it looks up before it calls the module",
                found="a call of the module itself",
                where="lookup of a wrapped module",
                ways_out="model = zg.wrap(module); model(batch)",
            )
        # By identity: what was looked up belongs to this very batch.
        if batch is not self.given.batch:
            raise _past_the_batch("another Batch than forward got")
        return self.given


class WrappedModel(Model):
    """A user's module as a `Model`: its tables below `embeddings`, everything else below `network`. See `wrap`.

    Args:
        network: a module whose lookups go to the `LookedUp` at `place`.
        embeddings: its tables.
        place: the name of the submodule that stands for them.
    """

    def __init__(self, network: nn.Module, *, embeddings: EmbeddingTables, place: str) -> None:
        super().__init__(embeddings.inputs, embeddings=embeddings)
        self.network = network
        self.place = place
        # A new module starts in training mode, whatever mode the wrapped one was in.
        self.train(network.training)

    def embed(self, batch: Batch) -> Batched:
        """The lookups of all features, and the batch itself."""
        return self.batched(super().embed(batch), batch=batch)

    @staticmethod
    def batched(embedded: Embedded, *, batch: Batch) -> Batched:
        """Join what was looked up with its batch."""
        parts = {each.name: getattr(embedded, each.name) for each in dataclasses.fields(embedded)}
        return Batched(**parts, batch=batch)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The module's own forward pass, on the batch.

        Raises:
            ConfigError: the module looks up what is not there, or gives something else than logits.
        """
        if not isinstance(embedded, Batched):
            raise ConfigError(
                expected="what `embed` of this model gave, with the batch that its module reads",
                found=type(embedded).__name__,
                where=f"forward_dense of {type(self.network).__name__}, wrapped",
                ways_out=("model.forward_dense(model.embed(batch))", "model(batch)"),
            )
        looked_up = self.network.get_submodule(self.place)
        if not isinstance(looked_up, LookedUp):
            raise ConfigError(
                expected=f"the stand-in of the tables at {self.place!r}, which hands on what was looked up",
                found=type(looked_up).__name__,
                where=f"forward of {type(self.network).__name__}, wrapped",
                ways_out=f"leave the submodule {self.place!r} as wrapping has put it there",
            )
        looked_up.given = embedded
        try:
            found = self.network(embedded.batch)
        finally:
            # Also after an error: tensors of this batch must not outlive it.
            looked_up.given = None
        return self._outputs(found, num_samples=embedded.batch.batch_size)

    def _outputs(self, found: object, *, num_samples: int) -> Outputs:
        outputs = Outputs(logits=found) if isinstance(found, Tensor) else found
        where = f"forward of {type(self.network).__name__}, wrapped"
        return checked_outputs(outputs, model=self, num_samples=num_samples, where=where)


@check_arguments
def wrap(module: nn.Module) -> WrappedModel:
    """Make a `Model` of a module whose `forward(batch)` looks up its own `EmbeddingTables` and gives logits.

    The module is changed: the model owns its tables from here on. See `ziggurat.models.contract.wrapped`.

    Args:
        module: has one `EmbeddingTables` somewhere in it, whose inputs name the labels; `forward` takes a `Batch` and
            gives logits (B, L), or `Outputs`.

    Returns:
        A model to train, to make parallel, to save. Its loss is that of the labels; another goes to the trainer.

    Raises:
        ConfigError: the module has no tables or several, is a `Model` or wrapped already, has a tower layer, keeps
            its tables where they cannot be exchanged, or there is no label.
    """
    _refuse_kind(module)
    # Every name: tables that stand in two places have to be exchanged in both.
    named = module.named_modules(remove_duplicate=False)
    found = [(name, each) for name, each in named if isinstance(each, EmbeddingTables)]
    # One object may have several names; several objects would be several sets of tables.
    if len({id(tables) for _, tables in found}) != 1:
        raise _refused(
            module,
            expected="one EmbeddingTables in the module",
            found=", ".join(repr(name) for name, _ in found) or "none",
            ways_out=(
                "self.tables = EmbeddingTables(inputs, config), not in a list or dict of Python",
                "one EmbeddingTables for all features: tables may have columns of their own (InputSpec.tables)",
                _GUIDE,
            ),
        )
    tables = found[0][1]
    _refuse_references(module, tables)
    if not tables.inputs.labels:
        raise _refused(
            module,
            expected="at least one label in the inputs of the tables: a model has one logit a label",
            found="none",
            ways_out="dataclasses.replace(inputs, labels=(LabelSpec(name=…),))",
        )
    stand_in = LookedUp(tables)
    for name, _ in found:
        module.set_submodule(name, stand_in)
    return WrappedModel(module, embeddings=tables, place=found[0][0])


def _refuse_kind(module: nn.Module) -> None:
    if isinstance(module, Model | EmbeddingTables):
        raise _refused(
            module,
            expected="a module that has tables",
            found="a Model, which needs no wrapping" if isinstance(module, Model) else "tables",
            ways_out="train it as it is" if isinstance(module, Model) else "wrap the module that looks them up",
        )
    for name, each in module.named_modules():
        if isinstance(each, LookedUp):
            raise _refused(
                module,
                expected="a module with its tables",
                found=f"one that was wrapped already, at {name!r}",
                ways_out="use the model that the first zg.wrap returned",
            )
        if isinstance(each, TowerLayer):
            raise _refused(
                module,
                expected="a module without tower layer: ranks of a tower could not share it there",
                found=f"TowerLayer at {name!r}",
                ways_out=(_GUIDE, "leave the towers out"),
            )


def _refuse_references(module: nn.Module, tables: EmbeddingTables) -> None:
    """Refuse what would look up past the model: tables, or methods of them, in plain attributes."""
    for name, each in module.named_modules():
        for key, value in vars(each).items():
            # Also bound methods, whose `__self__` are the tables.
            items = value if isinstance(value, list | tuple) else [value]
            if each is not tables and any(
                item is tables or getattr(item, "__self__", None) is tables for item in items
            ):
                raise _refused(
                    module,
                    expected="tables that are read as a submodule only",
                    found=f"a reference to them in {'.'.join(filter(None, (name, key)))}",
                    ways_out=f"take {key} away, and call the submodule in forward",
                )


def _refused(module: nn.Module, *, expected: str, found: str, ways_out: str | tuple[str, ...]) -> ConfigError:
    return ConfigError(expected=expected, found=found, where=f"zg.wrap({type(module).__name__})", ways_out=ways_out)


def _past_the_batch(found: str) -> ConfigError:
    return ConfigError(
        expected="a lookup of the batch that forward got: tables(batch), unpooled(batch, name), sequence(batch, name)",
        found=found,
        where="lookup of a wrapped module",
        ways_out=("change what was looked up instead of the batch", "change batches in the data source", _GUIDE),
    )
