"""EncodeAhead: a thread encodes the next window of a stream while the present one is scored and trained.

    window n         open ─► score ─► train ───────────► checkpoint
    window n + 1     ░░░ encode ░░░                      └► open: it is there

What a window encodes to depends on its raw rows and on what was fitted to the history, and both stand still while the
stream learns; growing tables give rows to ids in training, behind this. So a window that was encoded ahead has the bits
of one that was not. Which rows a window has may still change where files come: the thread works on a copy of the window
as it would be now, and what it made is used only if the window that is opened is that one.

With teachers nothing is encoded ahead: a window is joined with what they have said by the time at which it is opened.

Cost: two encoded windows on the disk in the place of one; one more chunk of raw rows, and one row group, in memory.
Parsing, look-ups and writing release the interpreter lock, so a thread is enough (`data/background.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ziggurat.data.streams.journal import Window
from ziggurat.training.records.windows import HistoryRows, TaughtRows


@dataclass(frozen=True, kw_only=True)
class EncodedWindow:
    """The result of encoding a window.

    Args:
        window: whose rows.
        bad: rows that were put aside.
        counts: of the values of its features, by bucket.
        encode_s: seconds that it took.
        watermark: time of its newest row; "" where the schema has no time.
        trained: rows that it is trained on, by what is known of their labels, where these are others than its own.
        teachers: by name, what they said of its rows.
        histories: by teacher, what its rows read of the vectors.
        labels_ahead: rows whose label has a time of the future.
        labelled: rows whose label is known at the end of the window, where labels are known later than rows.
    """

    window: Window
    bad: int
    counts: dict[str, list[int]]
    encode_s: float
    watermark: str = ""
    trained: Mapping[str, int] = field(default_factory=dict)
    teachers: dict[str, TaughtRows] = field(default_factory=dict)
    histories: dict[str, HistoryRows] = field(default_factory=dict)
    labels_ahead: int = 0
    labelled: int = 0


class StoppedError(Exception):
    """Nobody wants the window any more."""


class EncodeAhead:
    """Encodes one window at a time in a thread of its own.

    Args:
        encode: called with number, window and a function that raises `StoppedError` when nobody wants the result.
    """

    def __init__(self, encode: Callable[[int, Window, Callable[[], None]], EncodedWindow]) -> None:
        self._encode = encode
        self._pool: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self._number = 0
        self._window: Window | None = None
        self._future: Future[EncodedWindow] | None = None

    def begin(self, number: int, window: Window) -> None:
        """Begin to encode a window; one that is under way ends first."""
        self.stop()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="ziggurat-stream-encode")
        self._number = number
        self._window = window
        self._stop.clear()
        self._future = self._pool.submit(self._encode, number, window, self._check)

    def _check(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def take(self, number: int, window: Window) -> EncodedWindow | None:
        """Wait for a window, and return it; None where another one, or none, was begun.

        Raises:
            ZigguratError: what encoding it raised.
        """
        if self._future is None or (self._number, self._window) != (number, window):
            self.stop()
            return None
        future = self._future
        # Before the answer, which may be an error: nobody waits for it a second time.
        self._future = None
        self._window = None
        return future.result()

    def stop(self) -> None:
        """End what is under way; what came of it, an error as well, is dropped."""
        if self._future is None:
            return
        self._stop.set()
        self._future.exception()  # waits
        self._future = None
        self._window = None

    def close(self) -> None:
        """End the thread."""
        self.stop()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
