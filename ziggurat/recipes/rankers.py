"""Recipes that rank candidates behind histories: HSTU and STU over event logs.

A batch holds whole questions (`session_lanes`, or the order of the files), so that a history is computed once for its
candidates.

`yambda_stu` is MLPerf's DLRMv4 (mlcommons/training, `recommendation`): listens of half a track and more, ranked by
what a person heard, liked and skipped, 1,362 events each; days in their order, once; judged by the next day. Tracks
with artist and album, eight features of context of which seven are hashed crosses, eleven tables of 512 columns. Three
STU layers of width 512, four heads of 128; Adam with β (0.95, 0.999) and row-wise Adagrad, both at 1e-6 · batch / 8192
after a warm-up of 24,000 steps from zero, gradients clipped at 1, BF16. Target: AUC 0.75, reached after 69.3 M samples
(mean of 20 seeds). What is the same and what differs, rule by rule, and what a real run needs, is in
docs/guides/long-histories.md.

The rates belong to the batch: `yambda_rate`. `_toy` runs in minutes on made data, `_small` takes Yambda-50m.
"""

from __future__ import annotations

from dataclasses import replace

from ziggurat import precision
from ziggurat.data.datasets import yambda
from ziggurat.data.datasets.movielens_events import candidates_schema
from ziggurat.data.encoded.epoch_stream import Shuffle
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.embeddings import TableInit
from ziggurat.models import SequenceRankerConfig
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.next_item import Positions
from ziggurat.models.sequence.ranker import ActionInput, Clock, EventEncoders
from ziggurat.recipes.protocols import SPARSE_TABLES
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.training import metrics
from ziggurat.training.config import EarlyStopConfig, ScheduleConfig, TrainingConfig

_SMALL = replace(SPARSE_TABLES, init=TableInit.NORMAL, init_std=0.02)
HSTU_RANKER = SequenceRankerConfig(
    embedding_dim=32,
    layers=LayerPreset.HSTU,
    positions=Positions.FROM_START,
    bias=PositionTimeBias.POSITION_AND_TIME,
    time_buckets=0,
    embedding=_SMALL,
)


def movielens_hstu_ranker() -> RunConfig:
    """HSTU as a ranker on MovieLens-1M: like = rating of 4 or more, from all ratings before, time split."""
    training = TrainingConfig(
        epochs=5,
        learning_rate=1e-3,
        table_learning_rate=1e-3,
        early_stop=EarlyStopConfig(metric=metrics.USUAL, patience=1),
        loader=LoaderConfig(batch_size=1024, shuffle=Shuffle.SESSION_LANES),
    )
    return RunConfig(
        recipe="movielens_hstu_ranker",
        dataset=DatasetConfig(name="movielens-1m-events"),
        data=DataConfig(split=SplitConfig(by=SplitBy.TIME, valid_fraction=0.1, test_fraction=0.1)),
        table_schema=candidates_schema(),
        model=HSTU_RANKER,
        training=training,
    )


REAL_BATCH, REAL_WARMUP = 8192, 24_000
TARGET_AUC = 0.75
REAL_EVALUATION = 280  # steps of 8,192 samples: 0.1 % of all samples, in whole steps


def yambda_rate(batch_size: int) -> float:
    """The reference's learning rate for so many samples a step, of the network and of the tables."""
    return 1e-6 * batch_size / REAL_BATCH


def yambda_stu() -> RunConfig:
    """DLRMv4's STU on Yambda-5b at its real size: 3 layers of 512, 4,086 events. Needs --dataset.source FOLDER."""
    training = TrainingConfig(
        epochs=1,
        learning_rate=yambda_rate(REAL_BATCH),
        table_learning_rate=yambda_rate(REAL_BATCH),
        beta1=0.95,
        beta2=0.999,
        clip_norm=1.0,
        precision=precision.Precision.BF16,
        schedule=ScheduleConfig(warmup_steps=REAL_WARMUP),
        evaluate_every=REAL_EVALUATION,
        checkpoint_every=1_000,
        loader=LoaderConfig(batch_size=REAL_BATCH, shuffle=Shuffle.NONE),
    )
    model = SequenceRankerConfig(
        embedding_dim=512,
        layers=LayerPreset.STU,
        num_layers=3,
        num_heads=4,
        dropout=0.1,
        input_dropout=0.2,
        encoders=EventEncoders.NETWORKS,
        encoder_dim=256,
        clock=Clock.HOUR_AND_DAY,
        actions=ActionInput.MAPPED,
        task_weights=(0.2,),
    )
    return RunConfig(
        recipe="yambda_stu",
        dataset=DatasetConfig(name=yambda.NAME),
        data=DataConfig(split=SplitConfig(by=SplitBy.WINDOWS)),
        table_schema=yambda.yambda_schema(share=1362),
        model=model,
        training=training,
    )


def yambda_stu_small() -> RunConfig:
    """DLRMv4's form on Yambda-50m for one machine: 2 layers of 64, 384 events. Needs --dataset.source FOLDER."""
    return _smaller(
        share=128, dim=64, batch_size=2048, rate=4e-3, people=10_000, recipe="yambda_stu_small", dataset=yambda.NAME
    )


def yambda_stu_toy() -> RunConfig:
    """DLRMv4's form on made listens: 2 layers of 16, 30 events, days in their order. Nothing needed."""
    # At 4e-3 and 256 a batch two of three seeds end before the networks of events have begun to tell anything.
    return _smaller(
        share=10, dim=16, batch_size=128, rate=8e-3, people=1000, recipe="yambda_stu_toy", dataset=yambda.MADE
    )


def _smaller(
    *, share: int, dim: int, batch_size: int, rate: float, people: int, recipe: str, dataset: str
) -> RunConfig:
    """The real recipe with other sizes, and rates for data that ends after thousands of steps or fewer."""
    real = yambda_stu()
    training = replace(
        real.training,
        learning_rate=rate,
        table_learning_rate=0.1,
        precision=precision.USUAL,
        schedule=ScheduleConfig(warmup_steps=10),
        evaluate_every=40 if dataset == yambda.MADE else 500,
        checkpoint_every=0,
        loader=replace(real.training.loader, batch_size=batch_size),
    )
    model = replace(real.model, embedding_dim=dim, num_layers=2, num_heads=2, encoder_dim=dim)
    return replace(
        real,
        recipe=recipe,
        dataset=DatasetConfig(name=dataset),
        table_schema=yambda.yambda_schema(share=share, people=people),
        model=model,
        training=training,
    )


RANKER_RECIPES = (movielens_hstu_ranker, yambda_stu_toy, yambda_stu_small, yambda_stu)
