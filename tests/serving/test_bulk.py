"""Lists in bulk: as each user alone would get them, and whole after a kill at any part."""

from __future__ import annotations

import random
import re
from pathlib import Path

import polars as pl
import pytest

import ziggurat as zg
from tests.damage import damage
from tests.serving.shop import Shop
from ziggurat.cli.main import main
from ziggurat.errors import ConfigError, FileError, RequestError, SchemaError, ZigguratError
from ziggurat.files import FileLock
from ziggurat.serving.bulk import BulkConfig, recommend_in_bulk


class KilledError(Exception):
    pass


@pytest.fixture
def users(shop: Shop, tmp_path: Path) -> Path:
    frame = pl.DataFrame({"user_id": [*range(30), 999, None], "age": [None, 20] * 16, "other": ["x"] * 32})
    frame.write_parquet(tmp_path / "users.parquet")
    return tmp_path / "users.parquet"


def test_lists_are_those_of_single_requests(loaded: zg.Recommender, users: Path, tmp_path: Path) -> None:
    out = tmp_path / "lists.parquet"
    result = recommend_in_bulk(loaded, [users], out=out, config=BulkConfig(k=3, part_users=10))
    lists = pl.read_parquet(out)
    assert (result.num_users, result.num_items, result.num_unknown, result.resumed) == (32, 96, 2, 0)
    assert lists["row"].to_list() == list(range(32))
    assert lists["user_id"].to_list() == [*map(str, range(30)), "999", None]
    for index in (0, 7, 30, 31):
        user = {
            k: v for k, v in pl.read_parquet(users).row(index, named=True).items() if v is not None and k != "other"
        }
        answer = loaded.recommend(user, k=3)
        assert lists["items"][index].to_list() == [item.id for item in answer.items]
        assert lists["scores"][index].to_list() == pytest.approx([item.score for item in answer.items], abs=1e-6)


@pytest.mark.parametrize(("name", "separator"), [("lists.csv", ","), ("lists.TSV", "\t")])
def test_text_has_one_line_an_item(
    name: str, separator: str, loaded: zg.Recommender, users: Path, tmp_path: Path
) -> None:
    config = BulkConfig(k=3, part_users=10)
    said: list[str] = []
    recommend_in_bulk(loaded, [users], out=tmp_path / "lists.parquet", config=config)
    result = recommend_in_bulk(loaded, [users], out=tmp_path / name, config=config, say=said.append)
    lists = pl.read_parquet(tmp_path / "lists.parquet")
    lines = pl.read_csv(tmp_path / name, separator=separator, schema_overrides={"user_id": pl.String})
    assert lines.columns == ["row", "user_id", "rank", "item", "score"]
    assert (lines.height, result.num_items, result.num_users, said) == (96, 96, 32, [])
    assert lines["rank"].to_list() == [1, 2, 3] * 32
    again = lines.group_by("row", "user_id", maintain_order=True).agg(items="item", scores="score")
    assert again.equals(lists)


def test_a_user_without_items_has_a_line_that_names_none(loaded: zg.Recommender, users: Path, tmp_path: Path) -> None:
    config = BulkConfig(filter="price:>0 AND NOT price:>0")
    recommend_in_bulk(loaded, [users], out=tmp_path / "none.csv", config=config)
    lines = (tmp_path / "none.csv").read_text().splitlines()
    assert lines[:2] == ["row,user_id,rank,item,score", "0,0,,,"]
    assert len(lines) == 33


def test_several_rows_of_a_user_are_said(loaded: zg.Recommender, tmp_path: Path) -> None:
    said: list[str] = []
    for name, ids in (("log", ["1", "1", "2"]), ("users", ["1", "2"])):
        pl.DataFrame({"user_id": ids}).write_parquet(tmp_path / f"{name}.parquet")
        recommend_in_bulk(
            loaded, [tmp_path / f"{name}.parquet"], out=tmp_path / f"{name}_lists.parquet", say=said.append
        )
    assert said == ["3 rows, 2 users: a user of several rows has a list for each of them"]


