"""Balanced runs: the numbers of one device, every row once, resumed bit for bit; what cannot work is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.rank_runs import Case, stored, trainer_of
from tests.training.test_many_ranks import close, log, run
from tests.training.tiny import tiny_dataset
from ziggurat.data.balance.partition import Balance
from ziggurat.data.encoded.ledger import read_ledger
from ziggurat.errors import ConfigError
from ziggurat.parallel.dense import DenseParallelism
from ziggurat.placements import Placement
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Compile
from ziggurat.training.report.page import write_report

COST = ("tags", "2*tags^2")
CASES = [
    (2, Case(), {"balance": Balance.VARIABLE, "balance_cost": COST, "balance_shares": (1.0, 3.0)}),
    pytest.param(2, Case(towers=True, tower_size=1, num_parts=2), {"balance": Balance.ZIGZAG}, marks=pytest.mark.slow),
    pytest.param(
        4,
        Case(placement=Placement.ROW_WISE, towers=True, tower_size=2, dense=DenseParallelism.HSDP),
        {"balance": Balance.KARMARKAR_KARP},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("world_size", "case", "changes"), CASES)
def test_balanced_ranks_train_as_one_device(
    tmp_path: Path, world_size: int, case: Case, changes: dict[str, Any]
) -> None:
    run(1, case, tmp_path / "one", max_steps=9)  # in the middle of an epoch: what was dealt ahead is not trained
    run(world_size, case, tmp_path / "many", max_steps=9, **changes)
    left, right = ([line for line in log(tmp_path / name) if line["kind"] == "train"] for name in ("one", "many"))
    assert [line["rows"] for line in left] == [line["rows"] for line in right]
    np.testing.assert_allclose([line["loss"] for line in left], [line["loss"] for line in right], rtol=1e-4)
    close(stored(tmp_path / "many", 9), stored(tmp_path / "one", 9), 2e-4)
    one, many = read_ledger(tmp_path / "one/ledger.bin"), read_ledger(tmp_path / "many/ledger.bin")
    for column in ("epoch", "num_rows", "step", "sum"):
        np.testing.assert_array_equal(many[column], one[column], err_msg=column)
    lines = (tmp_path / "many/metrics.jsonl").read_text().splitlines()
    timing = [json.loads(line)["timing"] for line in lines if '"train"' in line][-1]
    assert len(timing["busy_s"]) == world_size
    assert all(value > 0 for value in timing["busy_s"])
    assert 0 <= timing["straggler_share"] < 1
    if changes["balance"] is Balance.KARMARKAR_KARP:
        assert timing["planned_straggler_share"] < timing["unbalanced_straggler_share"] / 2
    text = write_report(tmp_path / "many").read_text()
    assert "<h2>Stragglers</h2>" in text
    assert "as dealt" in text


@pytest.mark.slow
def test_resumed_run_deals_as_before(tmp_path: Path) -> None:
    """Stopped in the middle of an epoch, while batches for later steps are on their way."""
    case, changes = Case(dropout=0.2), {"balance": Balance.VARIABLE}
    run(2, case, tmp_path / "whole", **changes)
    run(2, case, tmp_path / "parts", max_steps=4, **changes)
    run(2, case, tmp_path / "parts", resume=True, **changes)
    wanted, found = stored(tmp_path / "whole"), stored(tmp_path / "parts")
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert (tmp_path / "whole/ledger.bin").read_bytes() == (tmp_path / "parts/ledger.bin").read_bytes()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"balance": Balance.ZIGZAG}, "one device"),
        ({"balance_cost": COST}, "none"),
        ({"balance_shares": (1.0,)}, "none"),
        ({"token_budget": 9, "compile": Compile.DEFAULT}, "compile default"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        trainer_of(Case(), tmp_path, world_size=1, **changes)


def refusals(rank: int, folder: str) -> list[str]:
    """What ranks say of settings that have no effect on them."""
    del rank
    said = []
    for changes in (
        {"balance": Balance.ZIGZAG, "balance_shares": (1.0, 1.0)},
        {"token_budget": 100},
        {"balance": Balance.ZIGZAG, "balance_cost": ("3",)},
    ):
        with pytest.raises(ConfigError) as error:
            trainer_of(Case(), folder, world_size=2, **changes)
        said.append(error.value.found)
    return said


def test_ranks_refuse_what_has_no_effect(tmp_path: Path) -> None:
    for shares, budget, constant in run_ranks(refusals, 2, str(tmp_path / "run")):
        assert shares == "2 for zigzag"
        assert budget == "2 ranks"
        assert "every sample" in constant


def test_token_budget_trains_every_row_and_resumes(tmp_path: Path) -> None:
    whole = run(1, Case(), tmp_path / "whole", token_budget=40)
    run(1, Case(), tmp_path / "parts", token_budget=40, max_steps=7)
    assert run(1, Case(), tmp_path / "parts", resume=True, token_budget=40) == whole
    ledger = (tmp_path / "whole/ledger.bin").read_bytes()
    assert ledger == (tmp_path / "parts/ledger.bin").read_bytes()
    records = read_ledger(tmp_path / "whole/ledger.bin")
    dataset = tiny_dataset(64 * 6 + 13)
    first = records[records["epoch"] == 0]
    assert first["num_rows"].sum() == dataset.num_rows
    assert len(set(first["num_rows"].tolist())) > 2, "as many rows as fit"
