"""DIN against its equations, position by position, and its place in a model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.models.sequence.rankers.histories import INPUTS as OF_HISTORY
from tests.models.sequence.rankers.histories import histories
from ziggurat.config import from_json, to_json
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, TableOptimizer
from ziggurat.errors import ConfigError, DataError, PlanError
from ziggurat.features.batch import Batch, JaggedRows
from ziggurat.features.batches.repeats import deduplicate
from ziggurat.features.batches.samples import take_samples
from ziggurat.features.inputs import InputSpec, JaggedSpec, LabelSpec, SingleSpec, TableSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.features.schema import Pooling
from ziggurat.models import (
    DIN,
    AttentionActivation,
    AttentionWeights,
    DINConfig,
    DNNConfig,
    Embedded,
    MLPConfig,
    Model,
    Normalization,
    Outputs,
    build_model,
)
from ziggurat.models.contract.losses import loss_of
from ziggurat.models.costs.model_cost import flops_per_sample
from ziggurat.models.din import Dice, TargetAttention
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import check_dense
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.config import Compile, Precision, TrainingConfig
from ziggurat.training.step.train_step import TrainStep

INPUTS = InputSpec(
    dense=("age",),
    single=(SingleSpec(name="user", table="user"), SingleSpec(name="item", table="item")),
    jagged=(
        JaggedSpec(name="tags", table="tag"),
        JaggedSpec(name="clicks", table="item", ordered=True),
        JaggedSpec(name="skips", table="item", ordered=True),
    ),
    tables=(
        TableSpec(name="user", num_rows=9),
        TableSpec(name="item", num_rows=12),
        TableSpec(name="tag", num_rows=6),
    ),
    labels=(LabelSpec(name="click"),),
)
CONFIG = DINConfig(embedding_dim=4, attention_dims=(5,), deep=MLPConfig(hidden_dims=(6,)))


def array(tensor) -> np.ndarray:
    return tensor.detach().numpy().astype(np.float64)


def score(query: np.ndarray, key: np.ndarray, attention: TargetAttention) -> float:
    x = np.concatenate([query, key, query - key, query * key])
    for index, layer in enumerate(attention.layers):
        x = array(layer.weight) @ x + array(layer.bias)
        if len(attention.dice):
            dice = attention.dice[index]
            p = 1 / (1 + np.exp(-(x - array(dice.norm.running_mean)) / np.sqrt(array(dice.norm.running_var) + 1e-9)))
            x = p * x + (1 - p) * array(dice.alpha) * x
        else:
            x = np.maximum(x, 0)
    return float((array(attention.output.weight) @ x + array(attention.output.bias))[0])


@pytest.mark.parametrize("activation", list(AttentionActivation))
@pytest.mark.parametrize("weights", list(AttentionWeights))
def test_histories_are_pooled_as_the_paper_says(activation, weights):
    config = dataclasses.replace(CONFIG, attention_activation=activation, weights=weights)
    model = build_model(config, INPUTS, seed=0).eval()
    assert isinstance(model, DIN)
    assert model.pairs == [("clicks", "item"), ("skips", "item")]
    for attention in model.attentions:
        for dice in attention.dice:
            dice.alpha.data.uniform_(-1, 1)
            dice.norm.running_mean.uniform_(-1, 1)
            dice.norm.running_var.uniform_(0.5, 2)
    batch = random_batch(INPUTS, 8)
    found = array(model.attended(model.embed(batch))).reshape(8, 5, 4)
    items = array(model.embeddings.table("item"))
    items[0] = 0  # the padding row
    offsets = batch.jagged.offsets.tolist()
    for history in (1, 2):
        attention = model.attentions[history - 1]
        for sample in range(8):
            query = items[batch.single[1, sample]]
            at = history * 8 + sample
            keys = items[batch.jagged.values[offsets[at] : offsets[at + 1]].numpy()]
            scores = np.array([score(query, key, attention) for key in keys])
            if weights is AttentionWeights.SOFTMAX and len(scores):
                scores = np.exp(scores) / np.exp(scores).sum()
            expected = scores @ keys if len(keys) else np.zeros(4)
            np.testing.assert_allclose(found[sample, 2 + history], expected, rtol=1e-4, atol=1e-6)
    others = array(model.embeddings(batch)).reshape(8, 3, 4)
    np.testing.assert_array_equal(found[:, :3], others)


@pytest.mark.parametrize("dims", [(5, 3), ()])
@pytest.mark.parametrize("session", [[0] * 9, [0, 0, 1, 1, 1, 2, 0, 3, 3], list(range(9))])
def test_histories_that_samples_share_give_the_same(session: list[int], dims: tuple[int, ...]) -> None:
    """Attended fields and updates of a batch with slices are those of the plain one, whose samples have own targets."""
    base = random_batch(INPUTS, 9, seed=4)
    plain = dataclasses.replace(take_samples(base, torch.tensor(session)), single=base.single, dense=base.dense)
    short = deduplicate(plain, [FeatureGroup(jagged=(1,)), FeatureGroup(jagged=(2,))])
    found = []
    for batch in (plain, short):
        model = build_model(dataclasses.replace(CONFIG, attention_dims=dims), INPUTS, seed=0)
        assert (model.embed(batch).sequences["clicks"].inverse is None) == (batch is plain)
        attended = model.attended(model.embed(batch))
        (attended * torch.arange(attended.numel()).view_as(attended).remainder(7)).sum().backward()
        TableOptimizer(model.embeddings).step(0.1)
        gradients = [each.grad for each in model.attentions.parameters()]
        found.append([attended.detach(), *gradients, model.embeddings.table("item")])
    for wanted, given in zip(*found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


def test_what_was_done_is_summed_with_the_scores_of_its_event() -> None:
    pairs = {"histories": ("items", "brands"), "targets": ("item", "brand"), "actions": ("acts",)}
    config = dataclasses.replace(CONFIG, **pairs, attention_activation=AttentionActivation.RELU)
    model = build_model(config, OF_HISTORY, seed=0).eval()
    assert isinstance(model, DIN)
    batch = histories([3, 0, 5, 1])
    found = array(model.attended(model.embed(batch))).reshape(4, -1, 4)
    tables = {name: array(model.embeddings.table(name)) for name in ("item", "brand", "act")}
    names, jagged = [spec.name for spec in OF_HISTORY.lookups], [spec.name for spec in OF_HISTORY.jagged]
    single = [spec.name for spec in OF_HISTORY.single]
    for sample in range(4):
        keys = {}
        for name, table in (("items", "item"), ("brands", "brand"), ("acts", "act")):
            first, last = batch.jagged.offsets[jagged.index(name) * 4 + sample :][:2].tolist()
            keys[name] = tables[table][batch.jagged.values[first:last].numpy()]
        scores = {}
        for (name, target), attention in zip(model.pairs, model.attentions, strict=True):
            assert isinstance(attention, TargetAttention)
            query = tables[target][batch.single[single.index(target), sample]]
            scores[name] = np.array([score(query, key, attention) for key in keys[name]])
        for name, of in (("items", "items"), ("brands", "brands"), ("acts", "items")):
            expected = scores[of] @ keys[name] if len(keys[name]) else np.zeros(4)
            np.testing.assert_allclose(found[sample, names.index(name)], expected, rtol=1e-4, atol=1e-6)
    values, offsets = batch.jagged.values, batch.jagged.offsets.clone()
    offsets[jagged.index("acts") * 4 + 1] -= 1  # one action fewer in the first sample, one more in the second
    uneven = dataclasses.replace(batch, jagged=JaggedRows(values, offsets))
    with pytest.raises(DataError, match="both describe the same events"):
        model.embed(uneven)


def test_dice_is_between_relu_and_identity():
    dice = Dice(1)
    x = torch.linspace(-3, 3, 101).unsqueeze(1)
    dice.alpha.data.fill_(1.0)
    torch.testing.assert_close(dice(x), x)
    dice.alpha.data.zero_()
    normal = (x - x.mean()) / x.std(correction=0)
    torch.testing.assert_close(dice(x), x * normal.sigmoid())
    one = dice(torch.tensor([[2.0]]))  # a single position leaves the statistics alone
    assert one.isfinite().all()
    assert dice.norm.running_mean.abs() < 0.2


def test_gradients_reach_the_table_through_history_and_target():
    embedding = EmbeddingConfig(init="normal", init_std=0.5)
    model = build_model(dataclasses.replace(CONFIG, embedding=embedding), INPUTS, seed=0)
    batch = random_batch(INPUTS, 32)
    before = model.embeddings.table("item").clone()
    tables = TableOptimizer(model.embeddings)
    dense = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(60):
        dense.zero_grad()
        tables.zero_grad()
        loss = loss_of(model(batch), batch.labels, inputs=INPUTS)
        loss.backward()
        losses.append(loss.item())
        dense.step()
        tables.step(0.1)
    assert losses[-1] < 0.6 * losses[0]
    changed = (model.embeddings.table("item") != before).any(dim=1)
    touched = torch.zeros(12, dtype=torch.bool)
    offsets = batch.jagged.offsets
    touched[batch.single[1]] = True
    touched[batch.jagged.values[offsets[32] :]] = True
    touched[0] = False
    assert torch.equal(changed, touched)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_empty_histories_and_batches():
    model = build_model(CONFIG, INPUTS, seed=0)
    batch = random_batch(INPUTS, 3, max_length=0)
    assert isinstance(model, DIN)
    assert not model.attended(model.embed(batch)).view(3, 5, 4)[:, 3:].any()
    assert model(batch).isfinite().all()
    assert model(Batch.empty(INPUTS)).shape == (0, 1)


def test_flops_are_those_of_histories_of_one():
    model = build_model(CONFIG, INPUTS, seed=0)
    ones = JaggedRows(torch.full((18,), 3), torch.arange(19))
    batch = dataclasses.replace(random_batch(INPUTS, 6), jagged=ones)
    with FlopCounterMode(display=False) as forward:
        logits = model(batch)
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    assert forward.get_total_flops() == 6 * flops_per_sample(model).forward
    assert backward.get_total_flops() == 6 * flops_per_sample(model).backward


def test_autocast_pools_histories_in_its_dtype():
    model = build_model(CONFIG, INPUTS, seed=0).eval()
    batch = random_batch(INPUTS, 16)
    exact = model(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(batch)
    assert (rounded.float() - exact).abs().max() < 0.05 * (1 + exact.abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {"histories": ("nobody",)},
        {"histories": ("tags",)},
        {"histories": ("clicks",), "targets": ("user",)},
    ],
)
def test_histories_without_a_target_in_their_table_are_refused(changes):
    with pytest.raises(ConfigError, match="histories"):
        build_model(dataclasses.replace(CONFIG, **changes), INPUTS, seed=0)


def test_data_without_histories_is_refused():
    with pytest.raises(ConfigError, match="no ordered list"):
        build_model(CONFIG, small_inputs(), seed=0)
    with pytest.raises(ConfigError, match="a target for each history"):
        dataclasses.replace(CONFIG, targets=("item",))


def test_config_survives_a_file():
    config = dataclasses.replace(CONFIG, histories=("clicks",), targets=("item",))
    assert from_json(DINConfig, json.loads(json.dumps(to_json(config))), where="test") == config


def unpooled(*names: str) -> InputSpec:
    """The inputs with lists that the schema does not pool."""
    jagged = tuple(
        dataclasses.replace(spec, pooling=Pooling.NONE) if spec.name in names else spec for spec in INPUTS.jagged
    )
    return dataclasses.replace(INPUTS, jagged=jagged)


def test_pooling_none_in_the_schema_is_what_din_reads_anyway():
    batch = random_batch(INPUTS, 8)
    asked, found = (build_model(CONFIG, inputs, seed=0)(batch) for inputs in (INPUTS, unpooled("clicks", "skips")))
    assert torch.equal(asked, found)


def test_lists_that_nobody_reads_are_refused():
    with pytest.raises(ConfigError, match="tags"):
        build_model(CONFIG, unpooled("tags"), seed=0)
    with pytest.raises(ConfigError, match="pooled"):
        build_model(DNNConfig(), unpooled("clicks"), seed=0)


class Lists(Model):
    """The padded lists of a table that no pooled feature reads."""

    def __init__(self, inputs: InputSpec, *, embeddings: EmbeddingTables) -> None:
        super().__init__(inputs, embeddings=embeddings)
        self.linear = torch.nn.Linear(4, 1)

    def forward_dense(self, embedded: Embedded) -> Outputs:
        padded_BTD, mask_BT = embedded.sequences["tags"].padded()
        assert bool((padded_BTD[~mask_BT] == 0).all())
        torch.testing.assert_close(
            embedded.sequences["tags"].mean(), padded_BTD.sum(1) / mask_BT.sum(1, keepdim=True).clamp(min=1)
        )
        return Outputs(logits=self.linear(padded_BTD.sum(1)))


@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.AUTO])
def test_a_table_of_un_pooled_lists_alone_trains(kernel):
    inputs = unpooled("tags")
    embeddings = EmbeddingTables(inputs, EmbeddingConfig(dim=4, kernel=kernel, init="normal", init_std=0.5), seed=0)
    model = Lists(inputs, embeddings=embeddings)
    tables, before = TableOptimizer(embeddings), embeddings.table("tag").clone()
    batch = random_batch(inputs, 8)
    outputs = model.forward_dense(model.embed(batch))
    model.loss(outputs, batch).mean().backward()
    tables.step(0.1)
    touched = torch.zeros(6, dtype=torch.bool)
    touched[batch.jagged.values[: batch.jagged.offsets[8]]] = True
    touched[0] = False
    assert torch.equal((embeddings.table("tag") != before).any(dim=1), touched)


def test_attention_compiles_with_the_network_for_lists_of_any_number_of_rows():
    config = TrainingConfig(
        precision=Precision.FP32, compile=Compile.DEFAULT, loader=LoaderConfig(batch_size=8), learning_rate=0.01
    )
    model = build_model(CONFIG, INPUTS, seed=0).eval()
    step = TrainStep(model, config)
    torch.compiler.reset()
    step._forward_dense = torch.compile(model.forward_dense, fullgraph=True, dynamic=False, backend="aot_eager")
    for seed in range(12):  # more lengths than torch compiles functions for
        batch = random_batch(INPUTS, 8, seed=seed)
        torch.testing.assert_close(step.outputs(batch).logits, model(batch))


def test_batches_in_parts_refuse_dice_and_name_its_setting():
    check_dense(build_model(CONFIG, INPUTS, seed=0))
    with pytest.raises(PlanError, match=r"--model\.attention-activation relu"):
        check_dense(build_model(CONFIG, INPUTS, seed=0), num_parts=2)
    norm = MLPConfig(hidden_dims=(6,), normalization=Normalization.BATCH)
    plain = dataclasses.replace(CONFIG, attention_activation=AttentionActivation.RELU, deep=norm)
    with pytest.raises(PlanError, match=r"--model\.deep\.normalization none"):
        check_dense(build_model(plain, INPUTS, seed=0), num_parts=2)


def test_a_compiled_step_leaves_the_model_as_it_was_for_the_next_step() -> None:
    """Slices are given again to a step that compiles nothing; the class says the same all the time."""
    model = build_model(CONFIG, INPUTS, seed=0)
    for compile, gives in ((Compile.OFF, True), (Compile.DEFAULT, False), (Compile.OFF, True)):
        TrainStep(model, TrainingConfig(precision=Precision.FP32, compile=compile))
        assert model.gives_slices is gives
        assert model.reads_slices
        assert "reads_slices" not in vars(model)
