"""Every built-in model on several ranks as on one device: replicated, sharded, in parts, with and without towers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.models.sequence.rankers.histories import MODELS as OF_HISTORIES
from tests.parallel.test_parity import TOWERS, inputs, placed
from ziggurat.config import from_json, to_json
from ziggurat.embeddings import EmbeddingConfig
from ziggurat.features.batch import Batch
from ziggurat.features.schema import Pooling
from ziggurat.models import (
    MODEL_CONFIGS,
    AFNConfig,
    AttentionActivation,
    AutoIntConfig,
    BuiltInConfig,
    Correction,
    DCNv2Config,
    DeepFMConfig,
    DHENConfig,
    DINConfig,
    DLRMConfig,
    DNNConfig,
    EDCNConfig,
    EncoderConfig,
    EncoderInteraction,
    ESMMConfig,
    FCNConfig,
    FiBiNETConfig,
    FinalMLPConfig,
    FinalNetConfig,
    FMConfig,
    GDCNConfig,
    LightGCNConfig,
    LogisticRegressionConfig,
    MaskNetConfig,
    MLPConfig,
    MMoEConfig,
    NextItemConfig,
    PEPNetConfig,
    PLEConfig,
    QNNConfig,
    RankMixerConfig,
    SequenceRankerConfig,
    Supervision,
    Temperature,
    TowerModuleConfig,
    TowerModuleKind,
    TwoTowerConfig,
    WideDeepConfig,
    WukongConfig,
    XDeepFMConfig,
    build_model,
)
from ziggurat.models.build import TowerModelConfig
from ziggurat.models.contract.negatives import CANDIDATES, DrawnLayout, NegativesConfig, NegativesKind
from ziggurat.models.retrieval.over_arch import OverArchConfig, OverArchKind, OverArchLearning
from ziggurat.ops.lookup import KernelChoice
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.parallel.parallelize import ParallelConfig
from ziggurat.placements import Placement
from ziggurat.plan import Plan, Towers
from ziggurat.testing.batches import random_batch
from ziggurat.testing.parity import Tolerance, assert_same_as_single_device
from ziggurat.testing.ranks import run_ranks

TABLES = EmbeddingConfig(kernel=KernelChoice.TORCH)
MLP = MLPConfig(hidden_dims=(6,))
FM = TowerModuleConfig(kind=TowerModuleKind.FM, compression=2.0, fm_rank=2)
CONFIGS: tuple[BuiltInConfig, ...] = (
    DLRMConfig(embedding_dim=8, bottom=MLP, top=MLP, embedding=TABLES),
    DCNv2Config(embedding_dim=8, deep=MLP, embedding=TABLES),
    DNNConfig(embedding_dim=8, deep=MLP, embedding=TABLES),
    WukongConfig(
        embedding_dim=8, num_layers=2, num_fm=(2,), num_linear=(2,), rank=(3,), mlp=MLP, bottom=MLP, head=MLP,
        embedding=TABLES, tower_module=FM, embeddings_per_feature=2,
    ),
    DHENConfig(
        embedding_dim=8, num_layers=2, num_outputs=(2,), mlp=MLP, bottom=MLP, head=MLP, embedding=TABLES,
        tower_module=FM,
    ),
    LogisticRegressionConfig(embedding=TABLES),
    DeepFMConfig(embedding_dim=8, deep=MLP, embedding=TABLES),
    XDeepFMConfig(embedding_dim=8, cin=(3, 2), deep=MLP, embedding=TABLES),
    AutoIntConfig(embedding_dim=8, num_layers=1, deep=MLP, embedding=TABLES),
    MaskNetConfig(embedding_dim=8, deep=MLP, embedding=TABLES),
    FinalMLPConfig(
        embedding_dim=8, first=MLP, second=MLP, gate=MLP, first_context=("user",), second_context=("shop",),
        embedding=TABLES,
    ),
    FinalNetConfig(embedding_dim=8, first=MLP, second=MLP, embedding=TABLES),
    FMConfig(embedding_dim=8, embedding=TABLES),
    WideDeepConfig(embedding_dim=8, deep=MLP, embedding=TABLES),
    FiBiNETConfig(embedding_dim=8, deep=MLP, embedding=TABLES),
    GDCNConfig(embedding_dim=8, num_layers=2, deep=MLP, embedding=TABLES),
    EDCNConfig(embedding_dim=8, num_layers=2, embedding=TABLES),
    FCNConfig(embedding_dim=8, exponential_layers=1, linear_layers=1, dropout=0.0, supervision=Supervision.NONE,
        embedding=TABLES),
    QNNConfig(embedding_dim=8, num_layers=1, num_rows=2, dropout=0.0, embedding=TABLES),
    MMoEConfig(embedding_dim=8, num_experts=2, expert=MLP, head=MLP, embedding=TABLES),
    PEPNetConfig(embedding_dim=8, domain=("shop",), prior=("user",), deep=MLP, gate_dim=4, embedding=TABLES),
    PLEConfig(embedding_dim=8, expert=MLP, head=MLP, embedding=TABLES, tower_module=FM),
    ESMMConfig(embedding_dim=8, deep=MLP, embedding=TABLES),
    DINConfig(
        embedding_dim=8, histories=("tags",), attention_dims=(5,), deep=MLP, embedding=TABLES,
        attention_activation=AttentionActivation.RELU,
    ),
    RankMixerConfig(
        embedding_dim=8, num_tokens=2, token_dim=6, num_layers=1, num_experts=2, embedding=TABLES, tower_module=FM,
    ),
    TwoTowerConfig(
        embedding_dim=8, output_dim=4, user=EncoderConfig(interaction=EncoderInteraction.DCN_V2, hidden=MLP),
        item=EncoderConfig(hidden=MLP), temperature=1.0, temperature_is=Temperature.LEARNED, correction=Correction.NONE,
        negatives_block=3, embedding=TABLES, tower_module=FM,
    ),
    TwoTowerConfig(
        embedding_dim=8, output_dim=4, user=EncoderConfig(hidden=MLP), item=EncoderConfig(hidden=MLP), temperature=0.5,
        negatives_block=3, negatives=NegativesConfig(kind=NegativesKind.MIXED, num_drawn=2), embedding=TABLES,
        over_arch=OverArchConfig(kind=OverArchKind.MIXTURE_OF_LOGITS, hardest=3, component_dim=3, hidden=5),
        tower_module=FM,
    ),
    TwoTowerConfig(
        embedding_dim=8, output_dim=4, user=EncoderConfig(hidden=MLP), item=EncoderConfig(hidden=MLP), temperature=0.5,
        negatives_block=3, negatives=NegativesConfig(kind=NegativesKind.MINED, num_drawn=2), embedding=TABLES,
        over_arch=OverArchConfig(kind=OverArchKind.MLP, hidden=5, learning=OverArchLearning.ON_TOP), tower_module=FM,
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a way to run it."""

    model: BuiltInConfig
    dense: DenseParallelism = DenseParallelism.DDP
    num_parts: int = 1
    numbers: bool = True
    soft_labels: bool = False
    towers: Towers | None = None


