"""Cheap mistakes on the command line are said before anything long is loaded."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import ziggurat as zg
from tests.serving.shop import Shop
from ziggurat.cli.main import main
from ziggurat.runs.export import make
from ziggurat.serving.recommender import Recommender


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(Recommender, "load", refuse)
    monkeypatch.setattr(make, "load_run", refuse)


QUESTIONS = [
    ("recommend NONE USERS --out l.parquet", "the folder of an export"),
    ("recommend PLACE USERS --out l.parquet", "name one: EXPORT"),
    ("recommend EXPORT none.csv --out l.parquet", "none.csv"),
    ("recommend EXPORT USERS --out l.xlsx", "1. --out l.parquet\n  2. --out l.csv"),
    ("recommend EXPORT USERS --out USERS", "--out users_new.csv"),
    ("recommend EXPORT USERS --out USERS/l.parquet", "found:    a file"),
    ("recommend EXPORT USERS --out l.parquet --k 0", "from 1"),
    ("recommend EXPORT USERS --out l.parquet --k 1000000", "10,000"),
    ("recommend EXPORT USERS --out l.parquet --filter prise:>3", 'did you mean "price"?'),
    ("recommend EXPORT USERS --out l.parquet --filter price:>", "column 8"),
    ("recommend EXPORT USERS --out l.parquet --separator ;;", "one ASCII character"),
    ("recommend EXPORT USERS --out l.parquet --model no_such:Config", "no_such"),
    ("index recall EXPORT --filter price:x", "a number"),
    ("index recall EXPORT --k 0", "--k of at least 1"),
    ("index recall EXPORT --users -3", "--users of at least 1"),
    ("index recall EXPORT --plot no/plot.png", "no folder no"),
    ("index recall EXPORT --plot plot.txt", "plot.png"),
    ("index recall NONE", "the folder of an export"),
    ("serve NONE", "the folder of an export"),
    ("serve PLACE", "name one: EXPORT"),
    ("serve EXPORT --port 99999", "65,535"),
    ("serve EXPORT --port TAKEN", "listen"),
    ("serve EXPORT --api-key-file none.txt", "none.txt"),
    ("serve EXPORT --server.deadlin-ms 50", "did you mean --server.deadline-ms?"),
    ("serve EXPORT --server.queue 50", "did you mean --server.max-queue?"),
    ("serve EXPORT --server.patience 50", "ways out:\n  1. see all settings"),
    ("serve EXPORT --maxqueue 50", "did you mean --server.max-queue?"),
    ("serve EXPORT --server 50", "the name of one setting"),
    ("serve EXPORT --server.workers many", "a whole number"),
    ("export none --out o", "none"),
    ("export TWO_TOWER --ranker none --out o", "none"),
    ("export TWO_TOWER --ranker TWO_TOWER --out o", "a ranking run"),
    ("export RANKER --out PLACE", "other files"),
    ("export RANKER --out USERS", "found:    a file"),
    ("export RANKER --out o --value like+", "--value"),
    ("export RANKER --out o --value liek", "like"),
    ("export RANKER --out o --value liek", "names like, price\n"),
    ("export TWO_TOWER --out o --value like", "names retrieval, price\n"),
    ("export TWO_TOWER --ranker RANKER --out o --value age", "names retrieval, like, price\n"),
    ("export RANKER --out o --value timestamp --keep timestamp+", "columns to keep"),
    ("export RANKER --out o --keep titel", "title"),
    ("export RANKER --out o --items none.csv", "none.csv"),
    ("export RANKER --out o --items USERS --keep title", "title"),
    ("export RANKER --out o --candidates 0", "num_candidates"),
    ("export RANKER --out o --parity-rows 0", "parity_rows"),
]


@pytest.mark.parametrize(("command", "said"), QUESTIONS)
def test_cheap_mistakes_are_said_at_once(
    command: str,
    said: str,
    shop: Shop,
    tmp_path: Path,
    nothing_loads: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("users.csv").write_text("user_id\n3\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {
            "NONE": "no_such_folder",
            "PLACE": str(shop.place),
            "USERS": "users.csv",
            "EXPORT": str(shop.export),
            "TWO_TOWER": str(shop.two_tower),
            "RANKER": str(shop.ranker),
            "TAKEN": str(taken.getsockname()[1]),
        }
        words = []
        for word in command.split():
            for name, value in names.items():
                word = word.replace(name, value)
            words.append(word)
        assert main(words) == 2
    shown = capsys.readouterr().err
    assert said.replace("EXPORT", str(shop.export)) in shown
    assert "ways out:" in shown
    assert "settings` " not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["users.csv"]


def test_what_is_right_is_let_through(
    shop: Shop, nothing_loads: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        ["recommend", str(shop.export), str(shop.place / "events.parquet"), "--out", str(tmp_path / "l.parquet")],
        ["index", "recall", str(shop.export), "--filter", "price:>3", "--plot", str(tmp_path / "p.png")],
        ["export", str(shop.two_tower), "--ranker", str(shop.ranker), "--out", str(tmp_path / "o"), "--keep", "title"],
    ):
        # An error of code outside of the package, as that of this file is.
        assert main(arguments) != 0
        assert "it was loaded" in capsys.readouterr().err
    assert zg.Recommender is Recommender
