"""A row format from outside the package: trained, saved, cached, planned, and on ranks equal to one device."""

from __future__ import annotations

import importlib
import math
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ziggurat as zg
from tests.embeddings import test_low_precision as on_tables
from tests.ops.row_formats import test_row_formats as on_rows
from tests.parallel.tables import test_low_precision_tables as on_ranks
from ziggurat.config import from_json, override, to_json
from ziggurat.embeddings import EmbeddingConfig, EmbeddingTables, KernelChoice, TableOptimizer, TableOptimizerKind
from ziggurat.embeddings.storage import LowPrecision, LowPrecisionStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, PlanError
from ziggurat.ops.row_formats import PLAIN, RowFormat
from ziggurat.parallel.parallelize import parallelize
from ziggurat.parallel.tables.sharded_tables import ShardedTables
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.plan import Plan, TablePlacement
from ziggurat.planning.problem import PlanningProblem, TableProfile
from ziggurat.planning.tiers.rungs import TieredTable
from ziggurat.runs.tables.quantisation import QuantisationConfig, quantisation_report
from ziggurat.runs.tables.quantisation_plot import quantisation_figure
from ziggurat.testing.batches import random_batch
from ziggurat.testing.ranks import run_ranks


@pytest.fixture(scope="module")
def log8() -> Iterator[RowFormat]:
    """The format, listed while these tests run: others of this process ask for all that are listed."""
    yield RowFormat.add(importlib.import_module("examples.extensions.log8").LOG8)
    del RowFormat._members["log8"]


@pytest.mark.parametrize("kind", on_tables.RULES)
def test_an_update_is_the_rule_on_decoded_rows_rounded_once(log8: RowFormat, kind: TableOptimizerKind) -> None:
    on_tables.test_an_update_is_the_rule_on_decoded_rows_rounded_once(log8, kind)


def test_a_checkpoint_goes_on_bit_for_bit(log8: RowFormat, tmp_path: Path) -> None:
    on_tables.test_a_checkpoint_goes_on_bit_for_bit_and_fits_tables_in_fp32(log8, tmp_path)


def test_rounding_at_random_is_right_on_average(log8: RowFormat) -> None:
    on_rows.test_rounding_at_random_is_right_on_average(log8)


@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e-3, 1.0, 1e30])
def test_numbers_keep_their_relative_precision(log8: RowFormat, scale: float) -> None:
    draw = torch.Generator().manual_seed(1)
    values = (torch.rand(500, 9, generator=draw) * -12).exp() * torch.randn(500, 9, generator=draw).sign() * scale
    read = log8.decode(log8.encode(values), dim=9)
    if scale < 2.0**-100:
        assert not read.any()
        return
    is_large = values.abs() > values.abs().amax(1, keepdim=True) * 2.0**-15
    assert float(((read - values) / values).abs()[is_large].max()) < 0.046
    words = on_rows.noise_of(500).words(torch.arange(500), step=3)
    at_random = log8.decode(log8.encode(values, words_N=words), dim=9)
    assert float(((at_random - values) / values).abs()[is_large].max()) < 0.091
    for each in (read, at_random):
        assert torch.equal(log8.decode(log8.encode(each), dim=9), each)


def test_rows_that_are_not_finite_read_as_nan(log8: RowFormat) -> None:
    values = torch.tensor([[1.0, math.nan], [math.inf, 0.0], [0.0, -0.0]])
    read = log8.decode(log8.encode(values), dim=2)
    assert bool(read[:2].isnan().all())
    assert not read[2].any()


def test_every_kernel_of_this_machine_takes_it(log8: RowFormat) -> None:
    """Compiled code does not know it, so torch decodes rows for each; nobody reads bytes as another format's."""
    results = []
    for choice in (KernelChoice.TORCH, KernelChoice.CPP):
        on_rows_of = EmbeddingConfig(dim=16, kernel=choice, optimizer=TableOptimizerKind.SGD)
        made = TablesConfig(weights=log8).make_storage(seed=7)
        tables = EmbeddingTables(on_tables.MIXED, on_rows_of, seed=5, make_storage=made)
        results.append(on_tables.train(tables, TableOptimizer(tables), steps=range(1))[0])
    assert torch.allclose(*results, atol=1e-6)


