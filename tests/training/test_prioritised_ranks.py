"""A trainer that looks ahead ends with the checkpoints of one that does not, evaluations and a resume in between."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from tests.training.rank_runs import Case, stored, trainer_of
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.ops.row_cache import CachePolicy
from ziggurat.ops.row_formats import RowFormat
from ziggurat.parallel.prioritised.choice import Exchange
from ziggurat.placements import Placement
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.records.log import read_records
from ziggurat.training.report.exchange import exchange_section

OFTEN = {"checkpoint_every": 3, "evaluate_every": 5, "clip_norm": 0.0}


TABLES = {
    "rows in memory": TablesConfig(),
    "a cache of hot rows": TablesConfig(weights=RowFormat.INT4, cache=0.2, cache_policy=CachePolicy.LFU),
}


def train_all(rank: int, folder: str, tables: TablesConfig) -> list[dict[str, float]]:
    """Train with both exchanges, the prioritised one in two runs; metrics of each."""
    del rank
    case, found = Case(placement=Placement.ROW_WISE, tables=tables), []
    for exchange in (Exchange.PLAIN, Exchange.PRIORITISED_ALWAYS):
        chosen = dataclasses.replace(case, exchange=exchange)
        path = Path(folder) / exchange.value
        if exchange is Exchange.PRIORITISED_ALWAYS:
            trainer_of(chosen, path, world_size=2, **OFTEN, max_steps=4).fit()
        trainer = trainer_of(chosen, path, world_size=2, **OFTEN)
        trainer.fit(resume=path.exists())
        found.append(trainer.evaluate(trainer.valid).metrics)
    return found


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES.keys())
def test_trainers_end_alike_whatever_the_exchange(tmp_path: Path, tables: TablesConfig):
    for metrics in run_ranks(train_all, 2, str(tmp_path), tables):
        assert metrics[0] == metrics[1]
    plain, ahead = (tmp_path / each.value for each in (Exchange.PLAIN, Exchange.PRIORITISED_ALWAYS))
    for step in (6, 12):
        wanted, found = stored(plain, step), stored(ahead, step)
        assert wanted.keys() == found.keys()
        assert not [name for name in wanted if not np.array_equal(wanted[name], found[name])], step
    records = list(read_records(ahead / "metrics.jsonl"))
    told = [each["timing"] for each in records if each["kind"] == "train"]
    assert all(0.0 < each["collisions"] <= 1.0 and each["exposed_ms"] > 0.0 for each in told[1:5])
    assert "prioritised, as asked for" in exchange_section(records)
    assert exchange_section(list(read_records(plain / "metrics.jsonl"))) == ""