def check(rank: int, plan_json: Any, cases: list[Any]) -> None:
    """Several cases, one after the other, in one group of processes."""
    del rank
    plan = from_json(Plan, plan_json, where="test")
    for each in cases:
        case = from_json(Case, each, where="test")
        features = inputs() if case.numbers else dataclasses.replace(inputs(), dense=())
        batch = random_batch(features, 13, seed=1)
        if case.soft_labels:
            batch.labels.mul_(0.7).add_(0.1)
        if isinstance(case.model, TwoTowerConfig) and case.model.negatives.extra_samples:
            batch = as_if_drawn(batch, case.model)
        try:
            assert_same_as_single_device(
                lambda case=case, features=features: build_model(case.model, features, seed=3, towers=case.towers),
                plan,
                batch=batch,
                config=ParallelConfig(dense=case.dense),
                num_parts=case.num_parts,
                tolerance=Tolerance(fields=1e-6, others=3e-6),
                ranks_per_host=2,
            )
        except Exception as error:
            raise AssertionError(f"{case}: {error}") from error


def as_if_drawn(batch: Batch, config: TwoTowerConfig) -> Batch:
    """The same rows, those of them for drawn items that stand where such items would: they ask nothing."""
    layout = DrawnLayout(batch.batch_size, config.negatives_block, config.negatives.num_drawn)
    drawn = layout.drawn_items().reshape(-1)
    batch.labels[drawn] = torch.nan
    item = [spec.name for spec in inputs().single].index(inputs().items.id)
    candidates = batch.single[item].clone()
    candidates[drawn[::4]] = -1
    return dataclasses.replace(batch, extras={CANDIDATES: candidates})


