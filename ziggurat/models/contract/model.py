"""The contract of a model: three methods, and what passes between them.

    batch ──► embed ──► Embedded(dense, fields, sequences, vectors) ──► forward_dense ──► Outputs(logits, named)
                                                                                             │
                                                                    LossSums ◄── loss ◄──────┴── batch (labels, weights)

`embed` does what `parallelize` spreads over ranks: lookups, pooled and un-pooled, and towers. `forward_dense` is the
dense network: torch operations alone, which may be compiled as one graph, autocast, and replicated or sharded. `loss`
reads whatever `forward_dense` returned and the real labels. The parts are kept apart because they differ in everything
else: tables are huge, sparse, and updated row by row by their own optimizer; tower modules live where their tables
live; the dense network is small. The training step, the pipeline, evaluation and scoring call these three methods, on
ranks also `loss_weight`, and nothing else, so training and evaluation take one path.

A model is written for one device: no process group, optimizer or file appears in it. `Embedded`, `Outputs` and
`Unpooled` are pytrees of torch, so compilation and FSDP find the tensors in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ziggurat.embeddings.contract import Embeddings
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import ListSizes
from ziggurat.models.blocks.vector_histories import VectorHistories
from ziggurat.models.contract.losses import LossSums, in_label_units, labelled_weight, loss_sums
from ziggurat.models.contract.negatives import DrawnLayout, NegativesConfig
from ziggurat.models.contract.step_draw import StepDraw
from ziggurat.models.towers.layer import TowerLayer
from ziggurat.ops.pad_lists import pad_lists
from ziggurat.ops.repeat import ListCopies, expand_lists


@dataclass(frozen=True, kw_only=True)
class Unpooled:
    """The vectors of a list feature, one for each row, not pooled: those of sample b at offsets[b] … offsets[b + 1].

    In a deduplicated batch a model that says so (`Model.reads_slices`) gets each distinct list once: that of sample b
    is at offsets[u] … offsets[u + 1] with u = inverse[b], and `samples`, `mean` and `padded` speak of slices.

    Args:
        values: (N, D) vectors, sample after sample (slice after slice).
        offsets: (B + 1,) from 0 to N; (U + 1,) with `inverse`.
        inverse: (B,) the slice of each sample; None where there is one list a sample.
        sizes: of the samples' lists on a GPU, where the host knows them; None elsewhere.
    """

    values: Float[Tensor, "N D"]
    offsets: Int64[Tensor, "B+1"]
    inverse: Int64[Tensor, "B"] | None = None
    sizes: ListSizes | None = None

    def expanded(self) -> Unpooled:
        """The same with one list a sample."""
        if self.inverse is None:
            return self
        values_ND, offsets_B1 = expand_lists(self.values, self.offsets, self.inverse, num_rows=self._num_rows)
        # `sizes` speak of samples' lists already, not of slices.
        return Unpooled(values=values_ND, offsets=offsets_B1, sizes=self.sizes)

    def copies(self) -> ListCopies:
        """Return where samples have copies of the events of these lists; see `ListCopies`."""
        sizes = {"num_events": self.values.shape[0], "num_rows": self._num_rows}
        return ListCopies.of(self.offsets, self.inverse, **sizes)

    @property
    def longest(self) -> int | None:
        """No list is longer, one a sample; None where nobody knows it without asking a device."""
        # With `inverse` the lists here are slices, of which the sizes do not tell.
        return None if self.sizes is None or self.inverse is not None else self.sizes.longest

    @property
    def _num_rows(self) -> int | None:
        """Rows of the lists of all samples, where the host knows it."""
        return None if self.sizes is None else self.sizes.num_rows

    def picked(self, rows_M: Int64[Tensor, "M"], offsets_B1: Int64[Tensor, "B+1"]) -> Unpooled:
        """Some vectors of lists, one a sample, in their order; `offsets_B1` are those of what is left of each."""
        # The longest before is a bound for what is left.
        sizes = None if self.sizes is None else ListSizes(rows_M.shape[0], self.sizes.longest)
        return Unpooled(values=self.values[rows_M], offsets=offsets_B1, sizes=sizes)

    @property
    def samples(self) -> Int64[Tensor, "N"]:
        """The sample of each vector."""
        lengths_B = self.offsets.diff()
        samples_B = torch.arange(lengths_B.shape[0], device=lengths_B.device)
        # `output_size` is known here, and spares a question to the device.
        return samples_B.repeat_interleave(lengths_B, output_size=self.values.shape[0])

    def mean(self) -> Float[Tensor, "B D"]:
        """The mean of each list; zeros for an empty one."""
        lengths_B = self.offsets.diff()
        sums_BD = self.values.new_zeros(lengths_B.shape[0], self.values.shape[1])
        return sums_BD.index_add(0, self.samples, self.values) / lengths_B.clamp(min=1).unsqueeze(1)

    def padded(self) -> tuple[Float[Tensor, "B T D"], Bool[Tensor, "B T"]]:
        """Vectors as long as the longest list of the batch, zeros after the end of a list; and what lies inside.

        The shape depends on data, so this is for networks that are not compiled.
        """
        return pad_lists(self.values, self.offsets, longest=self.longest)


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """Values that `embed` gives and the dense network reads.

    Args:
        dense: (B, N) numbers after their transforms.
        fields: (B, X) all pooled fields side by side: embeddings in the order of `inputs.fields`, or what towers
            make of them.
        sequences: the lists that are not pooled (`Pooling.NONE`), by feature name.
        vectors: (B, dim) pretrained vectors, by feature name; of a history of vectors its packed words, see
            `Model.vectors_of`.
        named: further tensors that the dense network reads; see `Model.further`.
    """

    dense: Float[Tensor, "B N"]
    fields: Float[Tensor, "B X"]
    sequences: dict[str, Unpooled] = field(default_factory=dict)
    vectors: dict[str, Float[Tensor, "B V"]] = field(default_factory=dict)
    named: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Outputs of the dense network.

    Args:
        logits: (B, L), one for each label (a regression label's logit is its predicted value).
        named: further tensors that `loss` reads, by a name of the model's choice.

    Example:
        >>> import torch
        >>> zg.Outputs(logits=torch.zeros(5, 1)).logits.shape
        torch.Size([5, 1])
    """

    logits: Float[Tensor, "B L"]
    named: dict[str, Tensor] = field(default_factory=dict)


