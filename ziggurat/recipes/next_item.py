"""Recipes of next-item models: public event logs with leave one out, and event logs of one's own.

As RecTools trains (histories of 200, 50 numbers an event, 128 uniform negatives, τ 0.05, dropout 0.2, Adam with β₂
0.98, the best of validation recall@10), but for three settings that validation data chose here: batches of 64 users
(there: 128), a learning rate that falls from 3e-3 to 0 over 40 epochs, for SASRec 80 (there: 1e-3, 100 epochs), and a
draw of negatives that 128 questions share (there: each has its own). What they are worth together: docs/experiments.

Beauty, whose users have nine events in the mean, has one layer of 128 numbers, 256 negatives, dropout 0.5, and 10
epochs of batches of 128. These were chosen together against two layers of 64 with 128 negatives, which found less; what
each of them does was not told apart.

Sources: the HSTU tutorial of MobileTeleSystems/RecTools; Beauty: gSASRec and eSASRec, arXiv 2308.07192 and 2508.06450.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ziggurat.data.datasets import schema_for
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.features.schema import Schema
from ziggurat.models.retrieval.encoders import VectorLength
from ziggurat.models.sequence.layers.hstu import PositionTimeBias
from ziggurat.models.sequence.layers.places import AskedAt
from ziggurat.models.sequence.layers.preset import LayerPreset
from ziggurat.models.sequence.next_item import NextItemConfig, Positions
from ziggurat.models.sequence.next_item_loss import NextItemLoss
from ziggurat.recipes.protocols import SPARSE_TABLES, bars_tables
from ziggurat.recipes.run_config import DatasetConfig, RunConfig
from ziggurat.training import metrics
from ziggurat.training.config import Decay, EarlyStopConfig, ScheduleConfig, TrainingConfig

Recipe = Callable[[], RunConfig]

SMALL_EVENTS = replace(bars_tables(), init_std=0.02)
EVENTS_HSTU = NextItemConfig(embedding_dim=50, layers=LayerPreset.HSTU, embedding=SMALL_EVENTS)
EVENTS_SASREC = NextItemConfig(embedding_dim=50, layers=LayerPreset.SASREC, embedding=SMALL_EVENTS)
_OF_GSASREC = {"loss": NextItemLoss.GBCE, "num_negatives": 256, "length": VectorLength.FREE, "temperature": 1.0}
EVENTS_GSASREC = replace(EVENTS_SASREC, **_OF_GSASREC)
EVENTS_HSTU_LARGE = replace(EVENTS_HSTU, num_layers=8, num_heads=2)
EVENTS_SASREC_WIDE = replace(  # the published settings of Amazon Beauty
    EVENTS_SASREC,
    embedding_dim=256,
    num_layers=1,
    dropout=0.2,
    item_dropout=0.2,
    num_negatives=256,
    length=VectorLength.FREE,
    temperature=1.0,
    positions=Positions.FROM_END,
)
TABLE_EVENTS = (
    NextItemConfig(layers=LayerPreset.HSTU, embedding=SPARSE_TABLES),
    NextItemConfig(layers=LayerPreset.SASREC, embedding=SPARSE_TABLES),
    NextItemConfig(layers=LayerPreset.SASREC, embedding=SPARSE_TABLES, **_OF_GSASREC),
)
_NEXT_FILM = "{} on MovieLens-1M: the next film of each user, leave one out, full ranking."


_EVALUATE_EVERY = {"movielens-1m-events": 380, "beauty-events": 175}  # steps: four epochs, and one


def next_item_variants(model: NextItemConfig) -> dict[str, NextItemConfig]:
    """Published models by name, with the sizes and the training of one that is given, for comparisons.

    Args:
        model: whose sizes, negatives and tables all of them have.
    """
    hstu = replace(model, layers=LayerPreset.HSTU)
    found = {layers.value: replace(model, layers=layers) for layers in LayerPreset}
    return found | {
        "hstu_research": hstu,
        "hstu_no_bias": replace(hstu, bias=PositionTimeBias.NONE),
        "hstu_position": replace(hstu, bias=PositionTimeBias.POSITION),
        "hstu_time": replace(hstu, bias=PositionTimeBias.TIME),
        "hstu_own_time": replace(hstu, asked=AskedAt.OWN),
        "gsasrec": replace(model, layers=LayerPreset.SASREC, **_OF_GSASREC),
        "esasrec": replace(model, layers=LayerPreset.LIGR, length=VectorLength.FREE, temperature=1.0),
    }


def _events_recipe(
    name: str,
    model: NextItemConfig,
    *,
    data: str,
    about: str,
    epochs: int = 40,
    batch_size: int = 64,
    rate: float = 3e-3,
    decay: Decay = Decay.LINEAR,
    patience: int = 0,
) -> Recipe:
    """A recipe of a next-item model on a public event log, leave one out.

    Trained as RecTools trains, but for rate and length on MovieLens, which validation data chose.
    """

    def recipe() -> RunConfig:
        training = TrainingConfig(
            epochs=epochs,
            learning_rate=rate,
            beta2=0.98,
            schedule=ScheduleConfig(decay=decay),
            evaluate_every=_EVALUATE_EVERY[data],
            early_stop=EarlyStopConfig(metric=metrics.OF_RANKING, patience=patience),
            evaluation_batch_size=512,
            loader=LoaderConfig(batch_size=batch_size),
        )
        return RunConfig(
            recipe=name,
            dataset=DatasetConfig(name=data),
            data=DataConfig(split=SplitConfig(by=SplitBy.LEAVE_ONE_OUT)),
            table_schema=schema_for(data),
            model=model,
            training=training,
        )

    recipe.__name__ = recipe.__qualname__ = name
    recipe.__doc__ = about
    return recipe


def _table_events(model: NextItemConfig) -> Callable[[Schema], RunConfig]:
    """The recipe `table_LAYERS` of a next-item model, for an event log; gsasrec: SASRec's with gBCE."""
    name = "gsasrec" if model.loss is NextItemLoss.GBCE else model.layers.value

    def recipe(schema: Schema) -> RunConfig:
        training = TrainingConfig(
            epochs=50,
            early_stop=EarlyStopConfig(metric=metrics.OF_RANKING, patience=5),
            evaluation_batch_size=512,
            loader=LoaderConfig(batch_size=128),
        )
        data = DataConfig(split=SplitConfig(by=SplitBy.LEAVE_ONE_OUT))
        return RunConfig(recipe=f"table_{name}", data=data, table_schema=schema, model=model, training=training)

    recipe.__name__ = recipe.__qualname__ = f"table_{name}"
    recipe.__doc__ = f"{name.upper()} on an event log of yours, next item: --data.train FILE --schema events.toml."
    return recipe


