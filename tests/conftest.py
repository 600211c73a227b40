"""Every test runs on one thread: sums are then the same whatever the machine, and ranks do not fight for cores."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest

# What takes longest, in about this order: begun first, so that no process is left alone with one of them at the end.
LONG = (
    "tests/training/test_many_ranks.py",
    "tests/end_to_end/test_many_ranks.py",
    "tests/parallel/test_parity_of_models.py",
    "tests/parallel/tables/test_spread_tables.py",
    "tests/parallel/test_parity.py",
    "tests/studies/test_scaling.py",
    "tests/training/test_balanced_ranks.py",
    "tests/studies/test_compare_own.py",
    "tests/benchmarks/test_towers.py",
    "tests/benchmarks/test_datacentre.py",
    "tests/runs/test_own_models.py",
    "tests/runs/scores/test_next_items.py",
    "tests/training/test_moving_checkpoints.py",
    "tests/runs/test_initial_tables.py",
    "tests/end_to_end/test_main_job.py",
    "tests/end_to_end/test_towers.py",
    "tests/attacks/test_files.py",
    "tests/attacks/test_parity_attack.py",
)

# What ranks of tests import beside what all ranks do: half of the CPU time of a rank that trains by the command line.
LOADED_ONCE = (
    "fsspec.core",
    "pyarrow.dataset",
    "rich.live",
    "rich.progress",
    "rich.table",
    "scipy.cluster.hierarchy",
    "scipy.stats",
    "tensorboard.plugins.projector",
    "tensorboard.summary",
    "tomlkit",
    "torch.utils.tensorboard",
    "ziggurat.cli.verbs",
    "ziggurat.runs.quality.baselines",
    "ziggurat.serving.server.processes.supervisor",  # of servers, which are processes of the fork server, too
    "ziggurat.serving.server.serve",
    "tests.undrawn_reports",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of `LONG` first, then those of many tests; `--no-loadscope-reorder` keeps this order among processes."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    names = [item.nodeid.partition("::")[0] for item in items]
    place, count = {name: index for index, name in enumerate(LONG)}, Counter(names)
    ranks = {name: (place.get(name, len(LONG)), -count[name], index) for index, name in enumerate(dict.fromkeys(names))}
    items.sort(key=lambda item: ranks[item.nodeid.partition("::")[0]])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage among modules and tests, which stay to the end: a quarter of the time of their collection.

    What is there at its end is frozen: full garbage collections during tests took 0.6 s each to look at it again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    """Whichever test starts the fork server first, it loads what ranks import."""
    if "torch" in sys.modules or "tests.serving.server.running" in sys.modules:
        from ziggurat.testing.ranks import preload

        preload(*LOADED_ONCE)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest) -> None:
    """Have figures of reports drawn in tests marked `draws` alone; load no matplotlib where no report is written."""
    if page := sys.modules.get("ziggurat.training.report.page"):
        from tests.undrawn_reports import drawn, undrawn

        page.figure_svg = drawn if request.node.get_closest_marker("draws") else undrawn


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs of a small shop and their export, made once: see tests/serving/shop.py."""
    import torch

    from tests.serving.shop import make_shop
    from ziggurat.cache import cache_folder

    place = tmp_path_factory.mktemp("shop")
    torch.set_num_threads(1)
    (place / "cache").mkdir()
    (place / "cache" / "kernels").symlink_to(cache_folder() / "kernels")  # compiled once, and not for these tests
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZIGGURAT_CACHE", str(place / "cache"))
        yield make_shop(place)


@pytest.fixture(scope="session")
def loaded(shop: Any) -> Any:
    """The export of the shop."""
    import ziggurat

    return ziggurat.Recommender.load(shop.export)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the store `flaky://` does wrong from now on, nothing at first; waits for it take no time."""
    import fsspec

    from tests.files.flaky_store import Faults, FlakyFileSystem
    from ziggurat.files import store_reader

    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    FlakyFileSystem.faults = Faults()
    monkeypatch.setattr(store_reader, "pause", lambda seconds: None)
    yield FlakyFileSystem.faults
    FlakyFileSystem.store.clear()
