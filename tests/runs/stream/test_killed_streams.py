"""Streams that die at random moments end with the same weights, windows.jsonl and ledger, and no row is trained twice.

The everyday test lets one die inside of reading, fitting, encoding, scoring, training and saving; the long one kills a
process that has no say in it, a hundred times.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.killing import kill_after, mark_begin, wait_for_begin
from tests.runs.stream.test_stream_runs import config_of, content_of, events, same, weights_of
from ziggurat.data.encoded.dataset import EncodedWriter
from ziggurat.data.encoded.ledger import expected_sum, read_ledger
from ziggurat.data.streams.kept_rows import KeptRows
from ziggurat.data.streams.row_spool import RowSpool
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import CheckpointError
from ziggurat.runs.stream.run import stream_run
from ziggurat.runs.verify import verify_run
from ziggurat.testing.ranks import preload
from ziggurat.training.checkpoint import CheckpointStore
from ziggurat.training.config import AverageOver, Decay, ScheduleConfig
from ziggurat.training.records.windows import WindowsFile
from ziggurat.training.step.train_step import TrainStep
from ziggurat.training.trainer import Trainer

_context = mp.get_context("forkserver")

NUM_ROWS = 3000
MAX_LIFE_S = 120.0


def live(folder: str) -> None:
    """Stream to the end, from wherever the folder stands; with all that begins anew in a window."""
    base = Path(folder).parent
    mark_begin(base)
    schedule = ScheduleConfig(rewarm_steps=3, decay=Decay.INVERSE_SQRT, decay_steps=50)
    config = config_of(
        base / "a.parquet", base / "b.parquet", schedule=schedule, average_over=AverageOver.WINDOW, forget=0.3
    )
    stream_run(config, folder=folder, stream=StreamConfig(by="day", growing=60))


def files_in(base: Path, *, num_rows: int) -> None:
    frame = events(num_rows, days=6)
    half = num_rows // 2 + 100
    frame[:half].write_parquet(base / "a.parquet", row_group_size=300)
    frame[half:].write_parquet(base / "b.parquet")


def kill_once(folder: Path, *, rng: random.Random, longest_s: float) -> bool:
    """Start a life of the stream and kill it; False if it came to its end before."""
    process = _context.Process(target=live, args=(str(folder),))
    process.start()
    wait_for_begin(process, folder.parent)
    return kill_after(process, rng.uniform(0.0, longest_s), longest_s=MAX_LIFE_S)


def check_kills(base: Path, *, kills: int, seed: int) -> dict[str, int]:
    """Kill streams until there were so many kills; count them, streams, and kills behind the first checkpoint."""
    preload()
    files_in(base, num_rows=NUM_ROWS)
    whole = base / "whole"
    process = _context.Process(target=live, args=(str(whole),))
    process.start()
    process.join(MAX_LIFE_S)
    assert process.exitcode == 0
    begin = time.monotonic()
    live(str(base / "timed"))
    longest_s = time.monotonic() - begin
    rng = random.Random(seed)
    counts = {"kills": 0, "streams": 0, "windows": 0}
    while counts["kills"] < kills:
        counts["streams"] += 1
        folder = base / f"cut-{counts['streams']}"
        while counts["kills"] < kills and kill_once(folder, rng=rng, longest_s=longest_s):
            counts["kills"] += 1
            counts["windows"] += any((folder / "checkpoints").glob("step-*"))
        live(str(folder))
        assert_same_streams(folder, whole, num_rows=NUM_ROWS)
    return counts


def assert_same_streams(folder: Path, whole: Path, *, num_rows: int) -> None:
    assert content_of(folder) == content_of(whole)
    assert same(weights_of(folder), weights_of(whole))
    assert (folder / "ledger.bin").read_bytes() == (whole / "ledger.bin").read_bytes()
    ledger = read_ledger(folder / "ledger.bin")
    assert int(ledger["sum"].sum(dtype=np.uint64)) == expected_sum(np.arange(num_rows))
    assert verify_run(folder).good


class Moments:
    """Lets a stream die at a moment of its life, before or behind a call that changes what is on the disk."""

    CALLS: tuple[tuple[Any, str], ...] = (
        (KeptRows, "save"),
        (RowSpool, "write"),
        (EncodedWriter, "append"),
        (EncodedWriter, "close"),
        (WindowsFile, "append"),
        (Trainer, "evaluate"),
        (Trainer, "answer"),
        (Trainer, "save"),
        (TrainStep, "__call__"),
    )

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left = 0
        self.died_in: set[str] = set()
        self.stores: list[CheckpointStore] = []
        for owner, name in self.CALLS:
            patch.setattr(owner, name, self._counted(getattr(owner, name), f"{owner.__name__}.{name}"))

    def _counted(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if isinstance(args[0], Trainer):
                self.stores.append(args[0].store)
            self._pass(name)
            found = call(*args, **kwargs)
            self._pass(name)
            return found

        return counted

    def _pass(self, name: str) -> None:
        # The thread that encodes ahead dies with its process: an error in it is another matter (test_encode_ahead.py).
        if threading.current_thread() is not threading.main_thread():
            return
        self.left -= 1
        if self.left == 0:
            self.died_in.add(name)
            raise KeyboardInterrupt

    def die_until_done(
        self, live: Callable[[], object], *, rng: random.Random, least: int, most: int, waits: bool = False
    ) -> int:
        """Let a stream die again and again at random moments until it comes to its end; return the number of lives.

        Args:
            live: runs the stream.
            rng: draws after how many moments it dies.
            least: of these moments.
            most: of these moments.
            waits: call `wait` after each death.
        """
        lives = 0
        while True:
            self.left = rng.randint(least, most)
            lives += 1
            try:
                live()
                return lives
            except KeyboardInterrupt:
                if waits:
                    self.wait()

    def wait(self) -> None:
        """Wait for what a life still saves: a process that is killed writes nothing behind the back of the next."""
        for store in self.stores:
            with contextlib.suppress(CheckpointError):
                store.wait()
        self.stores = []


def test_a_stream_that_dies_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files_in(tmp_path, num_rows=500)
    live(str(tmp_path / "whole"))
    rng = random.Random(3)
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(lambda: live(str(tmp_path / "cut")), rng=rng, least=1, most=24, waits=True)
    assert lives > 6
    assert len(moments.died_in) > 4, moments.died_in
    assert_same_streams(tmp_path / "cut", tmp_path / "whole", num_rows=500)


@pytest.mark.slow
def test_a_hundred_kills_change_no_bit(tmp_path: Path) -> None:
    counts = check_kills(tmp_path, kills=100, seed=2)
    assert counts["windows"] > 30, counts
    print(f"\n{counts}: all ended as the stream that was left alone")