# As pytrees, so that torch.compile and FSDP find the tensors inside.
for _kind in (Unpooled, Embedded, Outputs):
    pytree.register_dataclass(_kind)


class PooledFields(Protocol):
    """Gives the pooled fields of a batch, as the dense network reads them: lookup, then towers if there are any."""

    @property
    def field_dims(self) -> tuple[int, ...]:
        """Numbers of each field."""
        ...

    def __call__(self, batch: Batch) -> Float[Tensor, "B X"]:
        """Return all fields side by side; X = Σ field_dims."""
        ...


@dataclass(frozen=True, kw_only=True)
class SimplerModel:
    """A model that answers as another does: a config, and the rows of its tables.

    Args:
        config: of a model of the package, which has no weights but its tables.
        tables: all rows of each table, by name.
    """

    config: Any
    tables: dict[str, Float[Tensor, "rows D"]]


class Student(Protocol):
    """Computes in training what a model learns beside its logits; it is a submodule of the model (`Model.student`)."""

    def inputs_of(self, batch: Batch) -> dict[str, Tensor]:
        """Return what it reads of a batch, by names of its own: a part of `Embedded.named`."""
        ...

    def outputs_beside(self, outputs: Outputs, embedded: Embedded) -> Outputs:
        """Return the outputs of the dense network with its own among `named`."""
        ...

    def facts(self) -> dict[str, object]:
        """Return numbers for a line of the training log, of the steps since the last call."""
        ...


@dataclass
class Slots:
    """Stand-ins for parts of a model, on many ranks; a model of one device leaves all of them empty.

    `parallelize` fills `network`, `outputs` and `fields`, once.

    Args:
        network: the dense network as copies or parts, called in place of `forward_dense`.
        outputs: called in place of embedding and dense network where ranks divide histories.
        fields: called in place of lookup and towers.
        expands_lists: gives one list a sample where the model would read slices; a step whose network is compiled fills
            it, because a graph has no room for slices, whose number differs from batch to batch.
    """

    network: Callable[[Embedded], Outputs] | None = None
    outputs: Callable[[Batch], Outputs] | None = None
    fields: PooledFields | None = None
    expands_lists: bool = False


