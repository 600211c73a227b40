"""Models that differ in their tables or in what stands below the interaction, on several ranks as on one device."""

from __future__ import annotations

import pytest

from tests.parallel.test_parity import TOWERS, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.models import (
    DeepFMConfig,
    DHENConfig,
    DINConfig,
    FinalMLPConfig,
    MLPConfig,
    ModelConfig,
    TowerModuleConfig,
    TowerModuleKind,
    WukongConfig,
    build_model,
)
from ziggurat.models.din import AttentionActivation
from ziggurat.ops.lookup import KernelChoice
from ziggurat.plan import Placement, Plan
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

TABLES = EmbeddingConfig(kernel=KernelChoice.TORCH)
MLP = MLPConfig(hidden_dims=(7,))
FM = TowerModuleConfig(kind=TowerModuleKind.FM, compression=2.0, fm_rank=2)


def config_of(kind: str) -> ModelConfig:
    match kind:
        case "wukong":
            return WukongConfig(
                embedding_dim=8, num_layers=2, num_fm=(2,), num_linear=(2,), rank=(3,), mlp=MLP, bottom=MLP, head=MLP,
                embedding=TABLES, tower_module=FM, embeddings_per_feature=2,
            )  # fmt: skip
        case "dhen":
            return DHENConfig(
                embedding_dim=8, num_layers=2, num_outputs=(2,), mlp=MLP, bottom=MLP, head=MLP, embedding=TABLES,
                tower_module=FM,
            )  # fmt: skip
        case "deepfm":
            return DeepFMConfig(embedding_dim=8, deep=MLP, embedding=TABLES)
        case "finalmlp":
            return FinalMLPConfig(
                embedding_dim=8, first=MLP, second=MLP, gate=MLP, first_context=("user",), second_context=("shop",),
                embedding=TABLES,
            )  # fmt: skip
        case _:
            return DINConfig(
                embedding_dim=8, histories=("tags",), attention_dims=(5,), deep=MLP, embedding=TABLES,
                attention_activation=AttentionActivation.RELU,
            )  # fmt: skip


def check(rank: int, plan_json: str, kind: str) -> None:
    """Runs on every rank."""
    del rank
    plan = from_json(Plan, plan_json, where="test")
    assert_same_as_single_device(
        lambda: build_model(config_of(kind), inputs(), seed=3, towers=plan.towers),
        plan,
        batch=random_batch(inputs(), 13, seed=1),
        tolerance=Tolerance(fields=1e-6),
    )


@pytest.mark.parametrize("kind", ["deepfm", "finalmlp", "din"])
def test_flat_models_equal_one_device(kind):
    run_ranks(check, 2, to_json(placed(2, Placement.TABLE_WISE)), kind)


@pytest.mark.parametrize("kind", ["wukong", "dhen"])
def test_tower_models_equal_one_device(kind):
    run_ranks(check, 4, to_json(placed(4, Placement.TABLE_WISE, TOWERS, 2)), kind)