def test_a_cache_in_front_keeps_hot_rows_exact(log8: RowFormat) -> None:
    config = EmbeddingConfig(dim=16, kernel=KernelChoice.TORCH)
    cached, exact = (
        EmbeddingTables(on_tables.MIXED, config, seed=5, make_storage=TablesConfig(**each).make_storage(seed=7))
        for each in ({"weights": log8, "cache": 0.9}, {})
    )
    for tables in (cached, exact):
        on_tables.train(tables, TableOptimizer(tables))
    assert torch.equal(cached.table("user"), exact.table("user"))


def test_settings_and_planners_take_it(log8: RowFormat) -> None:
    config = override(TablesConfig(), {"weights": "log8", "by-table": "item=int8"})
    assert config.weights is log8
    assert from_json(TablesConfig, to_json(config), where="test") == config
    assert to_json(config)["weights"] == "log8"
    assert pickle.loads(pickle.dumps(config)) == config
    assert log8 not in PLAIN.less_precise(), "nobody chooses it who was not asked"
    table = TieredTable(name="user", num_rows=1000, dim=16, fixed=log8)
    (rung,) = table.rungs((PLAIN,), cache_share=0.0)
    assert (rung.text, table.num_bytes(rung)) == ("log8", 1000 * (20 + 4))
    profile = TableProfile(name="user", num_rows=1000, dim=16, row_format=log8)
    problem = PlanningProblem(tables=(profile,), num_devices=4, memory_bytes=(1 << 20,), placements=(*Placement,))
    assert problem.tables[0].bytes_of(num_rows=1000, dim=16) < 1000 * (20 + 64)


def test_an_export_and_its_quantisation_report_take_it(log8: RowFormat, shop: Any, tmp_path: Path) -> None:
    config = zg.ExportConfig(tables=log8, parity_rows=300, golden=2, program=False, allow=True)
    zg.export_run(shop.ranker, out=tmp_path / "export", config=config)
    ranker = zg.Recommender.load(tmp_path / "export").chain.ranker
    assert ranker is not None
    kept = ranker.packed.model.embeddings.tables
    assert {kept.storage(place.storage).row_format for place in kept.places.values()} == {log8}
    rounded = zg.load_run(shop.ranker, tables=TablesConfig(weights=log8)).model.embeddings
    assert all(torch.equal(rounded.table(name), kept.view(name)) for name in kept.places)
    report = quantisation_report(shop.ranker, config=QuantisationConfig(formats=(log8,)))
    assert [each.row_format for each in report.tried] == ["log8"]
    assert report.tried[0].weight_bytes < report.run.weight_bytes
    assert quantisation_figure(report, title="log8").axes


def check(rank: int, plan_json: dict[str, object]) -> None:
    """Runs on every rank, whose process has to import the format before it reads settings: the bits of one device."""
    log8 = importlib.import_module("examples.extensions.log8").LOG8
    plan = from_json(Plan, plan_json, where="test")
    adagrad = TableOptimizerKind.ROWWISE_ADAGRAD
    single, many = (on_ranks.build(log8, adagrad, {}) for _ in range(2))
    is_cut = any(entry.placement.cuts_columns for entry in plan.tables)
    if is_cut:
        with pytest.raises(PlanError, match="keeps rows whole, for rows in log8"):
            parallelize(many, plan, Topology.create())
        return
    parallel = parallelize(many, plan, Topology.create())
    optimizers = [TableOptimizer(single.embeddings), parallel.table_optimizer(many)]
    share = 12 // plan.world_size
    mine = slice(share * rank, share * (rank + 1))
    batch = random_batch(on_ranks.INPUTS, 12, seed=1)
    for step in range(3):
        wanted = single.fields(batch)
        found = many.fields(batch.rows(mine.start, mine.stop))
        assert torch.allclose(found, wanted[mine], atol=1e-6)
        # Gradients are eighths, so that sums have the same bits in any order.
        factors = torch.randint(-4, 5, wanted.shape, generator=torch.Generator().manual_seed(step)) / 8
        (wanted * factors).sum().backward()
        (found * factors[mine]).sum().backward()
        for each in optimizers:
            each.step(0.05)
        tables = many.embeddings.tables
        assert isinstance(tables, ShardedTables)
        for shard in (shard for group in tables.mine.groups for shard in group.shards):
            whole = single.embeddings.tables.view(shard.table)[shard.rows, shard.columns]
            assert torch.equal(tables.part(shard), whole), (shard, step)