def test_a_killed_run_goes_on(loaded: zg.Recommender, users: Path, tmp_path: Path) -> None:
    config, told = BulkConfig(k=3, part_users=10), list[str]()
    whole = tmp_path / "whole.parquet"
    recommend_in_bulk(loaded, [users], out=whole, config=config)
    out = tmp_path / "lists.parquet"

    def kill(done: int) -> None:
        if done >= 20:
            raise KilledError

    with pytest.raises(KilledError):
        recommend_in_bulk(loaded, [users], out=out, config=config, on_progress=kill)
    assert not out.exists()
    result = recommend_in_bulk(loaded, [users], out=out, config=config, say=told.append)
    assert result.resumed == 20
    assert "going on" in told[0]
    assert pl.read_parquet(out).equals(pl.read_parquet(whole))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lists.parquet", "users.parquet", "whole.parquet"]
    with pytest.raises(KilledError):
        recommend_in_bulk(loaded, [users], out=out, config=config, on_progress=kill)
    other = recommend_in_bulk(loaded, [users], out=out, config=BulkConfig(k=2, part_users=10), say=told.append)
    assert other.resumed == 0
    assert "another question" in told[-1]


def test_damage_to_finished_parts_is_found_and_they_are_made_anew(
    loaded: zg.Recommender, users: Path, tmp_path: Path
) -> None:
    config = BulkConfig(k=3, part_users=4)
    recommend_in_bulk(loaded, [users], out=tmp_path / "whole.parquet", config=config)
    out = tmp_path / "lists.parquet"

    def kill(done: int) -> None:
        if done >= 28:
            raise KilledError

    draw = random.Random(8)
    for _ in range(10):
        told: list[str] = []
        with pytest.raises(KilledError):
            recommend_in_bulk(loaded, [users], out=out, config=config, on_progress=kill)
        files = sorted((tmp_path / "lists.parquet.parts").glob("part-*"))
        what = damage(draw.choice(files), draw)
        result = recommend_in_bulk(loaded, [users], out=out, config=config, say=told.append)
        assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes(), what
        assert result.resumed == 24
        assert re.fullmatch(r"part \d is damaged, and made anew: .+", told[1], re.DOTALL), what
        assert not (tmp_path / "lists.parquet.parts").exists()
        out.unlink()


