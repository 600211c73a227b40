"""A run of a study trains what its config says, as a run of its own does."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import ziggurat as zg
from tests.training.test_label_weights import run_config
from ziggurat.recipes.protocols import Protocol
from ziggurat.runs.execute import prepare_run
from ziggurat.studies.compare_runs import RunRequest, finish_run
from ziggurat.training.label_weights import LabelWeights
from ziggurat.training.report.progress import NoProgress


def test_a_compared_run_learns_them_as_a_run_of_its_own_does(tmp_path: Path) -> None:
    """Studies trained without the learned weights, and their configs said that they had them."""
    config = run_config(tmp_path)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, split=zg.SplitConfig(by=zg.SplitBy.RANDOM))
    )
    prepared = prepare_run(config)
    labels = {}
    for weights in LabelWeights:
        each = dataclasses.replace(config, label_weights=weights)
        folder = tmp_path / f"compared-{weights.value}"
        request = RunRequest(
            model="mmoe", variant=0, config=each, folder=folder, metric="auc/click", protocol=Protocol.RECIPE
        )
        record = finish_run(request, data=prepared, read_test=True, progress=NoProgress())
        zg.train_run(each, folder=tmp_path / f"own-{weights.value}")
        evaluation = zg.load_run(tmp_path / f"own-{weights.value}").evaluate_split("test")
        for name in ("log_loss/click", "log_loss/like"):
            assert record.test[name] == pytest.approx(evaluation.metrics[name], rel=1e-6)
        labels[weights] = (record.test["log_loss/click"], record.digest)
    given, learned = labels[LabelWeights.GIVEN], labels[LabelWeights.UNCERTAINTY]
    assert given[0] != learned[0]
    assert given[1] != learned[1], "a folder of the one is no folder of the other"
