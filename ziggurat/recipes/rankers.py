"""Recipes that rank candidates behind histories: HSTU and STU over event logs.

A batch holds whole questions (`session_lanes`), so that a history is computed once for its candidates.
"""

from __future__ import annotations

from ziggurat.data.datasets.movielens_events import candidates_schema
from ziggurat.data.encoded.epoch_stream import Shuffle
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.embeddings import EmbeddingConfig, TableInit
from ziggurat.models import SequenceRankerConfig
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.next_item import LayerPreset, Positions
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.training.config import EarlyStopConfig, TrainingConfig

_SMALL = EmbeddingConfig(optimizer=TableOptimizerKind.SPARSE_ADAM, init=TableInit.NORMAL, init_std=0.02)
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
        early_stop=EarlyStopConfig(metric="auc", patience=1),
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
