"""The dense products of a finished run: their statistics, the error of each format in each of them, and plans."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.files import Format
from ziggurat.models.build import ModelConfig
from ziggurat.models.contract.model import device_of
from ziggurat.models.dispatch_times import seconds_of_plans
from ziggurat.models.network_settings import network_settings
from ziggurat.models.probed import ModelProbe
from ziggurat.models.scoring_plan import ScoringPlan, plan_scoring
from ziggurat.numerics.probe import Direction, ProbeRecord
from ziggurat.numerics.probe.record import newest_probe
from ziggurat.parallel.device import Device
from ziggurat.precision.dispatch import DispatchPlan, plan_dispatch
from ziggurat.precision.kernels import ProductKernel, list_emulated_kernels
from ziggurat.precision.product_errors import KernelError, measure_errors
from ziggurat.precision.products import shapes_of_products
from ziggurat.runs.load import Run, load_run
from ziggurat.training.evaluation.evaluate import ordered_batches
from ziggurat.training.records.run_folder import RunFolder

PRODUCT_ERRORS = Format(name="ziggurat.product_errors", what="errors of formats in the products of a run")
MEASURED_BATCHES = 16
TIMED_BATCHES = 4
SCORED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class ProductErrors:
    """Errors of kernels in the products of a run.

    Args:
        record: that operands were drawn from.
        errors: by product, direction and kernel.
        missing: kernels that the device does not have, and why.
    """

    record: ProbeRecord
    errors: dict[str, dict[Direction, dict[str, KernelError]]]
    missing: dict[str, str]

    def columns(self, kernels: Sequence[str]) -> list[str]:
        """Return the heads of `cells`."""
        return ["product", "direction", *kernels]

    def cells(self, kernels: Sequence[str]) -> list[list[str]]:
        """Return a row for each product and direction: the error, and in brackets that of N(0, 1) operands."""
        return [
            [product, direction.value, *(_cell(found.get(kernel)) for kernel in kernels)]
            for product, directions in self.errors.items()
            for direction, found in directions.items()
        ]

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {
            "model": self.record.model,
            "step": self.record.step,
            "passes": self.record.num_passes,
            "left_out": self.record.left_out,
            "missing": self.missing,
            "products": {
                product: {
                    direction.value: {
                        kernel: {"error": f"{each.error:.6g}", "normal_error": f"{each.normal_error:.6g}"}
                        | ({"why": each.why} if each.why else {})
                        for kernel, each in found.items()
                    }
                    for direction, found in directions.items()
                }
                for product, directions in self.errors.items()
            },
        }


def probe_of_run(folder: str | Path, *, measure: bool = False, models: Sequence[type[ModelConfig]] = ()) -> ProbeRecord:
    """Return the statistics that a run kept, or measure them on its best weights and its training rows.

    Args:
        folder: of the run.
        measure: also where the run has kept some. Nothing is written.
        models: as of `load_run`.

    Raises:
        MissingFileError: the run kept none, and they are not to be measured.
    """
    if not measure:
        return newest_probe(RunFolder(Path(folder)).probe)
    run = load_run(folder, models=models)
    return _measured(run, _batches_of(run))


def dispatch_of_run(
    folder: str | Path, *, measure: bool = False, models: Sequence[type[ModelConfig]] = ()
) -> DispatchPlan:
    """Choose kernels for the products of a run, and what its network computes in between them.

    Args:
        folder: of the run, with its rows: whole networks are timed on batches of them.
        measure: take statistics of products now, also where the run has kept some. Nothing is written.
        models: as of `load_run`.

    Raises:
        MissingFileError: the run kept no statistics, and they are not to be measured.
    """
    record = None if measure else newest_probe(RunFolder(Path(folder)).probe)
    run = load_run(folder, models=models)
    batches = _batches_of(run)
    if record is None:
        record = _measured(run, batches)
    timed = batches[:TIMED_BATCHES]
    return plan_dispatch(
        record,
        device=device_of(run.model),
        seconds_of=lambda plans: seconds_of_plans(run.model, plans, batches=timed),
        shapes=shapes_of_products(run.model),
        settings=network_settings(run.model),
        folder=folder,
    )


def scoring_plan_of_run(
    folder: str | Path, *, rows: int = SCORED_ROWS, measure: bool = False, models: Sequence[type[ModelConfig]] = ()
) -> ScoringPlan:
    """Choose formats for the weights of a finished run, by which its exports score on a CPU.

    Args:
        folder: of the run, with its rows: whole networks are timed on them.
        rows: of a request.
        measure: take statistics of products now, also where the run has kept some. Nothing is written.
        models: as of `load_run`.

    Raises:
        ConfigError: no such number of rows, or see `plan_scoring`.
        MissingFileError: the run kept no statistics, and they are not to be measured.
    """
    record = None if measure else newest_probe(RunFolder(Path(folder)).probe)
    run = load_run(folder, models=models, device=Device.CPU)
    batches = _batches_of(run)
    most = batches[0].batch_size
    if not 1 <= rows <= most:
        raise ConfigError(
            expected=f"1 to {most:,} rows of a request, which a batch of the run's training rows has",
            found=f"{rows}",
            where="dispatch for scoring, --rows",
            ways_out=f"leave it out: {min(SCORED_ROWS, most)}",
        )
    if record is None and run.packed is None:
        record = _measured(run, batches)
    return plan_scoring(
        run.model,
        record or ProbeRecord(model=type(run.model).__name__),
        batch=batches[0].rows(0, rows),
        batch_size=run.config.training.loader.batch_size,
        folder=folder,
    )


def _measured(run: Run, batches: Sequence[Batch]) -> ProbeRecord:
    probe = ModelProbe(run.model)
    for batch in batches:
        probe.take(batch)
    probe.record.step = run.step
    return probe.record


def _batches_of(run: Run) -> list[Batch]:
    """Return batches of the training rows of a run, on the device of its model."""
    size = run.config.training.loader.batch_size
    batches = ordered_batches(run.own_rows("train"), batch_size=size).batches(epoch=0)
    return [batch.to(device_of(run.model)) for batch in itertools.islice(batches, MEASURED_BATCHES)]


def product_errors(
    record: ProbeRecord, *, kernels: Sequence[str] = (), device: str = "cpu", seed: int = 0
) -> ProductErrors:
    """Measure the errors of kernels in every product and direction of a record.

    Args:
        record: of a run.
        kernels: by name; all unless given.
        device: to compute on.
        seed: of the draws.
    """
    place = torch.device(device)
    # Precisions may have been added since the kernels were listed.
    list_emulated_kernels()
    wanted = [ProductKernel.named(name) for name in kernels] or list(ProductKernel)
    missing = {kernel.name: lacks for kernel in wanted if (lacks := kernel.available(place))}
    here = [kernel for kernel in wanted if kernel.name not in missing]
    errors = {
        name: {each: measure_errors(product, each, here, device=place, seed=seed) for each in Direction}
        for name, product in record.products.items()
    }
    return ProductErrors(record=record, errors=errors, missing=missing)


def _cell(error: KernelError | None) -> str:
    if error is None:
        return "-"
    return f"{'overflows' if error.why else f'{error.error:.2g}'} ({error.normal_error:.2g})"
