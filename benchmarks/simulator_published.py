"""Predictions for published systems: MLPerf's DLRM and DLRM-DCNv2 on A100 and H100, and the towers paper's headline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ziggurat.planning.cluster.catalogue import named_cluster
from ziggurat.planning.cluster.cluster import Cluster
from ziggurat.planning.plan_model import ModelToPlace, PlannedModel, PlanSettings, plan_model
from ziggurat.planning.simulator.step_simulator import MatmulFormat, Overlap, StepSettings
from ziggurat.planning.simulator.timeline import Timeline
from ziggurat.recipes.catalogue import mlperf_dcn_v2, mlperf_dlrm
from ziggurat.recipes.run_config import RunConfig
from ziggurat.runs.planning.plan_inputs import plan_inputs
from ziggurat.runs.planning.plan_run import neighbours

README = "facebookresearch/dlrm, torchrec_dlrm README"
HUGECTR_BATCH = 55_296  # global, recalled from its MLPerf configuration and not verified
PAPER_BATCH = 16_384  # a rank; recalled, not verified


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published rate.

    Args:
        name: system and setting.
        cluster: named.
        batch_size: of all ranks.
        samples_per_s: of all ranks.
        config: model.
        step: formats and overlap.
        note: source, and what is not known.
        fitted: a constant was set to it.
        has_graphs: the program starts a whole step at once (CUDA graphs): no `step_s`, a microsecond an operation.
    """

    name: str
    cluster: str
    batch_size: int
    samples_per_s: float
    config: RunConfig
    step: StepSettings
    note: str
    fitted: bool = False
    has_graphs: bool = False


def published() -> list[Published]:
    """Rates from users.md C1 and the README's own lists."""
    fp32 = StepSettings()
    rates = ((1, 16_384, 740e3), (4, 16_384, 1.46e6), (8, 16_384, 1.67e6), (8, 65_536, 5.37e6), (8, 2_048, 285e3))
    found = [
        Published(
            name=f"TorchRec DLRM, {devices} A100, batch {batch:,}",
            cluster=f"a100x{devices}",
            batch_size=batch,
            samples_per_s=rate,
            config=mlperf_dlrm(),
            step=fp32,
            note=README + ("; tables do not fit one device, as if they did" if devices < 4 else ""),
            fitted=(devices, batch) == (8, 2_048),
        )
        for devices, batch, rate in rates
    ]
    training = "the same README's training runs, input pipeline included; at this batch it also gives 1.67 M"
    found.append(
        Published(
            name="TorchRec DLRM, 8 A100, batch 16,384, training run",
            cluster="a100x8",
            batch_size=16_384,
            samples_per_s=925_696,
            config=mlperf_dlrm(),
            step=fp32,
            note=training,
        )
    )
    found.append(
        Published(
            name="HugeCTR DLRM-DCNv2, 128 H100 (MLPerf v4.0)",
            cluster="h100x128",
            batch_size=HUGECTR_BATCH,
            samples_per_s=65.0e6,
            config=mlperf_dcn_v2(),
            step=StepSettings(matmul=MatmulFormat.BF16, between_bytes=2, reduction_bytes=2, overlap=Overlap.FULL),
            note=f"batch {HUGECTR_BATCH:,} recalled, not verified; CUDA graphs: no step_s, launch_s 1 µs",
            has_graphs=True,
        )
    )
    return found


def published_cases(*, budget_s: float) -> list[dict[str, Any]]:
    """All of them, and the towers paper's headline numbers."""
    return [*(_case(each, budget_s=budget_s) for each in published()), *_paper_cases(budget_s=budget_s)]


