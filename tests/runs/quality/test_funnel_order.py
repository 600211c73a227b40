"""Labels that are no funnel, or stand in the wrong order, are said before a funnel learns from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from ziggurat.cli.main import main

LABEL = """
[[feature]]
name = "user"
kind = "categorical"
"""


def run(folder: Path, labels: tuple[str, str], recipe: str, *flags: str) -> None:
    schema = LABEL + "".join(f'[[label]]\nname = "{name}"\n' for name in labels)
    (folder / "my.toml").write_text(schema)
    given = ["train", recipe, "--data.train", str(folder / "shown.parquet"), "--schema", str(folder / "my.toml")]
    given += ["--out", str(folder / "-".join((recipe, *labels))), "--training.max-steps", "2", "--threads", "1", *flags]
    assert main(given) == 0


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    clicked = rng.random(600) < 0.5
    bought = clicked & (rng.random(600) < 0.4)
    bought |= rng.random(600) < 0.004  # later, by another way
    married = rng.random(600) < 0.5
    columns = {"user": rng.integers(0, 9, 600), "clicked": clicked, "bought": bought, "married": married}
    pl.DataFrame(columns).with_columns(pl.col(pl.Boolean).cast(pl.Int8)).write_parquet(tmp_path / "shown.parquet")
    return tmp_path


@pytest.mark.parametrize(
    ("labels", "recipe", "flags", "is_said"),
    [
        (("clicked", "bought"), "table_esmm", (), False),
        (("bought", "clicked"), "table_esmm", (), True),
        (("clicked", "married"), "table_mmoe", ("--model.funnel", "true"), True),
        (("clicked", "married"), "table_mmoe", (), False),
    ],
    ids=["in order", "turned", "no funnel", "no funnel asked for"],
)
def test_labels_that_are_no_funnel_are_said(
    shown: Path,
    capsys: pytest.CaptureFixture[str],
    labels: tuple[str, str],
    recipe: str,
    flags: tuple[str, ...],
    is_said: bool,
) -> None:
    run(shown, labels, recipe, *flags)
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert (f"rows with '{labels[1]}' have no '{labels[0]}'" in said) == is_said
