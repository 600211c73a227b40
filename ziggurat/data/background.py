"""Iterate in a background thread: the next items are made while the present one is used.

Reading and decoding (pyarrow), parsing (polars) and gathering (numpy) release the interpreter lock, so a thread is
enough to overlap them with training, and stages can be chained: read ─► encode ─► write, each in its own thread.

    consumer   next() ◄── queue of at most `depth` items ◄── thread: for item in items: put

An exception in the thread is raised by the consumer's `next`, after the items made before it. Closing or dropping the
iterator stops the thread and closes `items` in it. No thread starts before the first `next`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_POLL_S = 0.05


@dataclass(frozen=True)
class _Failure:
    error: BaseException


@dataclass(frozen=True)
class _End:
    pass


def in_background(items: Iterator[T], *, depth: int, name: str) -> Generator[T]:
    """The same items, made by a thread that is at most `depth` + 1 of them ahead.

    Args:
        items: what to iterate; from the first `next` on it belongs to the thread.
        depth: items that wait in the queue, at least 1.
        name: of the thread.
    """
    ready: queue.Queue[T | _Failure | _End] = queue.Queue(maxsize=depth)
    stop = threading.Event()
    thread = threading.Thread(target=_work, args=(items, ready, stop), name=name, daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stop.set()
        thread.join()


def _work(items: Iterator[T], ready: queue.Queue[T | _Failure | _End], stop: threading.Event) -> None:
    """Body of the thread. Whatever ends it is reported through the queue, unless nobody listens any more."""

    def put(item: T | _Failure | _End) -> bool:
        while not stop.is_set():
            try:
                # In short turns: without a limit it would wait for ever once nobody reads the queue.
                ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    try:
        for item in items:
            if not put(item):
                break
        else:
            put(_End())
        # Closed here, because a generator cannot be closed by one thread while another one runs it.
        if isinstance(items, Generator):
            items.close()
    # Everything, an exit included: the consumer would wait for ever for what is not reported.
    except BaseException as error:
        put(_Failure(error))