@pytest.mark.parametrize("content", ["letter.txt", "asked.json", "part-000000.parquet"])
def test_a_folder_that_is_not_of_parts_is_neither_used_nor_removed(
    loaded: zg.Recommender, users: Path, tmp_path: Path, content: str
) -> None:
    mine = tmp_path / "lists.parquet.parts"
    mine.mkdir()
    (mine / content).write_text("mine")
    (mine / "letter.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    with pytest.raises(FileError, match="something else in it: letter"):
        recommend_in_bulk(loaded, [users], out=tmp_path / "lists.parquet")
    (mine / "letter.txt").unlink()
    if content != "letter.txt":
        with pytest.raises(ZigguratError):
            recommend_in_bulk(loaded, [users], out=tmp_path / "lists.parquet")
        assert (mine / content).read_bytes() == before[content]


def test_two_processes_do_not_make_the_same_lists(loaded: zg.Recommender, users: Path, tmp_path: Path) -> None:
    (tmp_path / "lists.parquet.parts").mkdir()
    lock = FileLock(tmp_path / "lists.parquet.parts" / ".lock")
    assert lock.take()
    with pytest.raises(FileError, match="another one that does: process"):
        recommend_in_bulk(loaded, [users], out=tmp_path / "lists.parquet")
    lock.release()
    assert recommend_in_bulk(loaded, [users], out=tmp_path / "lists.parquet").num_users == 32


def test_what_cannot_be_is_named(loaded: zg.Recommender, users: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ends in"):
        recommend_in_bulk(loaded, [users], out=tmp_path / "lists.json")
    pl.DataFrame({"who": [1]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(SchemaError, match="user_id"):
        recommend_in_bulk(loaded, [tmp_path / "other.parquet"], out=tmp_path / "lists.parquet")
    pl.DataFrame({"user_id": [1, 2], "age": ["3", "old"]}).write_parquet(tmp_path / "bad.parquet")
    with pytest.raises(RequestError, match="row 1"):
        recommend_in_bulk(loaded, [tmp_path / "bad.parquet"], out=tmp_path / "lists.parquet")


def test_the_command(shop: Shop, users: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "lists.parquet"
    assert main(["recommend", str(shop.export), str(users), "--k", "100", "--out", str(out), "--include-seen"]) == 0
    shown = capsys.readouterr().out
    assert "32 users" in shown
    assert "32 users with fewer than 100 items" in shown
    assert "2 users that the export does not know" in shown
    assert pl.read_parquet(out)["items"].list.len().unique().to_list() == [40]


def test_numbers_of_users_are_read_by_the_marks_that_are_said(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "lists.parquet"
    pl.DataFrame({"user_id": [1, 2], "age": [1234.5, 21.5]}).write_parquet(tmp_path / "users.parquet")
    pl.DataFrame({"user_id": [1, 2], "age": ["1.234,5", "21,5"]}).write_csv(tmp_path / "users.csv", separator=";")
    command = ["recommend", str(shop.export), "--k", "3", "--out", str(out)]
    assert main([*command, str(tmp_path / "users.parquet")]) == 0
    expected = pl.read_parquet(out)
    command += ["--data.separator", "semicolon", str(tmp_path / "users.csv")]
    assert main(command) != 0, "files of the run have a point"
    assert "'age'" in capsys.readouterr().err
    assert main([*command, "--data.decimal", "comma", "--data.thousands", "point"]) == 0
    assert pl.read_parquet(out).equals(expected)
    assert main([*command, "--data.decimal", "comma"]) != 0
    shown = capsys.readouterr().err
    assert "'1.234,5'" in shown
    assert "row 0" in shown
    assert "--data.thousands" in shown
    assert main([*command, "--data.decimal", "comma", "--data.thousands", "comma"]) != 0
    assert "a comma for both" in capsys.readouterr().err


def test_recall_of_the_index(shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "recall.png"
    arguments = ["index", "recall", str(shop.export), "--k", "10", "--users", "20", "--filter", "tags:t1"]
    assert main([*arguments, "--plot", str(plot)]) == 0
    shown = capsys.readouterr().out
    assert "recall@10" in shown
    assert "1.0000" in shown
    assert "20 known users" in shown
    assert plot.stat().st_size > 1000


def test_lists_never_replace_the_file_of_users(shop: Shop, tmp_path: Path) -> None:
    export, users = zg.Recommender.load(shop.export), tmp_path / "users.parquet"
    pl.DataFrame({"user_id": [0, 1]}).write_parquet(users)
    before = users.read_bytes()
    with pytest.raises(ConfigError, match="which holds the users"):
        recommend_in_bulk(export, [users], out=tmp_path / "." / "users.parquet")
    with pytest.raises(FileError, match="a folder in which lists can be written"):
        recommend_in_bulk(export, [users], out="/proc/lists.parquet")
    assert users.read_bytes() == before


def test_users_that_are_no_users_are_refused(shop: Shop) -> None:
    export = zg.Recommender.load(shop.export)
    for wrong in (None, 17, "17", [17]):
        with pytest.raises(RequestError, match="raw columns of a user"):
            export.recommend(wrong)  # type: ignore[arg-type]


def test_a_separator_is_hinted_at_and_taken(loaded: zg.Recommender, tmp_path: Path) -> None:
    (tmp_path / "users.csv").write_text("user_id;age\n3;20\n4;30\n")
    with pytest.raises(SchemaError, match="--separator semicolon"):
        recommend_in_bulk(loaded, [tmp_path / "users.csv"], out=tmp_path / "lists.parquet")
    config, told = BulkConfig(k=3, separator="semicolon", filter="title:'Item numbre 3' OR price:>0"), list[str]()
    recommend_in_bulk(loaded, [tmp_path / "users.csv"], out=tmp_path / "lists.parquet", config=config, say=told.append)
    assert pl.read_parquet(tmp_path / "lists.parquet")["user_id"].to_list() == ["3", "4"]
    assert told[0].startswith("filter: no item has title:'Item numbre 3'")
