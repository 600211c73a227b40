"""Streams that are killed while they publish: a reader that polls sees whole versions alone, and each window once.

The reader runs all the time. Whatever the pointer names it loads, with digests and golden answers, and compares its
weights with those of a stream that nobody killed: never half a version, never another one. At the end all versions have
the digests of that stream. One that dies in its own process goes through windows with corrections of late labels.
"""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
import random
import time
from pathlib import Path

import pytest

from tests.killing import Polling, kill_after, mark_begin
from tests.runs.stream.test_delayed_streams import delay_of, delayed_events
from tests.runs.stream.test_killed_streams import Moments
from tests.runs.stream.test_published_streams import same_bits, whole_state
from tests.runs.stream.test_stream_runs import config_of, events
from ziggurat.data.streams.windows import StreamConfig
from ziggurat.errors import MissingFileError, ZigguratError
from ziggurat.runs.stream.publish import PublishConfig
from ziggurat.runs.stream.run import stream_run
from ziggurat.serving.export.export_folder import read_manifest
from ziggurat.serving.export.published_folder import is_published, read_pointer, version_folder
from ziggurat.serving.recommender import Recommender
from ziggurat.testing.ranks import preload
from ziggurat.training.delayed_feedback import DelayedConfig
from ziggurat.training.delayed_losses import DelayedLoss
from ziggurat.training.hooks.hook import Hook
from ziggurat.training.trainer import Trainer

_context = mp.get_context("forkserver")
MAX_LIFE_S = 300.0


def live(base: str, name: str) -> None:
    """Stream and publish to the end, from wherever the folders stand."""
    config = config_of(Path(base) / "a.parquet")
    publish = PublishConfig(folder=f"{base}/{name}-live", max_deltas=2, max_delta_share=100.0)
    mark_begin(Path(base))
    stream_run(config, folder=f"{base}/{name}", stream=StreamConfig(by="day", growing=60), publish=publish)


def digests_of(folder: Path) -> list[str]:
    return [each.version for each in read_pointer(folder).versions]


class Starts(Hook):
    """Notes the step that each life begins with, and whether that is within a window."""

    def __init__(self) -> None:
        self.inside = 0

    def on_start(self, trainer: Trainer) -> None:
        """Count a life that goes on within a window."""
        self.inside += trainer.position.step_in_epoch > 0


def live_with_late_labels(base: Path, name: str, *, starts: Starts) -> None:
    """Stream and publish rows whose labels come late, with tables that grow and checkpoints within windows."""
    config = dataclasses.replace(config_of(base / "a.parquet"), delayed=DelayedConfig(loss=DelayedLoss.ES_DFM))
    stream_run(
        config,
        folder=base / name,
        stream=StreamConfig(by="day", growing=60, delay=delay_of(observe_s=3600.0)),
        publish=PublishConfig(folder=f"{base}/{name}-live", max_deltas=2, max_delta_share=100.0),
        hooks=(starts,),
    )


class Reader(Polling):
    """Polls a published folder, loads what the pointer names, and compares it with what each window should be."""

    def __init__(self, folder: Path, *, reference: Path) -> None:
        super().__init__(pause_s=0.002)
        self._folder = folder
        self._expected = {
            each.name: whole_state(version_folder(reference, each.number)) for each in read_pointer(reference).versions
        }
        self.seen: dict[str, str] = {}  # window by version
        self.polls = 0
        self._latest = 0

    def look(self) -> None:
        """Load what the pointer names, if that is a version which was not seen yet."""
        if not is_published(self._folder):
            return
        self.polls += 1
        try:
            pointer = read_pointer(self._folder)
            current = pointer.version(pointer.current)
            assert current is not None
            if current.version in self.seen:
                return
            loaded = Recommender.load(version_folder(self._folder, current.number))
            if loaded.version != current.version:
                self.problems.append(f"{current.number} is {loaded.version}")
            state = dict(loaded.chain.needed_ranker.packed.model.state_dict())
            if not same_bits(state, self._expected[current.name]):
                self.problems.append(f"{current.number} has other weights than {current.name}")
            if current.number < self._latest:
                self.problems.append(f"{current.number} after {self._latest}")
            self._latest = current.number
            self.seen[current.version] = current.name
        except MissingFileError:
            self.problems.append("a version is gone")
        except ZigguratError as error:
            self.problems.append(str(error))


