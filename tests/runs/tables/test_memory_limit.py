"""A run whose tables get their formats from a limit of memory: what is chosen, written down, repeated and refused."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.runs.test_low_precision_runs import config_of
from ziggurat.config import override
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.embeddings.storage import MemoryStorage, maker_of
from ziggurat.embeddings.storage.disk import DiskStorage, most_waiting
from ziggurat.embeddings.storage.host import HostStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError
from ziggurat.features.growing import Growing
from ziggurat.features.inputs import InputSpec, JaggedSpec, SingleSpec, TableSpec
from ziggurat.ops.growing.state import map_bytes
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.machine.memory import size_of_text
from ziggurat.ops.row_cache import CachePolicy
from ziggurat.ops.row_formats import Rounding, RowFormat
from ziggurat.planning.tiers.rungs import Rung
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.runs.execute import train_run
from ziggurat.runs.load import load_run
from ziggurat.runs.tables.memory_limit import tier_problem, with_rungs
from ziggurat.training.records.run_folder import STARTUP, RunFolder

INPUTS = InputSpec(
    single=(SingleSpec(name="user", table="user"),),
    jagged=(JaggedSpec(name="tags", table="tag"),),
    tables=(TableSpec(name="user", num_rows=100_000), TableSpec(name="tag", num_rows=2_000, embedding_dim=64)),
)


def rows_of(count: int = 400, *, inputs: InputSpec = INPUTS) -> MemoryDataset:
    generator = np.random.default_rng(0)
    columns = {
        "user": pa.array(generator.integers(3, 100_000, count).astype(np.int32)),
        "tags": pa.array([[3 + index % 50, 60] for index in range(count)], type=pa.list_(pa.int32())),
    }
    return MemoryDataset(pa.table(columns), inputs)


def limited(limit: str, **tables: object) -> RunConfig:
    config = config_of("fp32")
    return dataclasses.replace(config, tables=TablesConfig(memory_limit=limit, **tables))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("2_000", 2_000),
        ("7 k", 7_000),
        ("1tib", 1 << 40),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert size_of_text(text, where="--limit") == size


@pytest.mark.parametrize("text", ["much", "", "-1GiB", "4 GiBs", "0", "i", "4i", "GiB", "1e3"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="4GiB"):
        size_of_text(text, where="--limit")


def test_formats_follow_the_limit() -> None:
    whole = 100_000 * 68 + 2_000 * 260
    config, lines = with_rungs(limited(f"{whole}"), rows_of(), list_lengths={"tags": 5.0})
    assert config.tables.by_table == {"user": RowFormat.FP32, "tag": RowFormat.FP32}
    assert lines["why"].startswith("all tables fit in FP32")
    config, lines = with_rungs(limited("4.2 MB"), rows_of(), list_lengths={"tags": 5.0})
    assert config.tables.by_table == {"user": RowFormat.BF16, "tag": RowFormat.FP32}
    assert config.tables.cache == 0.01
    assert "bf16 + cache of 1 %: 4 MiB, in FP32 6 MiB; 100,000 rows × 16, 1 lookups a sample" in lines["user"]
    assert lines["1 in FP32"] == "508 KiB"
    again, _ = with_rungs(config, rows_of(), list_lengths={})
    assert again.tables == config.tables


def test_formats_that_are_named_stay() -> None:
    config, lines = with_rungs(limited("4.2 MB", by_table={"tag": RowFormat.INT4}), rows_of(), list_lengths={})
    assert config.tables.by_table == {"user": RowFormat.BF16, "tag": RowFormat.INT4}
    assert lines["tag"].startswith("int4 + cache of 5 %, as --tables.by-table asks")
    config, _ = with_rungs(limited("4 MB", weights=RowFormat.INT8), rows_of(), list_lengths={})
    assert set(config.tables.by_table.values()) == {RowFormat.INT8}


def test_a_cache_that_is_named_counts_and_hits() -> None:
    asked = limited("4.2 MB", weights=RowFormat.INT8, cache=0.2)
    config, lines = with_rungs(asked, rows_of(), list_lengths={"tags": 2.0})
    assert (config.tables.cache, config.tables.by_table["user"]) == (0.2, RowFormat.INT8)
    assert re.search(r"int8 \+ cache of 20 %: \d+ KiB.*, 99% of the rows of a step in the cache", lines["tag"])
    with pytest.raises(ConfigError, match=r"int8 \+ cache of 20 %, as --tables.by-table asks: 4 MiB"):
        with_rungs(dataclasses.replace(asked, tables=dataclasses.replace(asked.tables, memory_limit="3.2 MB",
                   by_table={"user": RowFormat.INT8})), rows_of(), list_lengths={})  # fmt: skip


def test_a_cache_that_is_named_stays_where_everything_would_fit_in_fp32() -> None:
    config, _ = with_rungs(limited("1GiB", weights=RowFormat.INT8, cache=0.2), rows_of(), list_lengths={})
    assert (config.tables.cache, config.tables.by_table["user"]) == (0.2, RowFormat.INT8)


def test_counts_of_a_cache_that_counts_are_part_of_the_limit() -> None:
    with pytest.raises(ConfigError, match=r"table 'user' as int4 \+ cache of 20 %: 3 MiB"):
        with_rungs(
            limited("3.4 MB", weights=RowFormat.INT4, cache=0.2, cache_policy=CachePolicy.LFU),
            rows_of(),
            list_lengths={},
        )
    config, _ = with_rungs(limited("3.4 MB", weights=RowFormat.INT4, cache=0.2), rows_of(), list_lengths={})
    assert config.tables.cache == 0.2


def test_the_map_of_a_table_that_grows_is_part_of_the_limit() -> None:
    growing = Growing(num_ids=1_997)
    tables = (INPUTS.tables[0], dataclasses.replace(INPUTS.tables[1], growing=growing))
    settings = {"list_lengths": {}, "limit_bytes": 1 << 30}
    grown = tier_problem(limited("1GiB"), dataclasses.replace(INPUTS, tables=tables), **settings)  # type: ignore[arg-type]
    plain = tier_problem(limited("1GiB"), INPUTS, **settings)  # type: ignore[arg-type]
    rung = Rung(row_format=RowFormat.INT4)
    more = [one.num_bytes(rung) - other.num_bytes(rung) for one, other in zip(grown.tables, plain.tables, strict=True)]
    assert more == [0, map_bytes(growing)]


@pytest.mark.parametrize("by_table", [{}, {"user": RowFormat.FP32}])
@pytest.mark.parametrize("limit", ["400", "2 KB", "30 KB"])
def test_a_disk_and_tiny_tables_are_refused_with_a_limit_that_is_accepted(
    limit: str, by_table: dict[str, RowFormat], tmp_path: Path
) -> None:
    def refused(limit: str) -> str:
        try:
            with_rungs(limited(limit, disk=str(tmp_path), by_table=by_table), rows_of(), list_lengths={})
        except ConfigError as error:
            return str(error)
        return ""

    error = refused(limit)
    assert ("400 without a unit means 400 bytes" in error) == (limit == "400")
    named = re.findall(r"a limit of (.*?) or more", error)
    assert [refused(each) for each in named] == ([""] if error else [])
    assert error or limit == "30 KB"


def test_tables_go_to_the_disk_where_few_bits_do_not_fit_or_exact_rows_are_asked_for(tmp_path: Path) -> None:
    exact = {"user": RowFormat.FP32}
    large = dataclasses.replace(INPUTS, tables=(TableSpec(name="user", num_rows=10_000_000), INPUTS.tables[1]))
    for named, limit in (({}, "60 MB"), (exact, "200 MB")):  # INT4 takes 160 MB
        asked = limited(limit, disk=str(tmp_path), by_table=named)
        config, lines = with_rungs(asked, rows_of(inputs=large), list_lengths={"tags": 2.0})
        tables = config.tables
        assert (tables.by_table["user"], tables.is_on_disk("user"), tables.in_memory) == (
            RowFormat.FP32,
            True,
            ("tag",),
        )
        assert re.fullmatch(r"1 of 2 tables, exact: \d+ MiB of rows held, up to 698 MiB of disk; a sample .* samples/s "
                            r"at most \(.* thousand rows/s read.*\)", lines["disk"])  # fmt: skip
        assert re.search(r"disk, [\d.]+ % of the rows held.*of them from the disk", lines["user"])
        made = tables.make_storage(seed=0)
        assert isinstance(maker_of(made, table="tag", dim=64)(8, 64), MemoryStorage)
        storage = maker_of(made, table="user", dim=16)(10_000_000, 16)
        storage.add_state(TableOptimizerKind.ROWWISE_ADAGRAD)
        assert isinstance(storage, DiskStorage)
        waiting = most_waiting(storage.cached.num_bytes, num_storages=1)
        assert (
            0.9 * size_of_text(limit, where="")
            < storage.num_bytes + waiting + 2_000 * 260
            <= size_of_text(limit, where="")
        )
        again, _ = with_rungs(config, rows_of(inputs=large), list_lengths={})
        assert again.tables == tables
    fits, _ = with_rungs(limited("1GiB", disk=str(tmp_path)), rows_of(inputs=large), list_lengths={})
    assert fits.tables.in_memory == ("user", "tag")
    with pytest.raises(ConfigError, match=r"--tables\.memory 1GiB"):
        with_rungs(limited("60MB", disk=str(tmp_path), memory="1GiB"), rows_of(inputs=large), list_lengths={})
    with pytest.raises(ConfigError, match=r"--tables\.disk FOLDER"):
        with_rungs(limited("60MB"), rows_of(inputs=large), list_lengths={})
    with pytest.raises(ConfigError, match=r"'user' as disk, 0.0102 % of the rows held"):
        with_rungs(limited("5MB", disk=str(tmp_path)), rows_of(inputs=large), list_lengths={})


def test_tables_go_to_the_host_where_few_bits_do_not_fit_the_device() -> None:
    large = dataclasses.replace(INPUTS, tables=(TableSpec(name="user", num_rows=10_000_000), INPUTS.tables[1]))
    asked = limited("100 MB", device_memory="auto")
    config, lines = with_rungs(asked, rows_of(inputs=large), list_lengths={"tags": 2.0})
    tables = config.tables
    assert (tables.is_in_host("user"), tables.in_memory) == (True, ("tag",))
    assert re.fullmatch(
        r"1 of 2 tables, exact: \d+ MiB of rows held, 648 MiB of the host's memory; a sample .* samples/s at most "
        r"\([\d.]+ GB/s to the device\)",
        lines["host"],
    )
    assert re.search(r"host, [\d.]+ % of the rows held.*of them from the host", lines["user"])
    storage = maker_of(tables.make_storage(seed=0), table="user", dim=16)(10_000_000, 16)
    assert isinstance(storage, HostStorage)
    storage.add_state(TableOptimizerKind.ROWWISE_ADAGRAD)
    assert 90e6 < storage.held.num_bytes + 2_000 * 260 <= 100e6
    again, _ = with_rungs(config, rows_of(inputs=large), list_lengths={})
    assert again.tables == tables
    fits, _ = with_rungs(limited("1GiB", device_memory="auto"), rows_of(inputs=large), list_lengths={})
    assert (fits.tables.device_memory, fits.tables.in_memory) == ("", ())
    with pytest.raises(ConfigError, match=r"--tables\.device-memory 1GiB"):
        with_rungs(limited("60MB", device_memory="1GiB"), rows_of(inputs=large), list_lengths={})


def test_a_policy_without_a_cache_is_refused_unless_a_limit_may_choose_one() -> None:
    embedding = config_of("fp32").model.embedding
    alone = TablesConfig(weights=RowFormat.INT8, cache_policy=CachePolicy.LFU)
    with pytest.raises(ConfigError, match=r"--tables\.cache-policy lfu and no cache"):
        alone.check(embedding, tables=["user"])
    for more in ({"cache": 0.1}, {"memory_limit": "1GiB"}):
        dataclasses.replace(alone, **more).check(embedding, tables=["user"])  # type: ignore[arg-type]


def test_a_rounding_of_rows_that_round_nothing_is_refused() -> None:
    embedding = config_of("fp32").model.embedding
    exact = TablesConfig(weights=RowFormat.SPLIT_BF16, rounding=Rounding.NEAREST)
    with pytest.raises(ConfigError, match=r"--tables\.rounding nearest with --tables\.weights split_bf16"):
        exact.check(embedding, tables=["user"])
    for more in ({"by_table": {"user": RowFormat.INT8}}, {"memory_limit": "1GiB"}, {"rounding": Rounding.STOCHASTIC}):
        dataclasses.replace(exact, **more).check(embedding, tables=["user"])  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="one process"):
        with_rungs(limited("4GiB"), rows_of(), list_lengths={}, num_ranks=2)
    with pytest.raises(ConfigError, match="on the smallest rungs: table 'user' as int4"):
        with_rungs(limited("1 MB"), rows_of(), list_lengths={})
    dense = override(limited("4GiB"), {"model.embedding.optimizer": "adam_dense"})
    with pytest.raises(ConfigError, match=r"--tables\.memory-limit and adam_dense, .* a gradient for every row"):
        with_rungs(dense, rows_of(), list_lengths={})
    with pytest.raises(ConfigError, match="such as 4GiB"):
        TablesConfig(memory_limit="plenty")
    assert with_rungs(config_of("fp32"), rows_of(), list_lengths={}, num_ranks=2)[1] == {}


@pytest.mark.slow
def test_a_run_keeps_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    config = override(config_of("fp32", epochs=1), {"tables.memory-limit": "2 KB"})
    run = RunFolder(tmp_path / "run")
    train_run(config, folder=run.path)
    stored, section = load_config(run.path).tables, STARTUP.read(run.startup)["Formats of tables"]
    loaded = load_run(run.path).model.embeddings.tables
    assert {name: size.row_format for name, size in loaded.sizes.items()} == stored.by_table
    assert set(stored.by_table.values()) != {RowFormat.FP32}
    assert section["limit"].startswith("2 KiB; tables take 2 KiB")
    more = override(config, {"training.epochs": "2"})
    train_run(more, folder=run.path, resume=True)
    with pytest.raises(ConfigError, match=r"tables\.memory-limit"):
        train_run(override(more, {"tables.memory-limit": "3 KB"}), folder=run.path, resume=True)
