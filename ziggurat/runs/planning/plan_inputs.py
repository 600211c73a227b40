"""What a planner needs to know of a recipe's data: rows of each table, ids a sample of each list, and who says so.

    1. --rows TABLE=N, --list-length FEATURE=X              as given
    2. the run's folder, or data prepared before             counted (lists over a sample of the training rows)
    3. the schema                                            identity and hashed tables, vocabularies with max_rows
    4. published sizes of public data sets                   an upper bound where ids seen rarely are left out
    5. lists                                                 as long as `max_length` where the schema sets one, else 10

Nothing is downloaded, and nothing but encoded data is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ziggurat.cache import cache_folder
from ziggurat.commands import pasted
from ziggurat.config import from_json
from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import find_prepared
from ziggurat.data.preprocess.prepared import PreparedData
from ziggurat.data.preprocess.preprocessing import inputs_of_schema
from ziggurat.errors import ConfigError
from ziggurat.features.inputs import InputSpec, JaggedSpec, MomentsSpec
from ziggurat.features.schema import NUM_RESERVED_ROWS, Encoding, Schema, table_of
from ziggurat.recipes.run_config import RunConfig
from ziggurat.training.records.run_folder import INPUTS, RunFolder

_SAMPLE_ROWS = 16_384
_USUAL_LENGTH = 10.0  # ids a sample; a note says that it was assumed
# Different values of C1 to C26 in Criteo's data set of Kaggle.
_CRITEO_KAGGLE = (
    *(1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992),
    *(5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572),
)
_CRITEO = {f"C{index + 1}": count for index, count in enumerate(_CRITEO_KAGGLE)}
PUBLISHED_IDS = {
    "movielens": {
        "user_id": 6_040,
        "movie_id": 3_706,
        "gender": 2,
        "age": 7,
        "occupation": 21,
        "zip_code": 3_439,
        "year": 81,
        "genres": 18,
    },
    "frappe": {
        "user": 957,
        "item": 4_082,
        "daytime": 7,
        "weekday": 7,
        "isweekend": 2,
        "homework": 3,
        "cost": 2,
        "weather": 9,
        "country": 80,
        "city": 233,
    },
    "criteo_dlrm": _CRITEO,
    "criteo_dcn_v2": _CRITEO,
}


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Features, tables and lists of a model that is to be planned.

    Args:
        inputs: with the number of rows of each table.
        list_lengths: mean rows a sample, by feature.
        notes: where numbers come from that are not the data's own.
    """

    inputs: InputSpec
    list_lengths: dict[str, float]
    notes: tuple[str, ...] = ()


def plan_inputs(
    config: RunConfig,
    *,
    folder: str | Path | None = None,
    rows: Mapping[str, int] | None = None,
    list_lengths: Mapping[str, float] | None = None,
) -> PlanInputs:
    """Find the rows of each table and the ids a sample of each list, with the source of each figure.

    Args:
        config: of the run.
        folder: of a run that was trained, if there is one.
        rows: rows of tables, without the reserved ones, that the user gives.
        list_lengths: mean ids a sample of features that the user gives.

    Raises:
        ConfigError: a table whose size nobody knows, or a name that the schema does not have.
    """
    rows = dict(rows or {})
    given = dict(list_lengths or {})
    schema = config.table_schema
    _known_names(rows, {name for each in schema.features if (name := table_of(each))}, what="table", flag="--rows")
    lists = {each.name for each in schema.features if isinstance(each.spec(), JaggedSpec | MomentsSpec)}
    _known_names(given, lists, what="list", flag="--list-length")
    prepared = prepared_data(config)
    if folder is not None and RunFolder(Path(folder)).inputs.exists():
        file = RunFolder(Path(folder)).inputs
        inputs = from_json(InputSpec, INPUTS.read(file), where=str(file))
        notes = []
    elif prepared is not None:
        inputs = prepared.inputs
        notes = []
    else:
        inputs, notes = _from_schema(config, rows)
    if rows:
        tables = (
            replace(each, num_rows=rows[each.name] + NUM_RESERVED_ROWS) if each.name in rows else each
            for each in inputs.tables
        )
        inputs = replace(inputs, tables=tuple(tables))
    lengths = {} if prepared is None else measured_lengths(prepared)
    assumed = {
        each.name: _assumed_length(schema, each)
        for each in inputs.jagged
        if each.name not in lengths and each.name not in given
    }
    if assumed:
        shown = ", ".join(f"{name} {length:g}" for name, length in assumed.items())
        notes.append(f"lists: assumed ids a sample: {shown} (--list-length NAME=X)")
    # What was given goes before what was measured, and that before what was assumed.
    return PlanInputs(inputs=inputs, list_lengths={**assumed, **lengths, **given}, notes=tuple(notes))