def is_publishing(folder: Path) -> bool:
    """Whether a version is being written just now."""
    try:
        return any(each.name.startswith(".0") for each in os.scandir(folder / "versions"))
    except OSError:
        return False


def kill_while_publishing(base: Path, name: str, *, rng: random.Random) -> bool:
    """Start a life of the stream and kill it within a publication; False if it came to its end before."""
    process = _context.Process(target=live, args=(str(base), name))
    process.start()
    number = rng.randint(1, 3)
    was = False
    while process.is_alive() and number:
        now = is_publishing(base / f"{name}-live")
        number -= now and not was
        was = now
        time.sleep(0.0005)
    # Anywhere between the first file of the version and some time behind the pointer.
    return kill_after(process, rng.uniform(0.0, 0.25), longest_s=MAX_LIFE_S)


def check_kills(base: Path, *, kills: int, seed: int) -> dict[str, int]:
    """Kill publishing streams until there were so many kills; count kills, streams, half versions and versions seen."""
    preload()
    events(600, days=6).write_parquet(base / "a.parquet")
    live(str(base), "whole")
    rng = random.Random(seed)
    counts = {"kills": 0, "streams": 0, "half": 0, "seen": 0, "polls": 0}
    while counts["kills"] < kills:
        counts["streams"] += 1
        name = f"cut-{counts['streams']}"
        folder = base / f"{name}-live"
        with Reader(folder, reference=base / "whole-live") as reader:
            while counts["kills"] < kills and kill_while_publishing(base, name, rng=rng):
                counts["kills"] += 1
                counts["half"] += is_publishing(folder)
            live(str(base), name)
            time.sleep(0.05)
        assert reader.problems == []
        versions = read_pointer(folder).versions
        assert [each.version for each in versions] == digests_of(base / "whole-live")
        assert [each.window for each in versions] == [1, 2, 3, 4, 5, 6]
        assert sorted(os.listdir(folder / "versions")) == [f"{each.number:06}" for each in versions]
        assert not is_publishing(folder)
        counts["seen"] += len(reader.seen)
        counts["polls"] += reader.polls
    return counts


@pytest.mark.slow
def test_kills_while_publishing_show_nobody_half_a_version(tmp_path: Path) -> None:
    counts = check_kills(tmp_path, kills=60, seed=4)
    assert counts["half"] > 10, counts
    print(f"\n{counts}: no half version, none twice, none with other weights")


def test_a_kill_while_publishing_leaves_what_the_next_start_removes(tmp_path: Path) -> None:
    counts = check_kills(tmp_path, kills=2, seed=1)
    assert counts["kills"] == 2


def test_versions_of_a_stream_that_dies_within_windows_are_those_of_one_that_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed_events(400, days=4).write_parquet(tmp_path / "a.parquet")
    live_with_late_labels(tmp_path, "whole", starts=Starts())
    rng = random.Random(5)
    starts = Starts()
    with monkeypatch.context() as patch:
        moments = Moments(patch)
        lives = moments.die_until_done(
            lambda: live_with_late_labels(tmp_path, "cut", starts=starts), rng=rng, least=10, most=60, waits=True
        )
        moments.wait()
    assert lives > 4
    assert starts.inside > 1
    ours = read_pointer(tmp_path / "cut-live").versions
    assert [each.window for each in ours] == [1, 2, 3, 4]
    assert digests_of(tmp_path / "cut-live") == digests_of(tmp_path / "whole-live")
    for each in ours:
        folders = [version_folder(tmp_path / name, each.number) for name in ("cut-live", "whole-live")]
        assert same_bits(*map(whole_state, folders))
        # The digest of the run's settings is no part of the version's: it stands in the manifest.
        sources = [read_manifest(folder).manifest.sources[0].config for folder in folders]
        assert sources[0] == sources[1]