def plan_of(**placements: str) -> dict[str, object]:
    """All tables on four ranks, unless they lie whole on one."""
    tables = []
    for name in on_ranks.ROWS:
        kind = Placement(placements.get(name, "row_wise"))
        tables.append(TablePlacement(table=name, placement=kind, ranks=(2,) if kind.fits_one_rank else (0, 1, 2, 3)))
    return to_json(Plan(world_size=4, tables=tuple(tables)))


@pytest.mark.parametrize("user", ["row_wise", "column_wise"])
def test_four_ranks_round_as_one_device_does(user: str, log8: RowFormat) -> None:
    del log8
    run_ranks(check, 4, plan_of(user=user, item="table_wise", shop="data_parallel"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("width", r"\(4, 11\) of torch.uint8"),
        ("padding", "zeros for a row of zeros"),
        ("drift", "written back"),
        ("neighbours", "does not depend on others"),
        ("columns", "keeps_rows_whole = True"),
        ("exact", "rounds = True"),
    ],
)
def test_a_format_that_breaks_a_promise_is_refused(damage: str, message: str, log8: RowFormat) -> None:
    class Damaged(type(log8)):
        name = "damaged"
        keeps_rows_whole = damage != "columns"
        rounds = damage != "exact"

        def width(self, dim: int) -> int:
            return super().width(dim) - (damage == "width")

        def encode(self, values_ND: torch.Tensor, *, words_N: torch.Tensor | None = None) -> torch.Tensor:
            if damage == "neighbours":
                values_ND = values_ND if len(values_ND) > 1 else 2 * values_ND
            return super().encode(values_ND, words_N=words_N)

        def decode(self, rows_NW: torch.Tensor, *, dim: int) -> torch.Tensor:
            read = super().decode(rows_NW, dim=dim)
            return read + (damage == "padding") if damage != "drift" else read * 1.5

    with pytest.raises(ConfigError, match=message):
        LowPrecision(row_format=Damaged())(10, 8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("encode raises", r"KeyError: 'lost'(.|\n)*Late\.encode_trained, at .*test_row_format\.py:\d+"),
        ("encode repeats", r"expected: \(7, 12\) of torch\.uint8\nfound: *\(1, 12\)"),
        ("encode converts", r"found: *\(7, 12\) of torch\.float32(.|\n)*Late\.encode_trained"),
        ("decode raises", r"KeyError: 'lost'(.|\n)*Late\.decode, at"),
        ("decode repeats", r"expected: \(7, 8\) of torch\.float32\nfound: *\(1, 8\)(.|\n)*Late\.decode"),
    ],
)
def test_a_format_that_breaks_a_promise_later_is_refused(damage: str, message: str, log8: RowFormat) -> None:
    class Late(type(log8)):
        name = "late"

        def encode(self, values_ND: torch.Tensor, *, words_N: torch.Tensor | None = None) -> torch.Tensor:
            rows = super().encode(values_ND, words_N=words_N)
            if len(rows) == 7 and damage == "encode raises":
                raise KeyError("lost")
            if len(rows) == 7 and damage == "encode repeats":
                return rows[:1]
            return rows.float() if len(rows) == 7 and damage == "encode converts" else rows

        def decode(self, rows_NW: torch.Tensor, *, dim: int) -> torch.Tensor:
            read = super().decode(rows_NW, dim=dim)
            if len(read) == 7 and damage == "decode raises":
                raise KeyError("lost")
            return read[:1] if len(read) == 7 and damage == "decode repeats" else read

    storage = LowPrecision(row_format=Late())(10, 8)
    storage.write(0, torch.zeros(10, 8))
    act = storage.write if damage.startswith("encode") else storage.looked_up
    given = (0, torch.ones(7, 8)) if damage.startswith("encode") else (torch.arange(7),)
    with pytest.raises(ConfigError, match=message):
        act(*given)
    assert not storage.looked_up(torch.arange(5)).any()


def test_the_format_itself_keeps_its_promises(log8: RowFormat) -> None:
    assert isinstance(LowPrecision(row_format=log8)(10, 8), LowPrecisionStorage)


def test_the_format_of_the_guide_keeps_its_promises() -> None:
    guide = Path("docs/guides/extending.md").read_text()
    (code,) = (each for each in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "RowFormat" in each)
    known = dict(RowFormat._members)
    written: dict[str, object] = {}
    try:
        exec(code, written)
        LowPrecision(row_format=RowFormat("tenths"))(10, 8)
    finally:
        RowFormat._members.clear()
        RowFormat._members.update(known)
