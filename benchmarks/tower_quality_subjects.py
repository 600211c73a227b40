"""What the tower quality benchmark trains: data, flat model, tower module, and the order of its cells.

Small networks, so that one training takes seconds on one core: what is compared is models, not their sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ziggurat.data.loader import LoaderConfig
from ziggurat.data.splits import SplitBy, SplitConfig
from ziggurat.data.synthetic import SyntheticConfig, SyntheticTeacher
from ziggurat.embeddings import EmbeddingConfig, TableInit
from ziggurat.models import DLRMConfig, MLPConfig
from ziggurat.models.tower_modules import TowerModuleConfig, TowerModuleKind
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.config import Decay, EarlyStopConfig, ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One data set with one model.

    Args:
        key: folder name.
        name: shown in tables.
        config: of the flat model.
        num_towers: T.
        module: of the towers; its compression is set by the cell.
        cells: (strategy, compression) in the order of their weight for the targets.
        note: settings, for readers of the report.
        probe: the flat model whose embeddings the partition is learned from, where it is another than `config`.
    """

    key: str
    name: str
    config: RunConfig
    num_towers: int
    module: TowerModuleConfig
    cells: tuple[tuple[str, int], ...]
    note: str
    probe: RunConfig | None = None


CELLS = (
    ("flat", 1), ("coherent", 4), ("coherent", 2), ("naive", 8), ("coherent", 8), ("naive", 4), ("naive", 2),
    ("coherent", 16), ("naive", 16), ("coherent", 1), ("naive", 1), ("diverse", 8), ("diverse", 4), ("diverse", 2),
)  # fmt: skip


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
    """DLRM on planted groups, one pass over 375,000 training rows."""
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
            epochs=1,
            table_learning_rate=0.1,
            loader=LoaderConfig(batch_size=512),
            schedule=ScheduleConfig(warmup_steps=100, decay=Decay.LINEAR),
        ),
    )


def movielens() -> RunConfig:
    """DLRM on MovieLens-1M, as in the recipe."""
    return recipe_named("movielens_dlrm")


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
            loader=LoaderConfig(batch_size=512),
        ),
    )


MODULE = TowerModuleConfig(kind=TowerModuleKind.FLATTENED)
SUBJECTS = (
    Subject(
        key="planted",
        name="planted groups, DLRM",
        config=planted(),
        num_towers=4,
        module=MODULE,
        cells=CELLS,
        note="",
    ),
    Subject(
        key="movielens",
        name="MovieLens-1M, DLRM",
        config=movielens(),
        num_towers=2,
        module=MODULE,
        cells=CELLS,
        note="",
    ),
    Subject(
        key="frappe",
        name="Frappe, DLRM",
        config=frappe(),
        num_towers=2,
        module=MODULE,
        cells=CELLS,
        note="",
    ),
)
