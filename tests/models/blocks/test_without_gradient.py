"""Weights whose gradient is zero by construction do not learn; checkpoints in which they did are gone on from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.models.sequence.rankers.histories import INPUTS as OF_HISTORIES
from tests.models.sequence.rankers.histories import MODELS, histories
from tests.models.sequence.test_next_item import INPUTS as OF_NEXT_ITEMS
from tests.models.sequence.test_next_item import batch_of
from tests.parallel.context.test_context_on_ranks import MODEL
from tests.parallel.test_parity import inputs
from tests.parallel.test_parity_of_models import CONFIGS
from tests.training.rank_runs import training_config
from tests.training.tiny import tiny_dataset
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.models import (
    Activation,
    AttentionActivation,
    DINConfig,
    DNNConfig,
    MLPConfig,
    Model,
    Normalization,
    build_model,
)
from ziggurat.models.din import AttentionWeights
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.trainer import Trainer

BATCH_NORM = MLPConfig(hidden_dims=(6, 5), normalization=Normalization.BATCH, activation=Activation.TANH)
DIN = next(each for each in CONFIGS if isinstance(each, DINConfig))


def cases() -> dict[str, tuple[Any, InputSpec, Batch]]:
    """Models, their inputs, and a batch; tables are looked up in FP32, all else is in FP64."""
    batch = random_batch(small_inputs(), 40, seed=1)
    found: dict[str, tuple[Any, InputSpec, Batch]] = {}
    for each in MODELS:
        if each.kind not in ("dien", "onetrans"):  # which compute some of it in FP32 whatever they are given
            found[each.kind] = (each, OF_HISTORIES, histories([4, 6, 3, 1, 2, 5, 3]))
    for preset in LayerPreset:
        model = dataclasses.replace(MODEL, layers=preset)
        found[f"next_item {preset.value}"] = (model, OF_NEXT_ITEMS, batch_of([4, 6, 2, 1, 2, 5, 3]))
    found["dnn, batch norm"] = (DNNConfig(embedding_dim=4, deep=BATCH_NORM), small_inputs(), batch)
    for weights in AttentionWeights:
        for activation in AttentionActivation:
            model = dataclasses.replace(DIN, weights=weights, attention_activation=activation, deep=BATCH_NORM)
            found[f"din {weights.value} {activation.value}"] = (model, inputs(), random_batch(inputs(), 40, seed=1))
    return found


def gradients(model: Model, batch: Batch) -> dict[str, float]:
    """The largest gradient of each weight that learns; frozen ones are computed too, and told apart by their name."""
    frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
    model.double().requires_grad_(True).train()
    exact = batch.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    model.loss(model.forward_dense(model.embed(exact)), exact).mean().backward()
    return {
        f"frozen {name}" if name in frozen else name: 0.0 if weight.grad is None else float(weight.grad.abs().max())
        for name, weight in model.named_parameters()
    }


@pytest.mark.parametrize("name", cases())
def test_weights_learn_where_their_gradient_is_more_than_rounding_and_nowhere_else(name: str) -> None:
    config, features, batch = cases()[name]
    found = gradients(build_model(config, features, seed=3), batch)
    noise = 1e-12 * max(found.values())
    assert [each for each, size in found.items() if not each.startswith("frozen ") and size <= noise] == []
    assert [each for each, size in found.items() if each.startswith("frozen ") and size > noise] == []
    has_frozen = "batch" in name or "softmax" in name or name.startswith("din ") or "sasrec" in name or "ligr" in name
    assert any(each.startswith("frozen ") for each in found) == (has_frozen or name in ("bst", "transact"))


def test_a_run_in_which_they_learned_is_resumed(tmp_path: Path) -> None:
    config = DNNConfig(embedding_dim=4, deep=BATCH_NORM)

    def trainer(*, max_steps: int, as_before: bool) -> Trainer:
        data = tiny_dataset(300)
        model = build_model(config, data.inputs, seed=3)
        if as_before:
            model.requires_grad_(True)
        return Trainer(
            model, config=training_config(1, max_steps=max_steps), train=data, valid=tiny_dataset(40), folder=tmp_path
        )

    trainer(max_steps=3, as_before=True).fit()
    before = CheckpointStore(tmp_path / "checkpoints").load().tensors
    resumed = trainer(max_steps=5, as_before=False)
    frozen = [name for name, weight in resumed.model.named_parameters() if not weight.requires_grad]
    assert len(frozen) == 2
    assert all(any(f"dense_optimizer.{name}." in each for each in before) for name in frozen)
    resumed.fit(resume=True)
    after = CheckpointStore(tmp_path / "checkpoints").load().tensors
    assert not [each for each in after if any(f"dense_optimizer.{name}." in each for name in frozen)]
    for name, weight in resumed.model.named_parameters():
        assert isinstance(weight, nn.Parameter)
        if name in frozen:
            assert torch.equal(weight, before[f"model.{name}"]), name
