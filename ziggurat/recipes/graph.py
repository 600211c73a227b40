"""Recipes of models over the graph of users and items: the public split of Gowalla, and logs of one's own.

Gowalla: D 64, three layers, λ 1e-4, tables at N(0, 0.1²), Adam, BPR with one negative, pairs of users drawn uniformly,
1,000 epochs, as the paper and its code have them (batches of 2,048 at 1e-3). A step propagates over the whole graph
whatever its batch, so batches are 16 times as large here: 25 steps an epoch in place of 396. The rate is 30 times as
high, and falls to 0: on a tenth of the training pairs that was held out, 0.03 was ahead of 0.01 and 0.1 after ten
epochs. Layers are kept in BF16. 1,000 epochs take 50 minutes of one core of a Zen 4.

Source: He et al., "LightGCN", SIGIR 2020, arXiv 2002.02126, section 4.1.
"""

from __future__ import annotations

from ziggurat import precision
from ziggurat.data.datasets import schema_for
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.features.schema import Schema
from ziggurat.models import LayerDtype, LightGCNConfig, PairSampling
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.training.config import Decay, EarlyStopConfig, ScheduleConfig, TrainingConfig
from ziggurat.training.metrics.full_ranking import USER_RECALL

GOWALLA = LightGCNConfig(pairs=PairSampling.USERS, layers_in=LayerDtype.BF16)


def gowalla_lightgcn() -> RunConfig:
    """LightGCN on Gowalla, the public split: recall@20 and NDCG@20 of users. Needs --dataset.source FOLDER."""
    return RunConfig(
        recipe="gowalla_lightgcn",
        dataset=DatasetConfig(name="gowalla"),
        data=DataConfig(split=SplitConfig(by=SplitBy.FILES)),
        table_schema=schema_for("gowalla"),
        model=GOWALLA,
        training=TrainingConfig(
            epochs=1000,
            learning_rate=3e-2,
            precision=precision.PLAIN,
            schedule=ScheduleConfig(decay=Decay.LINEAR),
            loader=LoaderConfig(batch_size=32_768),
        ),
    )


def pairs_training(schema: Schema) -> TrainingConfig:
    """Training of a model over pairs of users and items on a table of unknown size.

    Args:
        schema: of the table; where it has a group, the recall of users decides when to stop.
    """
    judged = EarlyStopConfig(metric=USER_RECALL, patience=5) if schema.group else EarlyStopConfig(patience=5)
    return TrainingConfig(
        epochs=100,
        learning_rate=5e-3,
        precision=precision.PLAIN,
        early_stop=judged,
        loader=LoaderConfig(batch_size=8192),
    )