def _case(known: Published, *, budget_s: float) -> dict[str, Any]:
    cluster = named_cluster(known.cluster)
    if known.has_graphs:
        cluster = replace(cluster, device=replace(cluster.device, step_s=0.0, launch_s=1e-6))
    if cluster.world_size < 4:  # 97 GiB of tables: the published run kept them elsewhere
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=512 * 2**30))
    batch = known.batch_size // cluster.world_size
    timeline = _planned(known.config, cluster, batch=batch, step=known.step, budget_s=budget_s).timeline
    predicted, step_ms = timeline.samples_per_s(batch), 1e3 * timeline.step_s
    return _row(
        known.name,
        known=known.samples_per_s,
        predicted=predicted,
        unit="samples/s",
        fitted=known.fitted,
        note=f"{known.note}; step {1e3 * known.batch_size / known.samples_per_s:.2f} against {step_ms:.2f} ms",
    )


def _paper_cases(*, budget_s: float) -> list[dict[str, Any]]:
    """Largest speed-up of towers on 64 H100, and the exchange's share of a flat iteration."""
    cluster = named_cluster("h100x64")
    step = StepSettings(matmul=MatmulFormat.TF32, between_bytes=2, in_tower_bytes=2)
    best: tuple[float, str] = (0.0, "")
    shares: dict[str, float] = {}
    for config in (mlperf_dlrm(), mlperf_dcn_v2_single()):
        flat = _planned(config, cluster, batch=PAPER_BATCH, step=step, budget_s=budget_s).timeline
        shares[config.model.kind] = _exchange_share(flat)
        for compression in (2.0, 4.0, 8.0, 16.0):
            ours = _with_towers(config, cluster, compression=compression, step=step, budget_s=budget_s)
            best = max(best, (flat.step_s / ours.step_s, f"{config.model.kind}, compression {compression:g}"))
    setting = f"local batch {PAPER_BATCH:,}, TF32, FP16 exchange: recalled, not verified"
    found = [
        _row(
            "towers paper: largest speed-up on 64 H100",
            known=1.9,
            predicted=best[0],
            unit="×",
            fitted=False,
            note=f"arXiv 2403.00877; ours is {best[1]}; {setting}",
        )
    ]
    for kind, share in shares.items():
        note = f"second-hand, model not named; ours is {kind}, exposed; {setting}"
        name = f"towers paper: exchange's share of an iteration, {kind}"
        found.append(_row(name, known=27.5, predicted=share, unit="%", fitted=False, note=note))
    return found


def mlperf_dcn_v2_single() -> RunConfig:
    """DLRM-DCNv2 with one id a feature, as the paper trains on Criteo."""
    return replace(mlperf_dcn_v2(), table_schema=mlperf_dlrm().table_schema)


def _with_towers(
    config: RunConfig, cluster: Cluster, *, compression: float, step: StepSettings, budget_s: float
) -> Timeline:
    module = replace(config.model.tower_module, compression=compression)  # type: ignore[union-attr]
    changed = replace(config, model=replace(config.model, tower_module=module))  # type: ignore[call-arg]
    towers = neighbours(plan_inputs(config).inputs, most=cluster.hosts)
    changed = replace(changed, towers=towers)
    return _planned(changed, cluster, batch=PAPER_BATCH, step=step, budget_s=budget_s).timeline


def _planned(config: RunConfig, cluster: Cluster, *, batch: int, step: StepSettings, budget_s: float) -> PlannedModel:
    data = plan_inputs(config)
    model = ModelToPlace(
        config=config.model,
        inputs=data.inputs,
        batch_size=batch,
        list_lengths=data.list_lengths,
        towers=config.towers,
    )
    return plan_model(model, cluster, settings=PlanSettings(budget_s=budget_s, step=step))


def _exchange_share(timeline: Timeline) -> float:
    parts = timeline.parts_ms()
    return 100 * parts.get("wait: exchange", 0.0) / sum(parts.values())


def _row(name: str, *, known: float, predicted: float, unit: str, fitted: bool, note: str) -> dict[str, Any]:
    return {
        "group": "published",
        "name": name,
        "unit": unit,
        "known": known,
        "predicted": predicted,
        "error": predicted / known - 1,
        "fitted": fitted,
        "note": note,
    }