def run(plan: Plan, cases: list[Case]) -> None:
    run_ranks(check, plan.world_size, to_json(plan), [to_json(case) for case in cases])


def test_no_model_is_left_out():
    # test_parity_of_next_item.py, test_parity_of_lightgcn.py, test_batch_norm_on_ranks.py
    elsewhere = {NextItemConfig, SequenceRankerConfig, LightGCNConfig, AFNConfig}
    elsewhere |= {type(config) for config in OF_HISTORIES}
    assert {type(config) for config in CONFIGS} | elsewhere == set(MODEL_CONFIGS)


def flat_cases(dense: DenseParallelism, *, parts: Sequence[int]) -> list[Case]:
    """Every model without towers, its batch in as many parts as its place among the models says."""
    return [
        Case(model=model, dense=dense, num_parts=parts[index % len(parts)], soft_labels=True)
        for index, model in enumerate(CONFIGS)
    ]


# Sharded and replicated models cut the batch in parts at different places, so that each is seen with and without.
@pytest.mark.parametrize(
    ("dense", "parts"), [(DenseParallelism.DDP, (1, 2)), (DenseParallelism.FSDP, (2, 1))], ids=["ddp", "fsdp"]
)
def test_flat_models_equal_one_device(dense: DenseParallelism, parts: tuple[int, ...]):
    run(placed(2, Placement.TABLE_WISE), flat_cases(dense, parts=parts))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "parts"), [(DenseParallelism.DDP, (2, 1)), (DenseParallelism.FSDP, (1, 2))], ids=["ddp", "fsdp"]
)
def test_flat_models_in_other_numbers_of_parts_equal_one_device(dense: DenseParallelism, parts: tuple[int, ...]):
    run(placed(2, Placement.TABLE_WISE), flat_cases(dense, parts=parts))


def tower_cases(dense: DenseParallelism) -> list[Case]:
    """Every model that has a place for towers, with towers."""
    models = [model for model in CONFIGS if isinstance(model, TowerModelConfig)]
    return [
        Case(model=model, dense=dense, towers=TOWERS, num_parts=1 + index % 2) for index, model in enumerate(models)
    ]


@pytest.mark.parametrize("dense", [DenseParallelism.DDP, DenseParallelism.FSDP])
def test_tower_models_equal_one_device(dense: DenseParallelism):
    run(placed(4, Placement.TABLE_WISE, TOWERS, 2), tower_cases(dense))


def test_some_tower_models_in_copies_of_shards_equal_one_device():
    # The ways of the models differ in what is sharded (FSDP) and in what is copied (DDP), and each is seen alone above.
    run(placed(4, Placement.TABLE_WISE, TOWERS, 2), tower_cases(DenseParallelism.HSDP)[::4])


@pytest.mark.slow
def test_all_tower_models_in_copies_of_shards_equal_one_device():
    run(placed(4, Placement.TABLE_WISE, TOWERS, 2), tower_cases(DenseParallelism.HSDP))


def test_attention_below_towers_of_a_plan_and_weights_directly_on_a_model():
    """A plan's towers reorder columns on their way; DIN's histories go another way; each model is as on one device."""
    din = next(model for model in CONFIGS if isinstance(model, DINConfig))
    bare = LogisticRegressionConfig(embedding=TABLES)
    run(
        placed(4, Placement.TABLE_WISE, TOWERS, 2),
        [Case(model=din, dense=dense, num_parts=parts) for dense in DenseParallelism for parts in (1, 2)]
        + [Case(model=bare, numbers=False, dense=dense) for dense in DenseParallelism],
    )


def test_histories_are_looked_up_once():
    """Un-pooled only: no pooled column of them is made, sent, or thrown away."""
    din = next(model for model in CONFIGS if isinstance(model, DINConfig))
    model = build_model(din, inputs(), seed=3)
    assert [spec.name for spec in model.inputs.sequences] == ["tags"]
    assert model.inputs.sequences[0].pooling is Pooling.NONE
    assert len(model.embeddings.field_dims) == len(inputs().lookups) - 1
    batch = random_batch(inputs(), 5)
    model(batch).sum().backward()
    read = [slot.name for parts in model.embeddings.recorded for part in parts for slot in part.layout.slots]
    assert "tags" not in read
    assert read.count("shop") == 2  # the single feature, and the history's rows of the same table
