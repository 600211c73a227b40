"""Any source of batches trains and resumes: shuffled by itself, on one device, on ranks that have unequal shares."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.own_sources import ShuffledBlocks, SizedBlocks, all_rows, train_blocks
from tests.training.rank_runs import Case, model_of, training_config
from ziggurat.data.encoded.dataset import MemoryDataset
from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
from ziggurat.data.source import state_from_json, state_to_json
from ziggurat.errors import CheckpointError, ConfigError, DataError
from ziggurat.testing.encoded_examples import PLAIN, plain_table
from ziggurat.testing.ranks import run_ranks
from ziggurat.training.config import Decay, ScheduleConfig, TrainingConfig
from ziggurat.training.feed import Feed
from ziggurat.training.position import Position
from ziggurat.training.trainer import Trainer

NUM_STEPS = 2 * 7  # two epochs of 100 samples in blocks of 16


def trainer_on(source: Any, folder: Path, **changes: Any) -> Trainer:
    return Trainer(model_of(Case()), config=training_config(1, **changes), train=source, folder=folder)


def test_a_source_is_resumed_where_it_stood(tmp_path: Path) -> None:
    """Stopped in the second epoch after every possible step, and gone on from the checkpoint before: the same bits."""
    whole, rows, steps = train_blocks(0, 1, str(tmp_path / "whole"), 0, False, [100])
    assert (rows, steps) == (200, NUM_STEPS)
    for stop in (3, 8, 11):
        train_blocks(0, 1, str(tmp_path / f"{stop}"), stop, False, [100])
        again, _, _ = train_blocks(0, 1, str(tmp_path / f"{stop}"), 0, True, [100])
        assert again == whole, stop


def test_samples_that_all_count_nothing_are_refused_after_their_pass(tmp_path: Path) -> None:
    samples = all_rows(96)
    weights = torch.zeros(96)
    source = ShuffledBlocks(dataclasses.replace(samples, weights=weights), block=32, seed=0)
    with pytest.raises(DataError, match="weights are all 0"):
        trainer_on(source, tmp_path / "none").fit()
    weights[95] = 0.5
    source = ShuffledBlocks(dataclasses.replace(samples, weights=weights), block=32, seed=0)
    trainer_on(source, tmp_path / "some").fit()


def test_a_source_that_counts_epochs_skips_none(tmp_path: Path) -> None:
    """Stopped at the end of an epoch and inside one, on one device."""
    whole = train_blocks(0, 1, str(tmp_path / "whole"), 0, False, [100], True)
    assert whole[1:] == (200, NUM_STEPS)
    for stop in (7, 9):
        train_blocks(0, 1, str(tmp_path / f"{stop}"), stop, False, [100], True)
        assert train_blocks(0, 1, str(tmp_path / f"{stop}"), 0, True, [100], True) == whole, stop


@pytest.mark.slow
def test_ranks_of_which_one_waits_for_the_other_skip_no_epoch(tmp_path: Path) -> None:
    whole_ranks = run_ranks(train_blocks, 2, 2, str(tmp_path / "ranks"), 0, False, [100, 50], True, timeout_s=240.0)
    for stop in (6, 7):
        run_ranks(train_blocks, 2, 2, str(tmp_path / f"ranks{stop}"), stop, False, [100, 50], True, timeout_s=240.0)
        again = run_ranks(train_blocks, 2, 2, str(tmp_path / f"ranks{stop}"), 0, True, [100, 50], True, timeout_s=240.0)
        assert again == whole_ranks, stop


def test_ranks_with_unequal_shares_stop_together_and_resume(tmp_path: Path) -> None:
    """Rank 1 has half as many samples: it joins with empty batches. Resumed on two ranks, refused on one."""
    folder, sizes = str(tmp_path / "run"), [100, 50]
    results = run_ranks(train_blocks, 2, 2, str(tmp_path / "whole"), 0, False, sizes)
    assert [result[1:] for result in results] == [(300, NUM_STEPS)] * 2
    run_ranks(train_blocks, 2, 2, folder, 5, False, sizes)
    resumed = run_ranks(train_blocks, 2, 2, folder, 0, True, sizes)
    assert resumed == results
    with pytest.raises(CheckpointError, match="2 in the checkpoint"):
        train_blocks(0, 1, folder, 0, True, [100])


def test_a_schedule_needs_an_end(tmp_path: Path) -> None:
    linear = ScheduleConfig(decay=Decay.LINEAR)
    stream = ShuffledBlocks(all_rows(40), block=16, seed=0)
    with pytest.raises(ConfigError, match="max_steps"):
        trainer_on(stream, tmp_path / "a", schedule=linear)
    assert trainer_on(stream, tmp_path / "b", schedule=linear, max_steps=9).total_steps == 9
    sized = SizedBlocks(all_rows(40), block=16, seed=0)
    trainer = trainer_on(sized, tmp_path / "c", schedule=linear)
    assert trainer.total_steps == 2 * 3
    assert trainer.fit().steps == 6


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="StatefulDataLoader"):
        trainer_on([all_rows(8)], tmp_path)
    source = ShuffledBlocks(all_rows(40), block=16, seed=0)
    source.state_dict = lambda: {"position": object()}  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="pickles"):
        trainer_on(source, tmp_path).fit()


def test_states_survive_json_exactly() -> None:
    source = ShuffledBlocks(all_rows(40), block=16, seed=0)
    next(iter(source))
    state = source.state_dict()
    again = state_from_json(state_to_json(state))
    assert again.keys() == state.keys()
    assert (again["order"], again["note"], again[3]) == (state["order"], state["note"], state[3])
    assert again["generator"].equal(state["generator"])
    for broken in ({"__tensor__": "?", "dtype": "uint8", "shape": [1]}, {"__array__": ""}, {"other": 1}):
        with pytest.raises(CheckpointError, match="data source"):
            state_from_json(broken)


def test_a_run_goes_on_in_the_order_that_it_began_with(tmp_path: Path) -> None:
    dataset = MemoryDataset(plain_table(640), PLAIN, rows_per_group=64)

    def feed(shuffle: Shuffle) -> Feed:
        config = TrainingConfig(loader=LoaderConfig(batch_size=64, shuffle=shuffle, shuffle_buffer_rows=256))
        return Feed(dataset, config=config, rank=0, world_size=1, gather=lambda said: [said])

    fresh = feed(Shuffle.AUTO)
    assert fresh.shuffle == "lanes"
    for saved, expected in (("", "buffer"), ("buffer", "buffer"), ("lanes", "lanes"), ("sessions", "sessions")):
        resumed = feed(Shuffle.AUTO)
        resumed.restore(Position(step=1, rows=64, shuffle=saved), where="step 1")
        assert resumed.shuffle == expected
    resumed = feed(Shuffle.AUTO)
    resumed.restore(Position.from_json({"step": 1, "rows": 64}), where="step 1")  # as it was before there were lanes
    old = Loader(dataset, config=LoaderConfig(batch_size=64, shuffle=Shuffle.BUFFER, shuffle_buffer_rows=256))
    batch, wanted = next(iter(resumed.source)), list(old.batches(epoch=0))[1]
    assert batch.row_ids.tolist() == wanted.row_ids.tolist()
    with pytest.raises(ConfigError, match="shuffle = lanes"):
        feed(Shuffle.LANES).restore(Position(step=1, rows=64, shuffle="buffer"), where="step 1")


def test_ranks_cut_no_block_of_samples_that_a_loss_couples() -> None:
    """Where batches cross windows, and in the last one, too: the samples of all ranks stand as on one device."""
    dataset = MemoryDataset(plain_table(600), PLAIN, rows_per_group=64)

    def steps(coupled: int, world_size: int) -> list[list[list[int]]]:
        config = TrainingConfig(loader=LoaderConfig(batch_size=96 // world_size, shuffle_buffer_rows=256, prefetch=0))
        found = []
        for rank in range(world_size):
            ranks = {"rank": rank, "world_size": world_size, "gather": lambda said: [said]}
            source = Feed(dataset, config=config, coupled=coupled, **ranks).source
            found.append([batch.row_ids.tolist() for batch in source])
        return [list(each) for each in zip(*found, strict=True)]

    for coupled, is_equal in ((16, True), (1, False)):
        alone, parted = steps(coupled, 1), steps(coupled, 3)
        assert len(alone) == len(parted) == 7
        assert ([[*itertools.chain(*ranks)] for ranks in parted] == [rows for (rows,) in alone]) is is_equal
        assert [sorted(itertools.chain(*ranks)) for ranks in parted] == [sorted(rows) for (rows,) in alone]
