"""The commands of a user on a GPU: train, resume, evaluate, predict, export and recommend, from one file to lists.

Needs polars, rich, matplotlib and tomlkit, which a machine with torch and little else lacks: skipped there, with the
reason.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.gpu.test_training_on_cuda import on_a_gpu

SCHEMA = """
[[feature]]
name = "user"
kind = "categorical"

[[feature]]
name = "hour"
kind = "dense"

[[feature]]
name = "item"
kind = "categorical"

[[feature]]
name = "kind"
kind = "categorical"

[[label]]
name = "click"

[roles]
group = "user"
time = "t"

[items]
id = "item"
features = ["item", "kind"]
"""
SMALL = ["--model.user.hidden.hidden-dims", "16", "--model.item.hidden.hidden-dims", "16", "--model.output-dim", "8"]
SMALL += ["--model.negatives-block", "64", "--patience", "0"]

# What commands need beside torch: readers of files, tables on a terminal, pictures of the report, schemas.
NEEDED = ("polars", "rich", "matplotlib", "tomlkit")
LACKING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def write_rows(path: Path, *, num_rows: int) -> None:
    """Write users who take items of one kind in three."""
    rng = np.random.default_rng(5)
    user = rng.integers(0, 80, num_rows)
    item = rng.integers(0, 20, num_rows) * 3 + user % 3
    columns = {
        "user": user,
        "item": [f"i{number}" for number in item],
        "kind": item % 3,
        "t": np.arange(num_rows),
        "hour": rng.random(num_rows),
        "click": rng.integers(0, 4, num_rows) > 0,
    }
    pq.write_table(pa.table(columns), path)


@pytest.mark.skipif(bool(LACKING), reason=f"no package {', '.join(LACKING)}")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
def test_a_user_trains_scores_and_recommends(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ziggurat.cli.main import main

    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.parquet", num_rows=1500)
    Path("my.toml").write_text(SCHEMA)
    data = ["--data.train", "rows.parquet", "--schema", "my.toml", "--device", device]
    begin = ["train", "table_two_tower", *data, *SMALL, "--batch-size", "128", "--epochs", "1", "--out", "run"]
    assert main(begin) == 0
    assert json.loads(Path("run/config.json").read_text())["device"] == device
    resume = ["train", "run", "--resume", "--training.epochs", "2", "--device", device]
    assert main(resume) == 0
    assert (tmp_path / "run" / "report.html").is_file()
    assert main(["evaluate", "run", "--split", "test", "--json", "test.json"]) == 0
    metrics = json.loads(Path("test.json").read_text())["metrics"]
    written = json.loads(Path("run/evaluations/test.json").read_text())["metrics"]
    # One table is scored on both sides; batches of other sizes round otherwise.
    assert metrics["full_recall@50"] == pytest.approx(written["full_recall@50"], abs=0.02)
    assert main(["predict", "run", "rows.parquet", "--out", "scores.parquet"]) == 0
    assert pq.read_table("scores.parquet").num_rows == 1500
    assert main(["export", "run", "--out", "export"]) == 0
    pq.write_table(pa.table({"user": np.arange(5), "hour": np.full(5, 0.5)}), "users.parquet")
    assert main(["recommend", "export", "users.parquet", "--k", "5", "--out", "lists.parquet"]) == 0
    lists = pq.read_table("lists.parquet").to_pylist()
    assert len(lists) == 5
    assert all(len(line["items"]) == 5 for line in lists)