class Model(nn.Module, ABC):
    """The base of every model: it gives samples logits. A model of your own implements `forward_dense`, at least.

    Names of submodules are the keys of checkpoints. Weights of the model are either below `embeddings`, below
    `towers`, or part of the dense network.

    Args:
        inputs: names, order and sizes of what is in a batch.
        embeddings: the tables, or what wraps them; `embeddings.field_dims` must fit the model.
        towers: groups of features behind tower modules; None for a flat model.

    Attributes:
        observes: True for a model that must see the training data once before it trains: see `observe`.
        finds_items: True for a model with `user_vectors` and `item_vectors`, which evaluations rank all items by. Its
            config says the same.
        reads_slices: True for a model that takes un-pooled lists as slices, so that it computes once what depends on
            the list alone; others get one list a sample. See `Unpooled`, and `gives_slices`.
        slice_modules: its modules that do so, for the start-up report.
        exploits_repeats: which parts of the model compute once for samples with equal values, for the start-up report;
            () keeps batches plain. A model whose `embed` reads lists of the batch itself leaves it empty.
        joined_lists: groups of lists and moments that have one length in every sample: all describe the same events.
        pools_histories: True for a model whose dense network reads vectors by `vectors_of`.
        looks_up_drawn_rows: True for a model whose training looks up rows that its batch does not name.
        draws: items that training adds to each block of samples (`negatives.py`); None: none.
        built_from: the config that `build_model` made it from; None where it was made otherwise.
        slots: what stands in for parts of it.
        student: what training computes of the final representation beside the logits (`training/distillation.py`), a
            submodule; None: nothing. Scores, exports and counted FLOPs know nothing of it.
    """

    observes: ClassVar[bool] = False
    finds_items: ClassVar[bool] = False
    reads_slices: ClassVar[bool] = False
    slice_modules: ClassVar[tuple[str, ...]] = ()
    exploits_repeats: ClassVar[tuple[str, ...]] = ()
    joined_lists: tuple[tuple[str, ...], ...] = ()
    looks_up_drawn_rows: ClassVar[bool] = False
    pools_histories: ClassVar[bool] = False
    draws: NegativesConfig | None = None
    built_from: Any = None
    student: Student | None
    embeddings: Embeddings

    def __init__(self, inputs: InputSpec, *, embeddings: Embeddings, towers: TowerLayer | None = None) -> None:
        super().__init__()
        self.inputs = inputs
        self.embeddings = embeddings
        self.towers = towers
        self.slots = Slots()
        # Not of the class: a submodule that is assigned later would stand behind it.
        self.student = None
        self.histories = self._pools() if inputs.vector_histories else None

    def _pools(self) -> VectorHistories:
        """Return what pools histories of vectors.

        Raises:
            ConfigError: the dense network does not ask for them.
        """
        if not self.pools_histories:
            names = ", ".join(spec.name for spec in self.inputs.vector_histories)
            raise ConfigError(
                expected="a model that pools histories of vectors",
                found=f"{type(self).__name__}, and the history {names}",
                where="features of the schema",
                ways_out=(
                    "take a model that scores rows, such as dcn_v2, dlrm or din",
                    "leave --teacher-history out",
                    "in a model of your own: pools_histories = True in the class, and in forward_dense "
                    "self.vectors_of(embedded) in place of embedded.vectors",
                ),
            )
        return VectorHistories(self.inputs, query_dim=len(self.inputs.dense) + sum(self.field_dims))

    def vectors_of(self, embedded: Embedded) -> dict[str, Float[Tensor, "B V"]]:
        """Return the vectors by feature name, of a history of vectors what is pooled of it.

        Dense networks ask here, since pooling has weights of the dense network.
        """
        if self.histories is None:
            return embedded.vectors
        return self.histories(embedded.vectors, dense_BN=embedded.dense, fields_BX=embedded.fields)

    @property
    def field_dims(self) -> tuple[int, ...]:
        """Numbers of each field in `Embedded.fields`: outputs of the towers, or pooled embeddings."""
        if self.slots.fields is not None:
            return self.slots.fields.field_dims
        return self.embeddings.field_dims if self.towers is None else self.towers.field_dims

    @property
    def gives_slices(self) -> bool:
        """True if un-pooled lists come as slices: the model reads them, and nothing wants one list a sample."""
        return self.reads_slices and not self.slots.expands_lists

    @property
    def rounds_pooled(self) -> bool:
        """True if pooled fields are written in BF16 where the network computes in it: as asked, and on one device."""
        return self.embeddings.rounds_pooled

    @property
    def coupled_samples(self) -> int:
        """Consecutive samples that the loss looks at together: no rank, and no part of a batch, cuts such a block.

        1 where the loss of a sample does not depend on others. The batch size of a rank is a multiple of it.
        """
        return 1

    def coupled_in(self, batch: Batch) -> int:
        """`coupled_samples` of a batch that may have drawn items in it: it may be cut between so many."""
        return self.coupled_samples

    def trained_rows(self, batch_size: int) -> int:
        """Rows of a batch of so many samples after items were drawn for it."""
        extra = 0 if self.draws is None else self.draws.extra_samples
        return DrawnLayout.of_samples(batch_size, block=self.coupled_samples, drawn=extra).num_rows

    def for_answers(self) -> SimplerModel | None:
        """Return a simpler model with the same vectors, which exports hold in place of this one; mostly None."""
        return None

    @property
    def has_observed(self) -> bool:
        """True if `observe` need not be called any more."""
        return True

    def observe(self, batches: Iterable[Batch]) -> None:
        """Take from the training data what the loss needs of it as a whole; called once, before the first step.

        Args:
            batches: every training sample once, in any order, whole on every rank.
        """

    def shortened(self, batch: Batch, *, draw: StepDraw) -> Batch:
        """A training batch before its step; a model may thin its histories at random, and mostly it stays as it is.

        Args:
            batch: of the data.
            draw: the random numbers of the step.
        """
        del draw
        return batch

    def forward(self, batch: Batch) -> Float[Tensor, "B L"]:
        """Logits of every sample and label (a regression label's logit is its predicted value)."""
        return self.outputs_of(batch).logits

    def outputs_of(self, batch: Batch) -> Outputs:
        """Run `embed`, then the dense network, for evaluation and scoring; divided where ranks divide histories."""
        if self.slots.outputs is not None:
            return self.slots.outputs(batch)
        return self.dense_outputs(self.embed(batch))

    def dense_outputs(self, embedded: Embedded) -> Outputs:
        """Run the dense network: `forward_dense`, on many ranks through what sums its gradients and has its weights.

        Whoever calls a model that may be parallel calls this, and not `forward_dense`.
        """
        return self.trained_dense(embedded) if self.slots.network is None else self.slots.network(embedded)

    def trained_dense(self, embedded: Embedded) -> Outputs:
        """Run `forward_dense`, and in training what a student computes beside it.

        What compiles, copies or shards the dense network for training takes this.
        """
        outputs = self.forward_dense(embedded)
        if self.student is None or not self.training:
            return outputs
        return self.student.outputs_beside(outputs, embedded)

    def embed(self, batch: Batch) -> Embedded:
        """Everything below the dense network: pooled fields, through towers if there are any, and un-pooled lists."""
        fields_BX = self.fields(batch)
        return Embedded(
            dense=batch.dense,
            fields=fields_BX,
            sequences={spec.name: self.unpooled(batch, spec.name) for spec in self.inputs.sequences},
            vectors=batch.vectors,
            named=self.further(batch) | self._inputs_of_student(batch),
        )

    def _inputs_of_student(self, batch: Batch) -> dict[str, Tensor]:
        return {} if self.student is None or not self.training else self.student.inputs_of(batch)

    def further(self, batch: Batch) -> dict[str, Tensor]:
        """Return inputs of the dense network beside a batch's features, by names of the model's own; mostly none."""
        return {}

    def fields(self, batch: Batch) -> Float[Tensor, "B X"]:
        """Pooled embeddings, then towers if there are any; X = Σ field_dims.

        Under autocast the tower modules compute in its dtype, as the dense network does. The lookup sums in FP32, and
        rounds its sums to that dtype where `EmbeddingConfig.pooled` says so. A
        pipeline on many ranks starts exactly this part ahead, so an `embed` of your own asks for fields here.
        """
        if self.slots.fields is not None:
            return self.slots.fields(batch)
        pooled_BT = look_up_pooled(self, batch)
        return pooled_BT if self.towers is None else self.towers(pooled_BT)

    def unpooled(self, batch: Batch, name: str) -> Unpooled:
        """The vectors of a list feature, one for each of its rows."""
        # As in `fields`: lookups are not rounded by autocast.
        with torch.autocast(batch.dense.device.type, enabled=False):
            values_ND, offsets_U1, inverse_B = self.embeddings.unpooled_slices(batch, name)
        sizes = batch.sizes(self.inputs.list_position(name))
        found = Unpooled(values=values_ND, offsets=offsets_U1, inverse=inverse_B, sizes=sizes)
        # Models that do not read slices want a list for each sample.
        return found if self.gives_slices else found.expanded()

    def as_outputs(self, computed_BL: Float[Tensor, "B L"], named: dict[str, Tensor] | None = None) -> Outputs:
        """Outputs whose logits are in the units of the labels, FP64 of numbers; see `losses.in_label_units`.

        Args:
            computed_BL: what the network computes for each label, numbers about as large as 1.
            named: as in `Outputs`.
        """
        return Outputs(logits=in_label_units(computed_BL, inputs=self.inputs), named=named or {})

    def output_biases(self) -> Sequence[Tensor]:
        """Views of parameters whose change by 1 moves the logit of a label by 1 in every sample, one for each label.

        Where logits are made of what such parameters move (a funnel), `starting_biases` says how.

        A new run starts at the share of positives by them (`TrainingConfig.start_at_base_rate`). () where there are
        none, or nobody knows them: the run then starts at 50 %, and says so.
        """
        return ()

    def starting_biases(self, logits: Sequence[float]) -> Sequence[float]:
        """Return what to add to `output_biases` for a model that starts at these logits: the logits themselves.

        A model whose logits are made of what the biases move (a funnel) returns others.

        Args:
            logits: of each label, where nothing else is known.
        """
        return logits

    def closing_maps(self) -> Sequence[nn.Linear]:
        """Return the linear maps from the final representation to the logits of the labels, in their order.

        What trains beside the logits reads their input; see `blocks/closing_maps.py`. () where there are none, or
        several add up to one logit: such a model learns from a teacher by its own logits alone.
        """
        return ()

    @abstractmethod
    def forward_dense(self, embedded: Embedded) -> Outputs:
        """The dense network: pure torch operations, traceable as one graph."""

    def loss(self, outputs: Outputs, batch: Batch) -> LossSums:
        """Numerators and denominators of the loss; by default of the labels' losses, weighted.

        A loss whose denominators are others than the labelled weight overrides `loss_weight` as well.
        """
        return loss_sums(outputs.logits, batch.labels, batch.weights, inputs=self.inputs)

    def loss_weight(self, batch: Batch) -> Float[Tensor, "L"]:
        """`LossSums.weight` of a batch before its forward pass, so that the sum over ranks travels meanwhile."""
        return labelled_weight(batch.labels, batch.weights, inputs=self.inputs)


def device_of(model: Model) -> torch.device:
    """Return the device that a model computes on: of its parameters, and of its tables where it has no others."""
    first = next(model.parameters(), None)
    return model.embeddings.tables.device if first is None else first.device


def look_up_pooled(model: Model, batch: Batch) -> Float[Tensor, "B T"]:
    """Return what a model's embeddings give of all pooled features, before its towers.

    On many ranks with towers this is what `TowerTransform` takes.
    """
    device = batch.dense.device.type
    if not torch.is_autocast_enabled(device):  # nothing to leave, and a score of one row has few microseconds
        return model.embeddings(batch)
    is_rounded = model.rounds_pooled and _computes_in_bf16(device)
    # Tables stay FP32: autocast would round what a lookup sums.
    with torch.autocast(device, enabled=False):
        return model.embeddings(batch, dtype=torch.bfloat16) if is_rounded else model.embeddings(batch)


def _computes_in_bf16(device: str) -> bool:
    return torch.get_autocast_dtype(device) is torch.bfloat16
