"""The ledger: finds a lost, a doubled and a reordered row; survives kills; goes on after a resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.ledger import Ledger, expected_sum, read_ledger, verify_ledgers
from ziggurat.data.encoded.loader import Loader, LoaderConfig
from ziggurat.errors import CheckpointError, MissingFileError
from ziggurat.ops.rows import hash_rows
from ziggurat.testing.encoded_examples import PLAIN, plain_table

HEADER, RECORD = 24, 40
NUM_ROWS = 1000


def record_epochs(path, epochs: int, *, first_step: int = 0, batches=None) -> None:
    """What a trainer does: batches of 100 rows."""
    with Ledger(path) as ledger:
        step = first_step
        for epoch in range(epochs):
            for rows in batches or np.split(np.random.default_rng(epoch).permutation(NUM_ROWS), 10):
                step += 1
                ledger.append(epoch=epoch, step=step, row_ids=rows)


def report(path):
    return verify_ledgers([path], num_rows=NUM_ROWS, row_sum=expected_sum(np.arange(NUM_ROWS)))


def test_whole_epochs_are_proven(tmp_path):
    path = tmp_path / "ledger.bin"
    record_epochs(path, 3)
    assert path.stat().st_size == HEADER + 30 * RECORD
    result = report(path)
    assert result.good
    assert [entry.exact for entry in result.epochs] == [True] * 3
    assert result.lines()[0] == "epoch 1: 1,000 rows in 10 steps: every row exactly once"


def test_hashes_are_frozen():
    rows = np.array([0, 1, 5, 2**40])
    assert (expected_sum(rows), hash_rows(rows)[0]) == FROZEN
    assert expected_sum(np.empty(0, dtype=np.int64)) == 0


FROZEN = (0xF60B825B9ABAB153, 0x7F3BB98D0A8B3471)


@given(st.lists(st.integers(0, 2**62), max_size=50), st.randoms())
def test_sum_ignores_the_order_and_the_ordered_hash_does_not(rows, random):
    shuffled = rows.copy()
    random.shuffle(shuffled)
    left, right = np.array(rows, dtype=np.int64), np.array(shuffled, dtype=np.int64)
    assert expected_sum(left) == expected_sum(right)
    assert (hash_rows(left)[0] == hash_rows(right)[0]) == (rows == shuffled)


@pytest.mark.parametrize("fault", ["lost", "twice", "swapped for another", "extra"])
def test_every_kind_of_wrong_row_is_found(tmp_path, fault):
    batches = np.split(np.arange(NUM_ROWS), 10)
    if fault == "lost":
        batches[3] = batches[3][1:]
    elif fault == "twice":
        batches[3] = np.append(batches[3][1:], 0)
    elif fault == "swapped for another":
        batches[3] = np.append(batches[3][1:], NUM_ROWS)
    else:
        batches[3] = np.append(batches[3], 0)
    path = tmp_path / "ledger.bin"
    record_epochs(path, 2, batches=batches)
    result = report(path)
    assert not result.good
    assert "epoch 1 trained" in result.problems[0]
    assert not result.epochs[0].exact


def test_last_epoch_may_be_partial_and_earlier_ones_may_not(tmp_path):
    path = tmp_path / "ledger.bin"
    record_epochs(path, 2)
    with Ledger(path) as ledger:
        ledger.truncate(14)
    result = report(path)
    assert result.good
    assert "partial, 400 of 1,000 rows" in result.lines()[1]
    with Ledger(path) as ledger:
        ledger.append(epoch=2, step=15, row_ids=np.arange(5))
    assert not report(path).good


def test_gap_in_the_steps_is_found(tmp_path):
    path = tmp_path / "ledger.bin"
    with Ledger(path) as ledger:
        ledger.append(epoch=0, step=1, row_ids=np.arange(500))
        ledger.append(epoch=0, step=3, row_ids=np.arange(500, 1000))
    assert any("step 3 follows step 1" in problem for problem in report(path).problems)


def test_ledgers_of_ranks_add_up(tmp_path):
    dataset = MemoryDataset(plain_table(NUM_ROWS), PLAIN, rows_per_group=90)
    paths = [tmp_path / f"ledger_{rank}.bin" for rank in range(3)]
    for rank, path in enumerate(paths):
        loader = Loader(dataset, config=LoaderConfig(batch_size=64), rank=rank, world_size=3)
        with Ledger(path) as ledger:
            for step, batch in enumerate(loader.batches(epoch=0), start=1):
                ledger.append(epoch=0, step=step, row_ids=batch.row_ids.numpy())
    result = verify_ledgers(paths, num_rows=dataset.num_rows, row_sum=dataset.row_sum)
    assert result.good
    assert result.epochs[0].exact
    assert not verify_ledgers(paths[:2], num_rows=NUM_ROWS, row_sum=dataset.row_sum).epochs[0].exact


def test_resume_makes_the_same_bytes(tmp_path):
    whole, cut = tmp_path / "whole.bin", tmp_path / "cut.bin"
    record_epochs(whole, 3)
    record_epochs(cut, 1)
    with Ledger(cut) as ledger:
        ledger.truncate(7)
        assert ledger.last_step == 7
        step = 0
        for epoch in range(3):
            for rows in np.split(np.random.default_rng(epoch).permutation(NUM_ROWS), 10):
                step += 1
                if step > 7:
                    ledger.append(epoch=epoch, step=step, row_ids=rows)
    assert cut.read_bytes() == whole.read_bytes()


def test_truncate_sees_what_was_not_flushed_yet(tmp_path):
    with Ledger(tmp_path / "ledger.bin") as ledger:
        for step in (1, 2, 3):
            ledger.append(epoch=0, step=step, row_ids=np.arange(5))
        ledger.truncate(2)
        ledger.append(epoch=0, step=3, row_ids=np.arange(7))
    assert read_ledger(tmp_path / "ledger.bin")["num_rows"].tolist() == [5, 5, 7]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_torn_end_is_dropped_wherever_it_tears(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("torn") / "ledger.bin"
    record_epochs(path, 1)
    content = path.read_bytes()
    size = data.draw(st.integers(0, len(content)))
    zeros = data.draw(st.integers(0, 100))  # what a file system may leave after a power cut
    path.write_bytes(content[:size] + bytes(zeros if size < len(content) else 0))
    num_whole = max(size - HEADER, 0) // RECORD
    with Ledger(path) as ledger:
        assert ledger.last_step == num_whole
        if size >= HEADER:
            assert ledger.dropped_bytes == path_bytes(size, zeros, len(content)) - HEADER - num_whole * RECORD
        ledger.append(epoch=0, step=num_whole + 1, row_ids=np.arange(3))
    assert read_ledger(path)["step"].tolist() == list(range(1, num_whole + 2))


def path_bytes(size: int, zeros: int, full: int) -> int:
    return size + (zeros if size < full else 0)


@settings(deadline=None, max_examples=50)
@given(st.integers(HEADER, HEADER + 9 * RECORD - 1), st.integers(0, 7))
def test_flipped_bit_before_the_end_is_damage(tmp_path_factory, byte, bit):
    path = tmp_path_factory.mktemp("flip") / "ledger.bin"
    record_epochs(path, 1)
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"record {(byte - HEADER) // RECORD} is damaged"):
        Ledger(path)


def test_other_files_are_not_taken_for_a_ledger(tmp_path):
    path = tmp_path / "ledger.bin"
    for content in (b"something else entirely, and long enough", b"short"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="another file"):
            Ledger(path)
        assert path.read_bytes() == content
    with pytest.raises(MissingFileError):
        read_ledger(tmp_path / "absent.bin")


WRITER = """
import sys, numpy as np
from ziggurat.data.encoded.ledger import Ledger
ledger = Ledger(sys.argv[1])
print("ready", flush=True)
step = ledger.last_step
while True:
    step += 1
    ledger.append(epoch=0, step=step, row_ids=np.arange(step, step + 3))
    if step % 7 == 0:
        ledger.flush()
"""


def test_kill_9_while_writing_loses_no_flushed_record(tmp_path):
    path = tmp_path / "ledger.bin"
    last = 0
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        size = path.stat().st_size
        deadline = time.monotonic() + 60.0
        while path.stat().st_size == size and time.monotonic() < deadline:  # until something was flushed
            time.sleep(0.01)
        time.sleep(0.03)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with Ledger(path) as ledger:
            assert ledger.last_step > last
            last = ledger.last_step
    assert read_ledger(path)["step"].tolist() == list(range(1, last + 1))
