"""What the tower quality benchmark trains: data, flat model, tower module, and cells, the most important ones first.

Small networks, so that one training takes seconds on one core: what is compared is models, not their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.synthetic.teacher import SyntheticConfig, SyntheticTeacher
from ziggurat.embeddings import EmbeddingConfig, TableInit
from ziggurat.models import DLRMConfig, Init, MLPConfig
from ziggurat.models.towers.modules import TowerModuleConfig, TowerModuleKind
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.config import Decay, EarlyStopConfig, ScheduleConfig

Rounds = tuple[tuple[tuple[str, int], ...], ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One data set with one model.

    Args:
        key: folder name.
        name: shown in tables.
        config: of the flat model.
        num_towers: T.
        module: of the towers; its compression is set by the cell.
        rounds: cells, (strategy, compression), in rounds: all subjects finish a round before the next one.
        note: settings, for readers of the report.
        probe: the flat model whose embeddings the partition is learned from, where it is another than `config`.
    """

    key: str
    name: str
    config: RunConfig
    num_towers: int
    module: TowerModuleConfig
    rounds: Rounds
    note: str
    probe: RunConfig | None = None


PLANTED_ROUNDS: Rounds = (
    (("flat", 1), ("coherent", 4), ("naive", 8), ("coherent", 8)),
    (("coherent", 2), ("naive", 4), ("naive", 2)),
    (("coherent", 16), ("naive", 16)),
    (("coherent", 1), ("naive", 1), ("diverse", 4), ("diverse", 8)),
)
REAL_ROUNDS: Rounds = (
    (("flat", 1), ("coherent", 4), ("naive", 4)),
    (("coherent", 2), ("naive", 2)),
    (("coherent", 8), ("naive", 8)),
    (("coherent", 16), ("naive", 16), ("coherent", 1), ("naive", 1)),
)


def planted_teacher() -> SyntheticConfig:
    """16 features of 12 ids in 4 groups; most of what can be known is in the pairs of a group."""
    return SyntheticConfig(
        num_dense=2,
        cardinalities=(12,) * 16,
        zipf_exponent=0.3,
        num_groups=4,
        hidden_dim=4,
        dense_share=0.1,
        first_order_share=0.2,
        second_order_share=0.7,
        third_order_share=0.0,
        logit_sd=2.0,
        seed=1,
    )


def planted() -> RunConfig:
    """DLRM on planted groups, two passes over 375,000 training rows."""
    teacher, config = planted_teacher(), recipe_named("synthetic_dlrm")
    return replace(
        config,
        dataset=replace(config.dataset, rows=500_000),
        teacher=teacher,
        table_schema=SyntheticTeacher(teacher).schema(),
        data=replace(config.data, split=SplitConfig(by=SplitBy.RANDOM, valid_fraction=0.1, test_fraction=0.15)),
        model=DLRMConfig(
            embedding_dim=16,
            bottom=MLPConfig(hidden_dims=(32,)),
            top=MLPConfig(hidden_dims=(128, 64)),
            embedding=EmbeddingConfig(dim=16, init=TableInit.NORMAL, init_std=0.1),
        ),
        training=replace(
            config.training,
            epochs=2,
            learning_rate=5e-3,
            table_learning_rate=0.1,
            loader=LoaderConfig(batch_size=512),
            schedule=ScheduleConfig(warmup_steps=100, decay=Decay.LINEAR),
        ),
    )


def movielens() -> RunConfig:
    """DLRM on MovieLens-1M: the recipe with a smaller network and larger batches, two passes."""
    config = recipe_named("movielens_dlrm")
    assert isinstance(config.model, DLRMConfig)
    return replace(
        config,
        model=replace(config.model, top=MLPConfig(hidden_dims=(128, 64), dropout=0.2)),
        training=replace(config.training, epochs=2, learning_rate=2e-3, loader=LoaderConfig(batch_size=4096)),
    )


def frappe() -> RunConfig:
    """DLRM on Frappe with row-wise Adagrad and a smaller network than the recipe's."""
    config = recipe_named("frappe_dlrm")
    assert isinstance(config.model, DLRMConfig)
    return replace(
        config,
        model=replace(config.model, top=MLPConfig(hidden_dims=(128, 64))),
        training=replace(
            config.training,
            epochs=6,
            early_stop=EarlyStopConfig(metric="auc", patience=1),
            loader=LoaderConfig(batch_size=1024),
        ),
    )


MODULE = TowerModuleConfig(kind=TowerModuleKind.CROSS, num_cross_layers=2, init=Init.XAVIER_NORMAL)
SUBJECTS = (
    Subject(
        key="planted",
        name="planted groups, DLRM",
        config=planted(),
        num_towers=4,
        module=MODULE,
        rounds=PLANTED_ROUNDS,
        note="375,000 training rows, two passes, batch 512, N = 16, 16 features of 12 ids in 4 groups, 4 towers",
    ),
    Subject(
        key="movielens",
        name="MovieLens-1M, DLRM",
        config=movielens(),
        num_towers=2,
        module=MODULE,
        rounds=REAL_ROUNDS,
        note="time split, two passes, batch 4096, N = 16, 2 towers",
    ),
    Subject(
        key="frappe",
        name="Frappe, DLRM",
        config=frappe(),
        num_towers=2,
        module=MODULE,
        rounds=REAL_ROUNDS,
        note="up to 6 passes with early stop, row-wise Adagrad, batch 1024, N = 16, 2 towers",
    ),
)
