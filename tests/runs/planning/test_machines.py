"""Base steps of `ziggurat plan --tiers`: searches that were cut short are repeated, and said."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.plan_model import PlanSettings
from ziggurat.planning.problem import TableProfile
from ziggurat.runs.planning import machines

TABLE = TableProfile(name="t", num_rows=1_000_000, dim=64, pooling_factor=1.0)
MODEL = SimpleNamespace(work=SimpleNamespace(tables=[TABLE]))


@pytest.mark.parametrize(
    ("enough_s", "budgets", "step_s", "is_said"),
    [(1.0, [3.0], 0.3, False), (10.0, [3.0, 12.0], 0.2, False), (1e9, [3.0, 12.0], 0.2, True)],
)
def test_a_search_that_was_cut_short_is_given_more_time(
    enough_s: float, budgets: list[float], step_s: float, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def planned(model: object, cluster: Cluster, *, settings: PlanSettings) -> SimpleNamespace:
        assert cluster.device.memory_bytes > 8 * TABLE.num_rows * TABLE.dim * 4
        given.append(settings.budget_s)
        found = SimpleNamespace(step_s=0.3 if settings.budget_s < 5 else 0.2)
        return SimpleNamespace(timeline=found, settled=settings.budget_s >= enough_s)

    monkeypatch.setattr(machines, "plan_model", planned)
    base = machines._BaseSteps(MODEL, PlanSettings(budget_s=3.0))  # type: ignore[arg-type]  # stands for a model
    assert base.step_s(named_cluster("h100x64")) == step_s
    assert given == budgets
    said = " ".join(base.notes())
    assert ("of 8 hosts: the searches were cut short" in said) is is_said
    assert "compare samples/s" in said
