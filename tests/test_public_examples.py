"""`help()` of a public name teaches by an example, and each example runs as it stands."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest

import ziggurat as zg
from tests.studies.own_cache import cache_with_kernels
from ziggurat.training.report.progress import NoProgress

# Their help has no example yet, or the example is that of their config or of a guide.
WITHOUT = {
    *(
        "MODEL_CONFIGS",
        "DataSource",
        "Embedded",
        "Model",
        "ModelConfig",
        "HistoryInput",
        "Unpooled",
        "Loader",
        "Trainer",
    ),
    *(
        "Plan",
        "Topology",
        "TowerLayer",
        "TowerModuleKind",
        "parallelize",
        "Moments",
        "loss_sums",
        "wrap",
        "show_progress",
    ),
    *("Recommender", "Run", "export_run", "NextItem", "NextItemConfig", "SequenceRanker", "SequenceRankerConfig"),
    *("TwoTower", "TwoTowerConfig", "BSTConfig", "DIENConfig", "DINConfig", "OneTransConfig", "RankMixerConfig"),
    *("TransActConfig", "LightGCN", "LightGCNConfig"),
}
MODELS = {name.removesuffix("Config") for name in zg.__all__ if name.endswith("Config")}
NAMES = sorted(set(zg.__all__) - WITHOUT - MODELS)


def examples_of(name: str) -> list[doctest.Example]:
    text = inspect.getdoc(getattr(zg, name)) or ""
    return doctest.DocTestParser().get_examples(text.partition("Example:")[2])


def test_every_public_name_has_an_example_or_stands_in_the_list_of_those_that_have_none() -> None:
    assert not [name for name in NAMES if not examples_of(name)]
    assert not [name for name in WITHOUT if examples_of(name)], "take it off the list"


@pytest.mark.parametrize("name", NAMES)
def test_the_example_in_the_help_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache_with_kernels(tmp_path / "cache", monkeypatch)
    names = {"zg": zg, "silent": NoProgress()}
    test = doctest.DocTest(examples_of(name), names, name, None, None, None)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)
