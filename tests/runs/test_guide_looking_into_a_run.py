"""The guide "Looking into a run": its Python code runs as it stands, on a smaller table; trackers are stood in for."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import ziggurat

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SCHEMA = ziggurat.Schema(
    features=(
        ziggurat.Categorical(name="user_id"),
        ziggurat.Categorical(name="item_id"),
        ziggurat.Categorical(name="hour"),
        ziggurat.Dense(name="price"),
        ziggurat.MultiHot(name="tags", separator="|"),
    ),
    labels=(ziggurat.Label(name="click"),),
    time="event_time",
)


def blocks(guide: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (GUIDES / guide).read_text(), re.S | re.M)


def test_the_code_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    sent: dict[str, list[Any]] = {"wandb": [], "mlflow": []}
    run = types.SimpleNamespace(
        log=lambda values, step: sent["wandb"].append((step, values)),
        summary=types.SimpleNamespace(update=sent["wandb"].append),
        finish=lambda: sent["wandb"].append("finished"),
    )
    wandb = types.SimpleNamespace(init=lambda **settings: sent["wandb"].append(settings) or run)
    mlflow = types.SimpleNamespace(
        start_run=lambda **settings: sent["mlflow"].append(settings),
        log_metrics=lambda values, step: sent["mlflow"].append((step, values)),
        end_run=lambda: sent["mlflow"].append("ended"),
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # pyright: ignore[reportArgumentType]
    make_shop = next(block for block in blocks("bring-your-own-data.md") if "make_shop.py" in block)
    exec(compile(make_shop.replace("100_000", "2_000"), "make_shop.py", "exec"), {})
    ziggurat.write_schema(SCHEMA, "my.toml")

    importance, callbacks, trackers = blocks("looking-into-a-run.md")
    names: dict[str, Any] = {}
    exec(compile(callbacks, "callbacks", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    best = names["result"].fit
    assert shown[-1] == f"best step {best.best_step} of {best.steps}"
    assert f"step {best.best_step}: {best.best_value:.5f}" in shown
    exec(compile(trackers, "trackers", "exec"), names)
    assert sent["wandb"][0] == {"project": "shop", "name": "dlrm"}
    assert sent["mlflow"][0] == {"run_name": "dlrm"}
    assert "valid/auc" in dict(sent["wandb"][1:-2])[best.steps]
    assert sent["wandb"][-1], sent["mlflow"][-1] == ("finished", "ended")

    Path("runs/followed").rename("runs/shop")
    exec(compile(importance, "importance", "exec"), {})
    shown_text = capsys.readouterr().out
    assert "Importance(auc 0." in shown_text
    assert "what " in shown_text
    assert Path("importance.svg").stat().st_size > 1000
