"""S, d and the factor of columns that repeat within sessions."""

import numpy as np
import polars as pl
import pytest

from ziggurat.cli.main import main
from ziggurat.data.inspect.inspect_file import inspect_file
from ziggurat.data.inspect.session_repeats import repeats_of
from ziggurat.features.schema_io import read_schema


def test_the_factor_is_that_of_the_formula(tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    session = np.repeat(np.arange(500), 16)
    changes = (rng.random(len(session)) > 0.9) | (np.arange(len(session)) % 16 == 0)
    version = np.cumsum(changes)
    order = rng.permutation(len(session))
    frame = pl.DataFrame(
        {
            "session": session,
            "history": [[int(each), 1] for each in version],
            "price": rng.normal(size=len(session)),
            "user": session // 2,
        }
    )
    found = repeats_of(frame, session="session")
    by_name = {each.column: each for each in found.columns}
    assert (found.num_sessions, found.rows_per_session, found.adjacent) == (500, 16.0, 1.0)
    history = by_name["history"]
    assert history.unchanged == pytest.approx(0.9, abs=0.01)
    assert history.factor == pytest.approx(1 / (1 - history.unchanged * 15 / 16), rel=1e-9)
    assert history.factor == pytest.approx(len(session) / version[-1])
    assert (by_name["price"].factor, by_name["user"].factor) == (1.0, 16.0)
    frame[order].write_parquet(tmp_path / "log.parquet")
    assert main(["data", "inspect", str(tmp_path / "log.parquet"), "--session", "session"]) == 0
    told = capsys.readouterr().out
    assert "S = 16.00 rows each" in told
    assert "deduplicate: shuffle = session_lanes does it" in told
    assert "cluster-by-session" in told
    out = str(tmp_path / "out.parquet")
    command = ["data", "cluster-by-session", str(tmp_path / "log.parquet")]
    assert main([*command, "--session", "session", "--out", out]) == 0
    assert "8,000 rows of 500 sessions" in capsys.readouterr().out


def test_rows_without_a_session_and_no_rows() -> None:
    frame = pl.DataFrame({"session": [None, None, 1, 1], "x": [3, 3, 3, 3]})
    found = repeats_of(frame, session="session")
    assert (found.num_sessions, found.columns[0].factor) == (3, pytest.approx(4 / 3))
    assert repeats_of(frame.head(0), session="session").num_rows == 0


def test_a_session_that_is_named_is_a_role_of_the_schema(tmp_path, capsys) -> None:
    frame = pl.DataFrame(
        {"visit": [f"v{row % 40}" for row in range(200)], "tag": [f"t{row % 7}" for row in range(200)]}
    )
    frame.with_columns(label=pl.Series([row % 2 for row in range(200)])).write_csv(tmp_path / "log.csv")
    command = ["data", "inspect", str(tmp_path / "log.csv"), "--label", "label", "--session"]
    assert main([*command, "visit", "--write-schema", str(tmp_path / "my.toml")]) == 0
    schema = read_schema(tmp_path / "my.toml")
    assert schema.session == "visit"
    assert [feature.name for feature in schema.features] == ["tag"]
    assert main([*command, "label"]) != 0
    assert "'label' for both" in capsys.readouterr().err
    assert main([*command, "vist"]) != 0
    told = capsys.readouterr().err
    assert "1. --session visit" in told
    assert "in the schema" not in told


def test_of_many_files_the_one_that_was_read_is_named(tmp_path) -> None:
    for name in ("a.csv", "b.csv"):
        pl.DataFrame({"label": [0, 1] * 20, "tag": ["x", "x", "y", "y"] * 10}).write_csv(tmp_path / name)
    warnings = inspect_file(tmp_path).warnings
    assert any("only a.csv, the first of 2 files" in warning for warning in warnings)
    assert not any("a.csv" in warning for warning in inspect_file(tmp_path / "a.csv").warnings)
