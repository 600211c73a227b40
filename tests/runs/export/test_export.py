"""Exports of runs: equal scores or none at all, in every precision of tables; what cannot be exported is said."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

import ziggurat as zg
from tests.serving.shop import SCHEMA, SETTINGS, Shop, events
from ziggurat.cli.main import main
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.values.vocabulary import Vocabulary
from ziggurat.data.raw.bad_rows import BadRows
from ziggurat.data.raw.chunk import RawChunk
from ziggurat.data.raw.written_numbers import DecimalMark, WrittenNumbers
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.errors import ConfigError, ExportError, MissingFileError
from ziggurat.features.date_order import DateOrder
from ziggurat.models import MLPConfig
from ziggurat.ops.row_formats import RowFormat
from ziggurat.runs.export import make
from ziggurat.runs.export.data import RunData, make_catalogue, make_users
from ziggurat.runs.export.known_ids import KnownShare, known_shares, refuse_blind, refuse_stranger
from ziggurat.runs.export.parity import Parity, plain_rows, refuse_difference, unseen
from ziggurat.runs.export.vector_parity import VectorParity, refuse_other_vectors
from ziggurat.serving.answering.item_catalogue import ItemCatalogue, ItemColumns, KnownUsers
from ziggurat.serving.export.export_folder import open_export, seal_export
from ziggurat.serving.export.packed_model import MODEL, load_model
from ziggurat.training.report.progress import NoProgress

STRANGER = KnownShare(what="items", column="item", known=1, of=40, least=0.5)
QUICK = zg.ExportConfig(program=False, golden=2)
IN_INT8 = zg.ExportConfig(tables=RowFormat.INT8)


def test_a_ranker_scores_as_its_run(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ranker"
    assert main(["export", str(shop.ranker), "--out", str(out), "--parity-rows", "500"]) == 0
    shown = capsys.readouterr()
    assert "version" in shown.out
    assert "on these rows, which hold those of training" in shown.out + shown.err
    assert "unknown ids" not in shown.out + shown.err  # those of the rows that the export is tried with are made ones
    manifest = open_export(out).manifest
    assert manifest.facts["parity"]["num_rows"] == 500
    assert manifest.facts["parity"]["largest_difference"] <= 1e-5
    assert manifest.facts["program"] == "written"
    assert manifest.sources[0].run == "ranker"
    rec = zg.Recommender.load(out)
    with pytest.raises(MissingFileError, match="that of an export"):
        zg.load_run(out)
    rows = events(300, seed=9)
    new = unseen(rows.select([feature.name for feature in SCHEMA.features]), SCHEMA)
    run = zg.load_run(shop.ranker)
    for frame in (rows, new):
        np.testing.assert_allclose(rec.scores(frame), run.scores(frame), atol=1e-6)
    assert rec.rank({"user_id": 3}, ["i1", "i2"]).items[0].tasks.keys() == {"like"}
    with pytest.raises(zg.ZigguratError, match="--ranker"):
        rec.recommend({"user_id": 3})


@pytest.mark.parametrize("tables", ["bf16", "int8", "int4"])
def test_tables_in_few_bits_are_smaller_and_nearly_equal(shop: Shop, tmp_path: Path, tables: str) -> None:
    config = dataclasses.replace(QUICK, tables=RowFormat(tables), allow=True)
    made = zg.export_run(shop.ranker, out=tmp_path / tables, config=config)
    run, (before, now) = zg.load_run(shop.ranker), made.manifest.facts["parity"]["metrics"]["auc/like"]
    assert abs(before - now) < 0.02
    rec, rows = zg.Recommender.load(tmp_path / tables), events(300, seed=9)
    difference = np.abs(rec.scores(rows) - run.scores(rows)).max()
    assert 0 < difference < {"bf16": 0.01, "int8": 0.02, "int4": 0.2}[tables]
    ranker = rec.chain.ranker
    assert ranker is not None
    kept = ranker.packed.model.embeddings.tables
    assert {kept.storage(place.storage).row_format for place in kept.places.values()} == {RowFormat(tables)}
    with torch.no_grad():  # rows in the file are rows in memory, and those that the run gives when it rounds them
        rounded = zg.load_run(shop.ranker, tables=TablesConfig(weights=RowFormat(tables))).model.embeddings
    assert all(torch.equal(rounded.table(name), kept.view(name)) for name in kept.places)


def test_a_table_may_have_a_format_of_its_own(shop: Shop, tmp_path: Path) -> None:
    out = tmp_path / "mixed"
    asked = ["--tables", "int8", "--by-table", "item=fp32,user_id=int4", "--parity-rows", "300", "--allow"]
    assert main(["export", str(shop.ranker), "--out", str(out), *asked]) == 0
    ranker = zg.Recommender.load(out).chain.ranker
    assert ranker is not None
    kept = ranker.packed.model.embeddings.tables
    formats = {name: kept.storage(place.storage).row_format for name, place in kept.places.items()}
    assert formats == {"item": RowFormat.FP32, "user_id": RowFormat.INT4, "tags": RowFormat.INT8}
    run = zg.load_run(shop.ranker).model.embeddings
    assert torch.equal(kept.view("item"), run.table("item"))
    with pytest.raises(ConfigError, match="did you mean 'user_id'"):
        zg.export_run(shop.ranker, out=out, config=dataclasses.replace(QUICK, by_table={"user": RowFormat.INT4}))
    with pytest.raises(ConfigError, match="split_bf16"):
        zg.ExportConfig(tables=RowFormat.SPLIT_BF16)


@pytest.mark.parametrize("tables", ["fp32", "bf16", "int8", "int4"])
def test_an_export_of_the_first_version_answers_as_it_did(shop: Shop, tmp_path: Path, tables: str) -> None:
    first = dataclasses.replace(MODEL, version=1)
    made = zg.export_run(shop.ranker, out=tmp_path / "old", config=QUICK)
    folder = made.path / "ranker"
    numbers = load_file(folder / "weights.safetensors")
    expected, tensors = dict(numbers), dict[str, torch.Tensor]()
    for name, rows in numbers.items():
        if not name.startswith("embeddings.tables.") or tables == "fp32":
            tensors[name] = rows
        elif tables == "bf16":
            tensors[name], expected[name] = rows.bfloat16(), rows.bfloat16().float()
        else:
            low, most = rows.amin(1), 255 if tables == "int8" else 15
            scale = (rows.amax(1) - low) / most
            codes = ((rows - low[:, None]) / scale.clamp(min=1e-30)[:, None]).round().to(torch.uint8)
            expected[name] = low[:, None] + scale[:, None] * codes
            packed = codes if tables == "int8" else codes[:, ::2] | codes[:, 1::2] << 4
            tensors |= {name: packed, f"{name}:scale": scale, f"{name}:offset": low}
    save_file(tensors, str(folder / "weights.safetensors"))
    content = {name: value for name, value in MODEL.read(folder / "model.json").items() if name != "by_table"}
    first.write(folder / "model.json", content | {"tables": tables})
    (made.path / "golden.json").unlink()
    seal_export(made.path, sources=(), facts={}, made_with={})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        packed_model = load_model(open_export(made.path), "ranker")
    assert any("make it again" in str(each.message) for each in told) == (tables != "fp32")
    for name in packed_model.model.embeddings.tables.places:
        found = packed_model.model.embeddings.table(name)
        torch.testing.assert_close(found, expected[f"embeddings.tables.{name}.weight"], rtol=0, atol=1e-6)


def perturbing(save: Callable[..., None], table: str) -> Callable[..., None]:
    """Writes models one row of whose table is another."""

    def perturbed(packed: Any, folder: Path, *, tables: TablesConfig) -> None:
        state = {name: tensor.clone() for name, tensor in packed.model.state_dict().items()}
        save(packed, folder, tables=tables)
        name = next(name for name in state if name.startswith(table))
        state[name][5] += 0.05
        save_file(state, str(folder / "weights.safetensors"))

    return perturbed


def test_an_export_that_scores_differently_is_not_published(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zg.export_run(shop.ranker, out=tmp_path / "out", config=QUICK)
    version = open_export(tmp_path / "out").version
    monkeypatch.setattr(make, "save_model", perturbing(make.save_model, "embeddings.tables.user_id"))
    with pytest.raises(ExportError, match="1e-05"):
        zg.export_run(shop.ranker, out=tmp_path / "out", config=QUICK)
    assert open_export(tmp_path / "out").version == version  # the older one is as it was
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    zg.export_run(shop.ranker, out=tmp_path / "out", config=dataclasses.replace(QUICK, allow=True))
    assert open_export(tmp_path / "out").version != version


@pytest.mark.parametrize("tables", ["fp32", "bf16", "int4"])
def test_vectors_are_those_of_the_run(shop: Shop, tmp_path: Path, tables: str) -> None:
    config = dataclasses.replace(QUICK, tables=RowFormat(tables), allow=True, num_candidates=10)
    facts = zg.export_run(shop.two_tower, out=tmp_path / "out", config=config).manifest.facts["vectors"]
    assert facts["num_rows"] == 2000
    assert facts["best"] == 10
    differences = [facts[name] for name in ("largest_difference", "largest_of_requests", "largest_of_answers")]
    if tables == "fp32":
        assert max(differences) <= 1e-5
        assert facts["recall"] == 1.0
    else:
        assert min(differences) > 1e-5
        assert max(differences) < {"bf16": 0.05, "int4": 1.0}[tables]
        assert facts["recall"] > 0.5


@pytest.mark.parametrize("side", ["user_id", "item"])
def test_an_export_with_other_vectors_is_not_published(
    shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr(make, "save_model", perturbing(make.save_model, f"embeddings.tables.{side}"))
    with pytest.raises(ExportError, match="inner products of the run, to 1e-05"):
        zg.export_run(shop.two_tower, out=tmp_path / "out", config=QUICK)
    assert not list(tmp_path.iterdir())


def test_other_vectors_are_refused_by_their_kind() -> None:
    same = VectorParity(
        num_rows=9, largest_difference=0, largest_of_requests=0, largest_of_answers=0, best=10, recall=1.0
    )
    refuse_other_vectors(same, config=zg.ExportConfig(), where="run")
    for name in ("largest_difference", "largest_of_requests", "largest_of_answers"):
        for wrong in (2e-5, float("nan")):
            other = dataclasses.replace(same, **{name: wrong})
            with pytest.raises(ExportError, match="inner products"):
                refuse_other_vectors(other, config=zg.ExportConfig(), where="run")
            refuse_other_vectors(other, config=zg.ExportConfig(allow=True), where="run")
            refuse_other_vectors(other, config=IN_INT8, where="run")
    with pytest.raises(ExportError, match=r"94\.00% of the run's best 10"):
        refuse_other_vectors(dataclasses.replace(same, recall=0.94), config=IN_INT8, where="run")


def test_differences_are_refused_by_their_kind() -> None:
    parity = Parity(num_rows=9, largest_difference=0.0, largest_of_requests=2e-5)
    with pytest.raises(ExportError, match="requests by at most 2"):
        refuse_difference(parity, config=zg.ExportConfig(), where="run")
    refuse_difference(parity, config=IN_INT8, where="run")
    nan = Parity(num_rows=9, largest_difference=float("nan"), largest_of_requests=0.0)
    with pytest.raises(ExportError):
        refuse_difference(nan, config=zg.ExportConfig(), where="run")
    lossy = Parity(num_rows=9, largest_difference=0.1, largest_of_requests=0.1, metrics={"auc/like": (0.7, 0.6997)})
    with pytest.raises(ExportError, match="int8"):
        refuse_difference(lossy, config=IN_INT8, where="run")
    refuse_difference(lossy, config=dataclasses.replace(IN_INT8, allow=True), where="run")


@pytest.mark.parametrize(
    ("config", "ways"),
    [
        (
            zg.ExportConfig(products="mx6"),
            ("products in more bits: --products mx9, or none", "quantise run --products mx6"),
        ),
        (zg.ExportConfig(products="mx9"), ("products in FP32: leave --products out", "quantise run --products mx9")),
        (zg.ExportConfig(dispatch="plan.json"), ("products in FP32: leave --dispatch out", "run --products mx9")),
        (zg.ExportConfig(tables=RowFormat.INT4), ("tables in more bits", "quantise run --by-table")),
    ],
)
def test_ways_out_of_a_difference_are_others_than_what_was_asked_for(
    config: zg.ExportConfig, ways: tuple[str, ...]
) -> None:
    lossy = Parity(num_rows=9, largest_difference=0.1, largest_of_requests=0.1, metrics={"auc/like": (0.7, 0.6997)})
    with pytest.raises(ExportError) as refused:
        refuse_difference(lossy, config=config, where="run")
    *found, allowed = refused.value.ways_out
    assert allowed == "take it all the same: --allow"
    assert len(found) == len(ways)
    assert all(way in each for way, each in zip(ways, found, strict=True))


@pytest.mark.parametrize(
    ("metrics", "is_worse"),
    [
        ({"auc/like": (0.7, 0.7003)}, False),
        ({"auc/like": (0.7, 0.69995)}, False),
        ({"auc/like": (0.7, float("nan"))}, True),
        ({"rmse/stars": (2.0, 1.9)}, False),
        ({"rmse/stars": (2.0, 2.0001)}, False),
        ({"rmse/stars": (2.0, 2.001)}, True),
        ({"auc/like": (0.7, 0.75), "rmse/stars": (2.0, 2.001)}, True),
    ],
)
def test_only_a_loss_of_a_metric_is_refused(metrics: dict[str, tuple[float, float]], is_worse: bool) -> None:
    parity = Parity(num_rows=9, largest_difference=0.1, largest_of_requests=0.1, metrics=metrics)
    if is_worse:
        with pytest.raises(ExportError, match="no worse"):
            refuse_difference(parity, config=IN_INT8, where="run")
    else:
        refuse_difference(parity, config=IN_INT8, where="run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ranker": "ranker", "run": "ranker"}, "two_tower"),
        ({"ranker": "two_tower", "run": "two_tower"}, "ranking run"),
        ({"run": "ranker", "config": {"value": "liek"}}, "like"),
        ({"run": "ranker", "config": {"value": "retrieval"}}, "like"),
        ({"run": "two_tower", "config": {"value": "like"}}, "retrieval"),
        ({"run": "ranker", "config": {"keep": ("titel",)}}, "titel"),
    ],
)
def test_what_cannot_be_exported_is_said(shop: Shop, tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    config = dataclasses.replace(QUICK, **arguments.pop("config", {}))
    folders = {name: shop.place / value for name, value in arguments.items()}
    with pytest.raises(zg.ZigguratError, match=said):
        zg.export_run(folders.pop("run"), out=tmp_path / "out", config=config, **folders)
    assert not list(tmp_path.iterdir())


def test_a_ranker_of_other_data_is_refused(shop: Shop, tmp_path: Path) -> None:
    known = open_export(shop.export).manifest.facts["known_by_ranker"]
    assert known["items"] == {"column": "item", "known": 40, "of": 40}
    assert known["users"]["known"] == known["users"]["of"] == 60
    encoder, ranker = zg.load_run(shop.two_tower).preprocessing, zg.load_run(shop.ranker).preprocessing
    frame = pl.DataFrame({"item": [f"i{n}" for n in range(50)], "tags": [["t1"]] * 50, "price": [1.0] * 50})
    catalogue = ItemCatalogue(frame, columns=ItemColumns(id="item", features=("item", "tags", "price")))
    users = KnownUsers(
        pl.DataFrame({"user_id": [*range(60), 777]}),
        id_column="user_id",
        offsets=torch.zeros(62, dtype=torch.int64),
        items=torch.empty(0, dtype=torch.int32),
    )
    strange = dict(ranker.vocabularies)
    items = strange["item"].ids
    strange["item"] = Vocabulary(pl.concat([items.head(19), "x" + items]), pl.repeat(1, 59, eager=True))
    other = Preprocessing(ranker.schema, vocabularies=strange, numbers=ranker.numbers)
    for fitted, shown in ((ranker, (40, 60)), (other, (19, 60))):
        shares = known_shares(fitted, encoder=encoder, catalogue=catalogue, users=users)
        assert [(each.known, each.of) for each in shares] == list(zip(shown, (40, 60), strict=True))
    with pytest.raises(ExportError, match=r"knows 19 of 40 items \(47.5%"):
        refuse_stranger(shares, ranker="r", allow=False)
    refuse_stranger(shares, ranker="r", allow=True)
    alone = dataclasses.replace(ranker.schema, features=ranker.schema.features[:2], items=None, tables=())
    blind = Preprocessing(alone, vocabularies={"user_id": strange["user_id"]}, numbers=ranker.numbers)
    with pytest.raises(ExportError, match="all items of a user alike"):
        refuse_blind(blind, catalogue=catalogue, folder="r")


def test_a_foreign_ranker_stops_an_export(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(make, "known_shares", lambda *given, **named: told.append(given) or [STRANGER])
    with pytest.raises(ExportError, match="--allow"):
        zg.export_run(shop.two_tower, ranker=shop.ranker, out=tmp_path / "out", config=QUICK)
    assert told
    assert not list(tmp_path.iterdir())


def test_a_ranker_that_cannot_read_the_items_is_named_with_the_run_that_it_ranks_for(
    shop: Shop, tmp_path: Path
) -> None:
    kinds = {"price": zg.Categorical(name="price"), "tags": zg.Categorical(name="tags")}
    features = tuple(kinds.get(feature.name, feature) for feature in SCHEMA.features)
    shop.events.head(400).with_columns(tags=pl.col("tags").list.first()).write_parquet(tmp_path / "other.parquet")
    model = zg.DCNv2Config(embedding_dim=4, deep=MLPConfig(hidden_dims=(8,)))
    data = zg.DataConfig(train=(str(tmp_path / "other.parquet"),))
    schema = dataclasses.replace(SCHEMA, features=features)
    zg.train_run(
        zg.RunConfig(data=data, table_schema=schema, model=model, training=SETTINGS), folder=tmp_path / "other"
    )
    with pytest.raises(ExportError, match="one id a row, for categorical feature 'tags'") as refused:
        zg.export_run(shop.two_tower, ranker=tmp_path / "other", out=tmp_path / "out", config=QUICK)
    assert refused.value.where.startswith(f"{tmp_path / 'other'}, --ranker")
    assert str(shop.two_tower) in refused.value.expected


def test_own_items_are_the_catalogue(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    items = pl.DataFrame(
        {"item": ["i1", "new"], "tags": [["t1"], ["t9"]], "price": [1.5, None], "colour": ["red", "blue"]}
    )
    items.write_parquet(tmp_path / "items.parquet")
    own = (str(tmp_path / "items.parquet"),)
    config = dataclasses.replace(QUICK, items=own, users=False, value="retrieval if price < 9 else 0")
    progress = NoProgress()
    monkeypatch.setattr(progress, "say", lambda text: said.append(text))
    exported = zg.export_run(shop.two_tower, out=tmp_path / "out", config=config, progress=progress)
    assert "price is missing for 1 of 2 items" in "\n".join(said), "so it gets the branch behind else"
    assert exported.manifest.facts["value"]["missing"] == {"price": 1}
    rec = zg.Recommender.load(tmp_path / "out")
    assert {item.id for item in rec.recommend({"user_id": 3}, k=9).items} == {"i1", "new"}
    assert rec.item("new")["colour"] == "blue"
    assert rec.users() == []
    few = dataclasses.replace(QUICK, items=own, users=False, keep=("price",))
    zg.export_run(shop.two_tower, out=tmp_path / "few", config=few)
    assert set(zg.Recommender.load(tmp_path / "few").item("new")) == {"item", "tags", "price"}, "no colour"
    with pytest.raises(ConfigError, match="one of the names retrieval, price"):
        zg.export_run(shop.two_tower, out=tmp_path / "not", config=dataclasses.replace(few, value="retrieval * colour"))
    with pytest.raises(ConfigError, match="size"):
        zg.export_run(shop.two_tower, out=tmp_path / "other", config=dataclasses.replace(config, keep=("size",)))


def test_users_and_items_are_as_they_were_last(tmp_path: Path) -> None:
    frame = events(400, seed=3)
    frame.write_parquet(tmp_path / "events.parquet")
    data = RunData(config=zg.DataConfig(train=(str(tmp_path / "events.parquet"),)), schema=SCHEMA, bad_rows=BadRows())
    catalogue = make_catalogue(data, schemas=[SCHEMA], keep=["title"], items=())
    users = make_users(data, schemas=[SCHEMA], catalogue=catalogue, finds_items=False)
    assert users is not None
    counts = frame["item"].value_counts()
    expected = dict(zip(counts["item"], counts["count"], strict=True))
    assert dict(zip(catalogue.ids, catalogue.events.tolist(), strict=True)) == expected
    activity = frame.group_by("user_id").len().sort("len", descending=True)
    assert users.frame.height == activity.height
    for place, user in enumerate(users.frame["user_id"]):
        own = frame.filter(pl.col("user_id") == user).sort("timestamp", descending=True)
        assert users.frame["age"][place] == own["age"][0]
        assert users.frame["history"][place].to_list() == own["history"][0].to_list()
        seen = [catalogue.ids[number] for number in users.seen({"user_id": user}).tolist()]
        assert seen == own["item"].unique(maintain_order=True).to_list()
    lengths = [frame.filter(pl.col("user_id") == user).height for user in users.frame["user_id"]]
    assert lengths == sorted(lengths, reverse=True)


def test_dates_are_read_in_the_order_that_training_was_told(tmp_path: Path) -> None:
    frame = events(96, seed=3).with_columns(price=pl.int_range(96) / 4, age=pl.int_range(96))
    days = [dt.date(2024, 1 + number // 8, 1 + number % 8) for number in range(96)]
    told: dict[DateOrder, list[pl.DataFrame]] = {}
    for order, template in ((DateOrder.AUTO, "%Y-%m-%d"), (DateOrder.MONTH_FIRST, "%m/%d/%Y")):
        written = frame.with_columns(timestamp=pl.Series(days).dt.strftime(template)).reverse()
        written.write_parquet(tmp_path / f"{order}.parquet")
        config = zg.DataConfig(train=(str(tmp_path / f"{order}.parquet"),), split=zg.SplitConfig(date_order=order))
        data = RunData(config=config, schema=SCHEMA, bad_rows=BadRows())
        catalogue = make_catalogue(data, schemas=[SCHEMA], keep=["title"], items=())
        users = make_users(data, schemas=[SCHEMA], catalogue=catalogue, finds_items=False)
        assert users is not None
        told[order] = [catalogue.frame, users.frame]
    for mine, theirs in zip(told[DateOrder.MONTH_FIRST], told[DateOrder.AUTO], strict=True):
        assert mine.equals(theirs)
    latest = dict(frame.select("item", "price").iter_rows())
    assert dict(told[DateOrder.MONTH_FIRST][0].select("item", "price").iter_rows()) == latest


def test_a_log_without_what_describes_items_for_the_ranker_is_refused_by_the_option(tmp_path: Path) -> None:
    events(100).rename({"title": "name"}).write_parquet(tmp_path / "log.parquet")
    log = RunData(config=zg.DataConfig(train=(str(tmp_path / "log.parquet"),)), schema=SCHEMA, bad_rows=BadRows())
    titled = zg.Categorical(name="title")
    assert SCHEMA.items is not None
    items = dataclasses.replace(SCHEMA.items, features=(*SCHEMA.items.features, "title"))
    ranker = dataclasses.replace(SCHEMA, features=(*SCHEMA.features, titled), items=items)
    with pytest.raises(ConfigError, match="no column title") as caught:
        make_catalogue(dataclasses.replace(log, events=log), schemas=[SCHEMA, ranker], keep=(), items=())
    assert caught.value.where == "ziggurat export, --ranker"


def test_users_are_known_by_the_group_although_no_model_looks_them_up(tmp_path: Path) -> None:
    frame = events(300)
    frame.write_parquet(tmp_path / "events.parquet")
    schema = dataclasses.replace(SCHEMA, features=tuple(each for each in SCHEMA.features if each.name != "user_id"))
    data = RunData(config=zg.DataConfig(train=(str(tmp_path / "events.parquet"),)), schema=schema, bad_rows=BadRows())
    catalogue = make_catalogue(data, schemas=[schema], keep=(), items=())
    of_retrieval = make_users(data, schemas=[schema], catalogue=catalogue, finds_items=True)
    of_reader = make_users(data, schemas=[schema, SCHEMA], catalogue=catalogue, finds_items=False)
    for users in (of_retrieval, of_reader):
        assert users is not None
        assert set(users.ids) == {str(user) for user in frame["user_id"]}
    assert make_users(data, schemas=[schema], catalogue=catalogue, finds_items=False) is None, "may be a request"


def test_damaged_parts_are_named(shop: Shop, tmp_path: Path) -> None:
    """What has a right checksum and is no model all the same: made by other tools, or by hand."""
    from tests.serving.test_export_folder import reseal

    def broken(name: str, change: Any) -> pytest.ExceptionInfo[zg.ZigguratError]:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(shop.export, copy)
        change(copy / name)
        reseal(copy)
        with pytest.raises(zg.ZigguratError) as caught:
            zg.Recommender.load(copy)
        return caught

    from safetensors.torch import load_file, save_file

    def other_weights(path: Path, change: Any) -> None:
        state = load_file(str(path))
        change(state)
        save_file(state, str(path))

    weights = "ranker/weights.safetensors"
    table = "embeddings.tables.item.weight"
    assert weights in str(broken(weights, lambda path: path.write_bytes(b"not tensors")).value)
    assert "missing" in str(broken(weights, lambda path: other_weights(path, lambda s: s.pop(sorted(s)[0]))).value)
    assert "shape" in str(broken(weights, lambda p: other_weights(p, lambda s: s.update({table: s[table][:9]}))).value)
    half = lambda s: s.update({table: s[table].half()})  # noqa: E731
    assert "float32" in str(broken(weights, lambda path: other_weights(path, half)).value)
    assert "padding" in str(broken(weights, lambda p: other_weights(p, lambda s: s[table][0].fill_(1.0))).value)
    assert "other ones" in str(
        broken(weights, lambda p: other_weights(p, lambda s: s.update({f"{table}x": s[table].clone()}))).value
    )
    assert "users.parquet" in str(broken("users/users.parquet", lambda path: path.write_bytes(b"PAR1")).value)
    seen = {"offsets": torch.tensor([0, 1]), "items": torch.tensor([7], dtype=torch.int32)}
    assert "lists" in str(broken("users/seen.safetensors", lambda path: save_file(seen, str(path))).value)

    def other_kind(path: Path) -> None:
        content = make_json(path)
        content["model"]["kind"] = "unheard_of"
        write_json(path, content)

    assert "unheard_of" in str(broken("ranker/model.json", other_kind).value)

    def other_formula(path: Path) -> None:
        content = make_json(path)
        content["formula"] = "like +"
        write_json(path, content)

    assert "chain.json" in str(broken("chain.json", other_formula).value)


def make_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write_json(path: Path, content: dict[str, Any]) -> None:
    from ziggurat.files import digest_of

    content.pop("sha256")
    path.write_text(json.dumps(content | {"sha256": digest_of(content)}))


def test_decimal_commas_become_points_in_requests() -> None:
    frame = events(3).with_columns(price=pl.Series(["1,5", None, "2"]), age=pl.Series(["3", "4,25", "5"]))
    comma = WrittenNumbers(decimal=DecimalMark.COMMA)
    found = plain_rows(RawChunk(frame=frame, path=Path("a.csv"), numbers=comma), SCHEMA)
    assert found["price"].to_list() == ["1.5", None, "2"]
    assert found["age"].to_list() == ["3", "4.25", "5"]


def test_lists_that_describe_the_same_events_are_missing_together() -> None:
    names = ("clicks", "brands", "tags")
    schema = zg.Schema(features=tuple(zg.Sequence(name=name) for name in names), labels=(zg.Label(name="like"),))
    frame = pl.DataFrame({name: [["a", "b"]] * 100 for name in names})
    lengths = {
        name: cells.list.len().fill_null(0).to_list()
        for name, cells in unseen(frame, schema, joined=(("clicks", "brands"),)).to_dict().items()
    }
    assert lengths["clicks"] == lengths["brands"] != lengths["tags"]
    assert set(lengths["clicks"]) == {0, 2}


@pytest.mark.slow
def test_parity_on_a_hundred_thousand_rows(shop: Shop, tmp_path: Path) -> None:
    """Training's evaluation, the loaded run and the export agree, unseen ids and empty lists included."""
    zg.export_run(shop.ranker, out=tmp_path / "out", config=QUICK)
    rec, run = zg.Recommender.load(tmp_path / "out"), zg.load_run(shop.ranker)
    assert rec.chain.ranker is not None
    frame = events(100_000, seed=5)
    new = unseen(frame.select([feature.name for feature in SCHEMA.features]), SCHEMA)
    rows = new.with_columns(frame["like"], frame["timestamp"])
    expected = run.predict(rows)["like"].to_numpy()
    np.testing.assert_allclose(rec.scores(rows)[:, 0], expected, atol=1e-5)
    by_request = torch.cat([rec.chain.ranker.score_rows(part.to_dicts()) for part in new.iter_slices(5000)])
    np.testing.assert_allclose(by_request.numpy()[:, 0], expected, atol=1e-5)
    from sklearn.metrics import roc_auc_score

    metric = run.evaluate(rows).metrics["auc"]
    assert roc_auc_score(rows["like"].to_numpy(), by_request.numpy()[:, 0]) == pytest.approx(metric, abs=1e-6)


def test_two_features_of_one_column_are_tried_together() -> None:
    features = (zg.Dense(name="price"), zg.Dense(name="band", column="price"), zg.Categorical(name="shop"))
    schema = zg.Schema(features=features, labels=(zg.Label(name="click"),))
    frame = pl.DataFrame({"price": [float(row) for row in range(200)], "shop": ["a", "b"] * 100})
    changed = unseen(frame, schema)
    assert changed.columns == frame.columns
    assert 0 < changed["price"].null_count() < 100
    assert changed.filter(pl.col("price").is_not_null())["price"].is_in(frame["price"].to_list()).all()