def prepared_data(config: RunConfig) -> PreparedData | None:
    """The run's encoded data if it was prepared before on this machine; fetches and makes nothing."""
    data = config.data
    if config.dataset.name:
        folder = cache_folder() / config.dataset.name
        splits = {split: folder / f"{split}.parquet" for split in ("train", "valid", "test")}
        if (folder / "ratings.parquet").exists():
            data = replace(data, train=(str(folder / "ratings.parquet"),))
        elif all(path.exists() for path in splits.values()):
            data = replace(data, **{split: (str(path),) for split, path in splits.items()})
        else:
            return None
    elif not data.train:
        return None
    return _find(data, config.table_schema)


def measured_lengths(prepared: PreparedData) -> dict[str, float]:
    """Mean rows a sample of every list, over a sample of the training rows."""
    jagged = prepared.inputs.jagged
    if not jagged:
        return {}
    size = min(_SAMPLE_ROWS, prepared.train.num_rows)
    loader = Loader(prepared.train, config=LoaderConfig(batch_size=size, shuffle_buffer_rows=size, prefetch=0))
    batch = next(iter(loader.batches(epoch=0)))
    means = batch.jagged.lengths(num_features=len(jagged)).double().mean(1)
    return {spec.name: float(mean) for spec, mean in zip(jagged, means, strict=True)}


def _find(data: DataConfig, schema: Schema) -> PreparedData | None:
    return find_prepared(data, schema=schema, folder=cache_folder() / "prepared")


def _from_schema(config: RunConfig, rows: Mapping[str, int]) -> tuple[InputSpec, list[str]]:
    """Tables as the schema has them, vocabularies by published or given size."""
    schema = config.table_schema
    known: dict[str, int] = {}
    for prefix, sizes in PUBLISHED_IDS.items():
        if config.recipe.startswith(prefix):
            known = sizes
    sizes = {}
    published = []
    for name in dict.fromkeys(table_of(feature) for feature in schema.features):
        if not name or schema.table(name).encoding is not Encoding.VOCABULARY or name in rows:
            sizes |= {name: range(rows[name])} if name in rows else {}
            continue
        most = schema.table(name).max_rows
        if name in known:
            published.append(name)
        elif not most and not _has_buckets(schema, name):
            raise _unknown_size(name)
        sizes[name] = range(min(known.get(name, most), most or known.get(name, 0)))
    notes = [f"tables: published numbers of ids for {', '.join(published)} (no data is prepared here)"]
    return inputs_of_schema(schema, sizes), notes if published else []


def _has_buckets(schema: Schema, name: str) -> bool:
    return any(table_of(each) == name and each.owns_table for each in schema.features)


def _assumed_length(schema: Schema, spec: JaggedSpec) -> float:
    default = JaggedSpec(name="", table="")
    return float(spec.max_length) if spec.max_length < default.max_length else _USUAL_LENGTH


def _known_names(given: Mapping[str, object], names: set[str], *, what: str, flag: str) -> None:
    unknown = sorted(given.keys() - names)
    if unknown:
        raise ConfigError(
            expected=f"a {what} of the schema: {', '.join(sorted(names)) or 'there is none'}",
            found=", ".join(unknown),
            where=f"command line, {flag}",
            ways_out="correct the name",
        )


def _unknown_size(name: str) -> ConfigError:
    return ConfigError(
        expected="the number of ids of every table",
        found=f"table {name!r} has a vocabulary that is fitted on data, and no data is prepared here",
        where="planning",
        ways_out=(
            f"give it: --rows {pasted(f'{name}=1000000')}",
            f"cap it in the schema: max_rows for table {name!r}",
            "plan for a run that was trained: ziggurat plan RUN --cluster …",
        ),
    )
