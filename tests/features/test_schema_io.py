"""Schemas survive TOML exactly, and every mistake in a file is named with the nearest valid word."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.errors import MissingFileError, SchemaError
from ziggurat.features.growing import Evict
from ziggurat.features.items import Items, Repeats
from ziggurat.features.schema import (
    MISSING_TEXTS,
    Categorical,
    Dense,
    Encoding,
    Label,
    MultiHot,
    NumericTransform,
    OutOfRange,
    Pooling,
    Schema,
    Sequence,
    Table,
    Task,
    Vector,
    table_of,
)
from ziggurat.features.schema_io import read_schema, schema_from_toml, schema_to_toml, write_schema

# Any text that UTF-8 can hold: quotes, newlines, "#", emoji and control characters included.
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(
    lambda text: text not in ("row:", "group:", "weight:") and not text.startswith("label:")  # columns of our own
)
maybe = st.one_of(st.just(""), texts)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)

label_values = st.one_of(
    st.fixed_dictionaries({"task": st.sampled_from(list(Task))}),
    st.fixed_dictionaries({"positive_from": finite}),
    st.lists(texts, min_size=2, max_size=2, unique=True).map(lambda two: {"positive": two[0], "negative": two[1]}),
)


@st.composite
def schemas(draw: st.DrawFn) -> Schema:
    names = draw(st.lists(texts, min_size=1, max_size=6, unique=True))
    features = []
    for name in names:
        kind = draw(st.sampled_from([Dense, Categorical, MultiHot, Sequence, Vector]))
        values: dict = {"name": name, "column": draw(maybe)}
        if kind is Dense:
            values |= {
                "transform": draw(st.sampled_from(list(NumericTransform))),
                "missing": draw(finite),
                "num_buckets": draw(st.integers(1, 2**20)),
                "min_count": draw(st.integers(1, 99)),
            }
        elif kind is Vector:
            values["dim"] = draw(st.integers(1, 4096))
        else:
            values["table"] = draw(maybe)
        if kind in (MultiHot, Sequence):
            values |= {"separator": draw(maybe), "pooling": draw(st.sampled_from(Pooling))}
            values["max_length"] = draw(st.integers(1, 10**6))
        features.append(kind(**values))
    used = sorted({table_of(feature) for feature in features} - {""})
    tables = []
    for name in draw(st.lists(st.sampled_from(used), unique=True)) if used else []:
        encoding = draw(st.sampled_from(Encoding))
        tables.append(
            Table(
                name=name,
                encoding=encoding,
                num_rows=0 if encoding is Encoding.VOCABULARY else draw(st.integers(1, 2**40)),
                min_count=draw(st.integers(1, 50)),
                max_rows=0 if encoding is Encoding.GROWING else draw(st.integers(0, 10**7)),
                evict=draw(st.sampled_from(Evict)) if encoding is Encoding.GROWING else Evict.LEAST_FREQUENT,
                out_of_range=draw(st.sampled_from(OutOfRange)),
                embedding_dim=draw(st.integers(0, 512)),
            )
        )
    labels = [
        Label(
            name=name,
            column=draw(maybe),
            **draw(label_values),
        )
        for name in draw(st.lists(texts, max_size=3, unique=True))
    ]
    roles = {role: draw(maybe) for role in ("weight", "group", "time")}
    missing = draw(st.one_of(st.just(MISSING_TEXTS), st.lists(texts, max_size=3).map(tuple)))
    ids = [feature.name for feature in features if isinstance(feature, Categorical)]
    described = draw(st.lists(st.sampled_from(names), unique=True).map(tuple))
    repeats = draw(st.sampled_from(Repeats))
    is_described = ids and draw(st.booleans())
    roles["items"] = Items(id=draw(st.sampled_from(ids)), features=described, repeats=repeats) if is_described else None
    return Schema(features=tuple(features), labels=tuple(labels), tables=tuple(tables), missing_texts=missing, **roles)


@settings(deadline=None, max_examples=60)
@given(schemas(), st.dictionaries(maybe, st.text(st.characters(codec="utf-8"), max_size=300), max_size=4))
def test_round_trip_is_exact_whatever_the_names_and_comments(schema: Schema, comments: dict[str, str]):
    comments |= {schema.columns[0]: "first line\n[[feature]]\nname = 'not a feature'"}
    assert schema_from_toml(schema_to_toml(schema, comments=comments), "text") == schema


def test_defaults_are_left_out_and_comments_stand_above_their_block(tmp_path):
    schema = Schema(
        features=(Categorical(name="user"), Dense(name="age", transform=NumericTransform.STANDARDISE)),
        labels=(Label(name="like", column="rating", positive_from=4),),
        time="when",
    )
    comments = {"": "Guessed.", "user": "6,040 distinct ids", "when": "epoch seconds", "junk": "left out: constant"}
    path = write_schema(schema, tmp_path / "my.toml", comments=comments)
    assert path.read_text() == (
        "# Guessed.\nmissing = []\n\n"
        '# 6,040 distinct ids\n[[feature]]\nname = "user"\nkind = "categorical"\n\n'
        '[[feature]]\nname = "age"\nkind = "dense"\ntransform = "standardise"\n\n'
        '[[label]]\nname = "like"\ncolumn = "rating"\npositive_from = 4.0\n\n'
        '[roles]\n# epoch seconds\ntime = "when"\n\n'
        "# Columns that no block reads:\n#   junk: left out: constant\n"
    )
    assert read_schema(path) == schema
    assert [entry.name for entry in tmp_path.iterdir()] == ["my.toml"]


def test_items_are_written_as_a_block_and_hold_their_own_id():
    schema = Schema(features=(Categorical(name="u"), Categorical(name="m"), MultiHot(name="g")))
    with_items = replace(schema, items=Items(id="m", features=("g",)))
    assert with_items.items.features == ("m", "g")
    assert schema_to_toml(with_items).endswith('[items]\nid = "m"\nfeatures = ["m", "g"]\n')
    assert "items" not in schema.to_state()  # what was prepared with a schema of before is found again
    assert "repeats" not in with_items.to_state()["items"]
    again = replace(schema, items=Items(id="m", repeats=Repeats.ALLOW))
    assert schema_to_toml(again).endswith('features = ["m"]\nrepeats = "allow"\n')
    assert again.to_state() != replace(schema, items=Items(id="m")).to_state()


GOOD = '[[feature]]\nname = "u"\nkind = "categorical"\n'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (GOOD + 'colum = "x"', ["my.toml, feature 'u'", "unknown key 'colum'", 'did you mean "column"?']),
        ('[[feature]]\nname = "u"\nkind = "categorial"', ["feature 'u'", "'categorial'", '"categorical"?']),
        ('[[feature]]\nname = "u"', ["feature 'u'", "no kind"]),
        ('[[feature]]\nname = "u"\nkynd = "dense"', ["unknown key 'kynd'", "write kind = 'dense'"]),
        ('[[feature]]\nname = "u"\nKind = "dense"', ["unknown key 'Kind'", "write kind = 'dense'"]),
        ('[[feature]]\nname = "u"\nmin_count = 2', ["feature 'u'", "no kind"]),
        ('[[feature]]\nkind = "dense"', ["feature number 1", "without 'name'"]),
        ('[[feature]]\nname = "u"\nkind = "vector"', ["feature 'u'", "without 'dim'", "add dim = 64"]),
        ('[[feature]]\nname = "u"\nkind = "vector"\ndim = 3.0', ["key 'dim'", "a whole number", "3.0 (float)"]),
        ('[[feature]]\nname = "u"\nkind = "dense"\nmissing = true', ["key 'missing'", "a number", "True (bool)"]),
        ('[[feature]]\nname = "u"\nkind = "dense"\ntransform = "log"', ["key 'transform'", 'mean "log1p"?']),
        ('[feature]\nname = "u"', ["[feature], in single brackets", "write [[feature]]"]),
        ("feature = 3", ["feature = 3", "write [[feature]]"]),
        (GOOD + '[[features]]\nname = "v"', ["unknown block 'features'", 'did you mean "feature"?']),
        ('missing = "NULL"\n' + GOOD, ["missing = 'NULL'", "a list of texts", 'missing = ["NULL", "?"]']),
        (GOOD + '[roles]\ntimes = "t"', ["my.toml, [roles]", "unknown role 'times'", 'did you mean "time"?']),
        ('group = "u"\n' + GOOD, ["unknown block 'group'", "1. write it below a line [roles]: group = "]),
        ('positive = "yes"\n' + GOOD, ["unknown block 'positive'", "1. write it below the [[label]]"]),
        (GOOD + '[[roles]]\ntime = "t"', ["[roles]", "in single brackets"]),
        (GOOD + "[roles]\ntime = 3", ["[roles], key 'time'", "text in quotes", "3 (int)"]),
        (GOOD + '[[table]]\nname = "v"', ["my.toml, schema, tables", "'v' is used by none"]),
        (GOOD + '[[table]]\nname = "u"\nencoding = "hashing"', ["my.toml, table 'u'", "num_rows"]),
        (GOOD + GOOD, ["my.toml, schema, features", "['u'] more than once"]),
        (GOOD + "[[label]]\nname = like", ["valid TOML", "line 5", "text needs quotes"]),
        ("items = 3\n" + GOOD, ["my.toml", "one block that opens with [items]", "items = 3"]),
        (GOOD + "[items]\nfeatures = []", ["my.toml, [items]", "without 'id'"]),
        (GOOD + '[items]\nid = "u"\nfeature = ["u"]', ["[items]", "unknown key 'feature'", 'did you mean "features"?']),
        (GOOD + '[items]\nid = "u"\nrepeats = "alow"', ["[items]", "repeats", "allow"]),
        (GOOD + '[items]\nid = "v"', ["my.toml, schema, items", "'v'"]),
        (GOOD + '[items]\nid = "u"\nfeatures = ["w"]', ["schema, items", "names of features: u", "'w'"]),
        (GOOD + '[items]\nid = "u"\nfeatures = ["u", "u"]', ["schema, items", "once"]),
        (GOOD.replace("categorical", "multi_hot") + '[items]\nid = "u"', ["one id for each item", "multi_hot"]),
        ("", ["at least one feature", "data inspect"]),
    ],
)
def test_mistakes_are_named(text: str, parts: list[str]):
    with pytest.raises(SchemaError) as raised:
        schema_from_toml(text, "my.toml")
    for part in parts:
        assert part in str(raised.value)


def test_missing_file_and_binary_file_are_named(tmp_path):
    with pytest.raises(MissingFileError, match="data inspect"):
        read_schema(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SchemaError, match=r"bytes\.toml"):
        read_schema(tmp_path / "bytes.toml")
    with pytest.raises(SchemaError, match="text file"):
        read_schema(tmp_path)


def test_import_needs_no_heavy_library():
    code = (
        "import sys, ziggurat.features.schema_io\n"
        "heavy = {'torch', 'polars', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (f'[[feature]]\nname = "u"\nkind = "{kind}"\n{line}', line.split(" ")[0])
        for kind, line in (
            ("vector", "dim = 0"),
            ("vector", "dim = -1"),
            ("vector", "dim = 1000000000000000"),
            ("sequence", "max_length = -1"),
            ("multi_hot", "max_length = 0"),
            ("dense", "num_buckets = 1000000000000"),
            ("dense", "missing = 1e300"),
            ("dense", "missing = nan"),
            ("dense", "missing = inf"),
        )
    ]
    + [
        (GOOD + '[[label]]\nname = "l"\npositive_from = nan', "positive_from"),
        (GOOD + '[[label]]\nname = "l"\ntask = "regression"\npositive_from = 4.0', "positive_from = 4"),
        (GOOD + '[[table]]\nname = "u"\nembedding_dim = 1000000000000', "embedding_dim"),
        (GOOD + '[[table]]\nname = "u"\nencoding = "hashing"\nnum_rows = 10000000000000000', "num_rows"),
        ("a = " + "[" * 100_000, "64 deep"),
        ("a = " + "1" * 5_000, "digits"),
        ("version = 2\n" + GOOD, "version 2: a newer Ziggurat"),
        (GOOD.replace('"u"', '"row:"'), "our own columns"),
        (GOOD.replace('"u"', '"label:click"'), "our own columns"),
        (GOOD.replace('"u"', '"group:"'), "our own columns"),
        (GOOD.replace('"u"', '"weight:"'), "our own columns"),
    ],
)
def test_values_that_no_machine_holds_are_refused(text: str, part: str):
    with pytest.raises(SchemaError) as raised:
        schema_from_toml(text, "my.toml")
    assert part in str(raised.value)
    assert raised.value.where.startswith("my.toml")


def test_a_schema_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", tmp_path / "pipe"):
        with pytest.raises(SchemaError, match="regular file"):
            read_schema(path)


def test_a_schema_of_many_columns_takes_seconds():
    features = tuple(Categorical(name=f"c{index}") for index in range(20_000))
    begin = time.process_time()
    schema = Schema(features=features, tables=tuple(Table(name=f"c{index}") for index in range(20_000)))
    assert [schema.table(f"c{index}").name for index in range(20_000)][-1] == "c19999"
    assert time.process_time() - begin < 5.0  # was 30 s and more: every name was compared with every other


def test_settings_that_a_schema_does_not_have_are_refused_with_a_way_to_have_them():
    plain = schema_from_toml('[[feature]]\nname = "user"\nkind = "categorical"\n', "my.toml")
    with pytest.raises(SchemaError, match=r"no \[events\]"):
        _ = plain.event_settings
    with pytest.raises(SchemaError, match=r"no \[items\]"):
        _ = plain.item_settings
    described = replace(plain, items=Items(id="user", features=("user",)))
    assert described.item_settings.id == "user"
