"""What tables in few bits are trained on to compare AUC: four kinds of data, and formats with caches of all sizes.

    movielens_dlrm    the recipe: 1 million ratings, 12,368 rows of tables, split by time
    frappe            the recipe's data: 288,609 uses of apps, 5,409 rows; a smaller network
    synthetic         the recipe's teacher, whose best AUC is known: 1 million samples, 150 ids in all
    stream            10⁷ samples of one pass, in order; 4 of Criteo's 13 numbers and 6 of its 26 categories, each with
                      100,000 ids by Zipf 1.05

Networks are small, so that tables are what learns and a run is minutes of one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from benchmarks.next_item.subjects import without_choices
from benchmarks.quality import seeded
from ziggurat.config import override
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.synthetic.teacher import SyntheticTeacher, criteo_shaped
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.models import DLRMConfig, MLPConfig
from ziggurat.ops.row_cache import CachePolicy
from ziggurat.ops.row_formats import Rounding, RowFormat
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.recipes.run_config import RunConfig, run_config_to_json

STREAM_ROWS = 10_000_000
_SMALL = DLRMConfig(bottom=MLPConfig(hidden_dims=(64,)), top=MLPConfig(hidden_dims=(128, 64)))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One kind of tables.

    Args:
        dim: columns of the embedding tables.
        tables: what they are kept as; FP32 is what others are compared with.
        promised: whether a difference of AUC within one sd is a goal.
    """

    dim: int
    tables: TablesConfig
    promised: bool = False


def _variant(
    dim: int, row_format: RowFormat, cache: float, *, promised: bool = False, nearest: bool = False
) -> Variant:
    rounding = Rounding.NEAREST if nearest else Rounding.STOCHASTIC
    tables = TablesConfig(weights=row_format, cache=cache, rounding=rounding)
    return Variant(dim=dim, tables=tables, promised=promised)


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "d64_int8_cache5": _variant(64, RowFormat.INT8, 0.05, promised=True),
        "d128_int4_cache1": _variant(128, RowFormat.INT4, 0.01, promised=True),
        "d128_int4_lfu1": Variant(
            dim=128,
            tables=TablesConfig(weights=RowFormat.INT4, cache=0.01, cache_policy=CachePolicy.LFU),
            promised=True,
        ),
        "d64_int8_cache0": _variant(64, RowFormat.INT8, 0.0),
        "d64_int8_cache0_nearest": _variant(64, RowFormat.INT8, 0.0, nearest=True),
        "d64_int8_cache5_nearest": _variant(64, RowFormat.INT8, 0.05, nearest=True),
        "d64_int8_cache1": _variant(64, RowFormat.INT8, 0.01),
        "d64_int8_cache20": _variant(64, RowFormat.INT8, 0.2),
        "d64_int8_cache100": _variant(64, RowFormat.INT8, 1.0),
        "d128_int4_cache0": _variant(128, RowFormat.INT4, 0.0),
        "d128_int4_cache0_nearest": _variant(128, RowFormat.INT4, 0.0, nearest=True),
        "d128_int4_cache20": _variant(128, RowFormat.INT4, 0.2),
    }
)


def _movielens() -> RunConfig:
    return recipe_named("movielens_dlrm")


def _frappe() -> RunConfig:
    return replace(recipe_named("frappe_dlrm"), model=_SMALL)


def _synthetic() -> RunConfig:
    config = recipe_named("synthetic_dlrm")
    return replace(config, model=_SMALL, dataset=replace(config.dataset, rows=1_000_000))


def _stream() -> RunConfig:
    whole = criteo_shaped()
    teacher = replace(whole, num_dense=4, cardinalities=whole.cardinalities[:6], num_groups=2)
    config = recipe_named("synthetic_dlrm")
    return replace(
        config,
        dataset=replace(config.dataset, rows=STREAM_ROWS),
        teacher=teacher,
        data=replace(config.data, split=SplitConfig(by=SplitBy.TIME_ORDER, valid_fraction=0.02, test_fraction=0.05)),
        table_schema=SyntheticTeacher(teacher).schema(),
        model=_SMALL,
        training=replace(config.training, epochs=1),
    )


SUBJECTS: Mapping[str, Callable[[], RunConfig]] = MappingProxyType(
    {"movielens_dlrm": _movielens, "frappe": _frappe, "synthetic": _synthetic, "stream": _stream}
)
PROMISED = tuple(f"{subject}_{name}_auc" for subject in SUBJECTS for name, each in VARIANTS.items() if each.promised)
CURVE = tuple(f"movielens_dlrm_{name}_auc" for name in VARIANTS)
NO_CACHE = tuple(f"{subject}_{name}_auc" for subject in SUBJECTS for name in ("d64_int8_cache0", "d128_int4_cache0"))
CASES = tuple(dict.fromkeys((*PROMISED, *CURVE, *NO_CACHE)))


def subject_and_variant(case: str) -> tuple[str, str]:
    """The subject and the variant of a case: "frappe", "d64_int8_cache5"."""
    subject = next(name for name in SUBJECTS if case.startswith(f"{name}_"))
    return subject, case.removeprefix(f"{subject}_").removesuffix("_auc")


def config_of(subject: str, variant: Variant, seed: int, *, epochs: int = 0) -> RunConfig:
    """The run of one seed.

    Args:
        subject: its name.
        variant: of its tables.
        seed: of weights, order and rounding.
        epochs: fewer than the subject's, to try things out; 0: the subject's.
    """
    config = seeded(SUBJECTS[subject](), seed)
    changes = {"model.embedding-dim": str(variant.dim)} | ({"training.epochs": str(epochs)} if epochs else {})
    return replace(override(config, changes), tables=variant.tables)


def settings_of(subject: str, variant: Variant, *, epochs: int = 0) -> dict[str, Any]:
    """What every seed of a case is trained with, as plain data for the report: no seed, no path, no choice."""
    config = without_choices(config_of(subject, variant, 0, epochs=epochs))
    return run_config_to_json(replace(config, dataset=replace(config.dataset, source="")))
