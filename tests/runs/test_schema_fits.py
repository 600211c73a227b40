"""A schema that a model cannot be built for is refused before a file is opened."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import ziggurat as zg
from ziggurat.cli.main import main
from ziggurat.errors import ZigguratError
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.execute import train_run

SCHEMA = zg.Schema(
    features=(zg.Categorical(name="user_id"), zg.Categorical(name="item_id")), labels=(zg.Label(name="click"),)
)


@pytest.mark.parametrize(
    ("recipe", "schema", "expected"),
    [
        ("table_two_tower", SCHEMA, "which features describe the item"),
        ("table_bst", SCHEMA, "histories"),
        ("table_din", SCHEMA, "histories"),
        ("table_dlrm", dataclasses.replace(SCHEMA, labels=()), "at least one label"),
        ("table_dlrm", dataclasses.replace(SCHEMA, features=SCHEMA.features[:1]), "two fields or more"),
    ],
)
def test_the_schema_is_refused_before_files_are_read(
    recipe: str, schema: zg.Schema, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("a file is read")

    monkeypatch.setattr("ziggurat.runs.execute.prepare_run", read)
    config = recipe_named(recipe, schema=schema)
    with pytest.raises(ZigguratError, match=expected):
        train_run(config, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_recipe_beside_the_config_of_another_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from ziggurat.recipes.run_config import run_config_to_json
    from ziggurat.training.records.run_folder import CONFIG

    CONFIG.write(tmp_path / "config.json", run_config_to_json(recipe_named("table_dlrm", schema=SCHEMA)))
    assert main(["train", "table_dcn_v2", "--config", str(tmp_path / "config.json"), "--out", str(tmp_path / "a")]) == 2
    assert "beside --config" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
