"""Windows that a thread encodes ahead are those that are opened, or are encoded again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs.stream.test_stream_runs import config_of, content_of, events, same, stream, weights_of
from ziggurat.data.streams.journal import Piece, Window
from ziggurat.errors import DataError
from ziggurat.runs.stream.encode_ahead import EncodeAhead, EncodedWindow
from ziggurat.runs.stream.source import StreamWindows
from ziggurat.runs.stream.window_encoder import WindowEncoder

SOME = Window(key=3, name="three", rows=5, pieces=[Piece(file=0, part="a", group=0, rows=5)])
MORE = Window(key=3, name="three", rows=7, pieces=[*SOME.pieces, Piece(file=1, part="b", group=0, rows=2)])


def made(number: int, window: Window, check: Callable[[], None]) -> EncodedWindow:
    del number, check
    return EncodedWindow(window=window, bad=0, counts={}, encode_s=0.0)


def test_a_window_that_got_rows_meanwhile_is_not_the_one_that_was_encoded() -> None:
    ahead = EncodeAhead(made)
    assert ahead.take(3, SOME) is None
    ahead.begin(3, SOME)
    assert ahead.take(3, MORE) is None
    assert ahead.take(3, SOME) is None  # dropped with the other question
    ahead.begin(3, SOME)
    assert ahead.take(4, SOME) is None
    ahead.begin(3, SOME)
    found = ahead.take(3, Window(key=3, name="three", rows=5, pieces=[*SOME.pieces]))
    assert found is not None
    assert found.window == SOME
    ahead.close()


def test_an_error_belongs_to_whoever_opens_the_window_and_to_nobody_else() -> None:
    def fails(number: int, window: Window, check: Callable[[], None]) -> EncodedWindow:
        raise DataError(expected="a", found="b", where=window.name, ways_out="c")

    ahead = EncodeAhead(fails)
    ahead.begin(1, SOME)
    ahead.close()
    ahead.begin(1, SOME)
    with pytest.raises(DataError, match="three"):
        ahead.take(1, SOME)
    assert ahead.take(1, SOME) is None
    ahead.close()


def test_closing_ends_what_is_under_way() -> None:
    has_begun = threading.Event()

    def endless(number: int, window: Window, check: Callable[[], None]) -> EncodedWindow:
        while True:
            has_begun.set()
            check()

    ahead = EncodeAhead(endless)
    ahead.begin(1, SOME)
    assert has_begun.wait(10)
    ahead.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("ziggurat-stream-encode")]


def test_later_windows_are_encoded_beside_training_and_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "events.parquet"
    events(400).write_parquet(file)
    by: dict[int, str] = {}
    most = 0
    encode = WindowEncoder.encode

    def watched(self: WindowEncoder, number: int, window: Window, *, shown: Callable[[int], None]) -> EncodedWindow:
        nonlocal most
        by[number] = threading.current_thread().name
        found = encode(self, number, window, shown=shown)
        most = max(most, len(list((tmp_path / "ahead/stream/windows").glob("[0-9]*"))))
        return found

    monkeypatch.setattr(WindowEncoder, "encode", watched)
    stream(tmp_path / "ahead", file, config=config_of(file))
    assert most == 2
    names = {number: name.rpartition("_")[0] for number, name in by.items()}
    assert names == {1: "", **dict.fromkeys(range(2, 6), "ziggurat-stream-encode")}
    monkeypatch.setattr(StreamWindows, "open_ahead", lambda self, number, *, is_over: None)
    stream(tmp_path / "behind", file, config=config_of(file))
    assert set(by.values()) == {"MainThread"}
    assert content_of(tmp_path / "ahead") == content_of(tmp_path / "behind")
    assert same(weights_of(tmp_path / "ahead"), weights_of(tmp_path / "behind"))
