"""The background iterator: same items, errors in their place, no thread left behind."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from ziggurat.data.background import in_background


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "test-background"]


def gone() -> bool:
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads()


@pytest.mark.parametrize("depth", [1, 7])
def test_same_items_in_the_same_order(depth):
    assert list(in_background(iter(range(100)), depth=depth, name="test-background")) == list(range(100))
    assert gone()


def test_none_is_an_item_like_any_other():
    assert list(in_background(iter([None, None]), depth=1, name="test-background")) == [None, None]


def test_error_comes_after_the_items_before_it():
    def items():
        yield 1
        yield 2
        raise KeyError("third")

    seen = []
    with pytest.raises(KeyError, match="third"):
        seen.extend(in_background(items(), depth=5, name="test-background"))
    iterator = in_background(items(), depth=5, name="test-background")
    assert (next(iterator), next(iterator)) == (1, 2)
    with pytest.raises(KeyError):
        next(iterator)
    assert gone()


def test_works_ahead_by_the_depth_and_no_further():
    made = []

    def items():
        for item in range(100):
            made.append(item)
            yield item

    iterator = in_background(items(), depth=3, name="test-background")
    assert made == []
    next(iterator)
    deadline = time.monotonic() + 60
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(made) == 5  # one taken, three in the queue, one in hand
    iterator.close()
    assert gone()


@pytest.mark.parametrize("how", ["close", "drop", "break"])
def test_stopping_early_closes_the_source(how):
    closed = []

    def items():
        try:
            yield from range(1000)
        finally:
            closed.append(threading.current_thread().name)

    iterator = in_background(items(), depth=1, name="test-background")
    next(iterator)
    if how == "close":
        iterator.close()
    elif how == "break":
        for _ in iterator:
            break
        del iterator, _
    else:
        del iterator
    gc.collect()
    assert gone()
    assert closed == ["test-background"]


def test_stages_chain():
    first = in_background(iter(range(50)), depth=2, name="test-background")
    second = in_background((item * 2 for item in first), depth=2, name="test-background")
    assert next(second) == 0
    second.close()
    del first
    gc.collect()
    assert gone()