NEXT_ITEM_RECIPES: tuple[Recipe, ...] = (
    _events_recipe(
        "movielens_sasrec",
        EVENTS_SASREC,
        data="movielens-1m-events",
        about=_NEXT_FILM.format("SASRec"),
        epochs=80,
    ),
    _events_recipe(
        "movielens_gsasrec", EVENTS_GSASREC, data="movielens-1m-events", about=_NEXT_FILM.format("gSASRec (gBCE)")
    ),
    _events_recipe("movielens_hstu", EVENTS_HSTU, data="movielens-1m-events", about=_NEXT_FILM.format("HSTU")),
    _events_recipe(
        "movielens_hstu_large",
        EVENTS_HSTU_LARGE,
        data="movielens-1m-events",
        about=_NEXT_FILM.format("HSTU with 8 layers of 2 heads"),
        epochs=80,
    ),
    _events_recipe(
        "beauty_sasrec",
        EVENTS_SASREC_WIDE,
        data="beauty-events",
        about="SASRec on Amazon Beauty (S3-Rec's file), leave one out, full ranking. Needs --dataset.source FILE.",
        epochs=12,
        batch_size=128,
        rate=1e-3,
        decay=Decay.CONSTANT,
        patience=3,
    ),
)
NEXT_ITEM_TABLE_RECIPES = tuple(_table_events(model) for model in TABLE_EVENTS)
