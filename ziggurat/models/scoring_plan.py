"""Scoring plan: for each product of a finished run, the format that scores fastest here and is accurate enough.

    ziggurat numerics dispatch RUN --for scoring ─► scoring.json ─► ziggurat export RUN --dispatch scoring.json

Dispatch of a training (`precision/dispatch.py`) chooses kernels that convert both operands in each step. A finished run
has weights that stay, so the candidates here are weights that were packed once (`packed.py`): INT8, MX6 and MX9, and
FP32 for what they lose or do not make faster.

    error     mean of |out − ref| / |ref| of the forward product, operands drawn from the run's probe    below 0.2
    time      x Wᵀ + b by packed weight against FP32, for the rows of one request, in turns               above 1.05

The format of each product alone, and one format for all of them, are then timed as whole networks on rows of the run,
lookups and all, since times of single products leave out what lies between them. The fastest goes to the file; where
none is 1.05 times as fast as FP32, nothing is packed.

The choice is made once: a server computes by it and measures nothing. The packed numbers are those of any machine, so
an export made by a plan scores alike everywhere. Times hold for one machine and its versions, times and errors for one
model with its sizes and settings, so the file names them, and another is refused.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.errors import ConfigError
from ziggurat.features.batch import Batch
from ziggurat.files import Format
from ziggurat.models.contract.model import Model
from ziggurat.models.network_settings import network_settings
from ziggurat.models.packed import packable_modules, packed_format
from ziggurat.numerics import BlockFormat
from ziggurat.numerics.linear import linear, pack_linear
from ziggurat.numerics.probe import Direction, ProbeRecord, ProductStatistics
from ziggurat.ops.machine.turns import median_ratio, repeats_in_turn, seconds_in_turns, seconds_of
from ziggurat.precision.arithmetic import NATIVE
from ziggurat.precision.choice import machine_facts
from ziggurat.precision.dispatch import (
    MAX_ERROR,
    MIN_SPEEDUP,
    Choice,
    KernelMeasured,
    choose,
    refuse_unlike,
    without_settings,
)
from ziggurat.precision.kernels import ProductKernel
from ziggurat.precision.packed import PackedArithmetic, PackedKernel
from ziggurat.precision.product_errors import KernelError, measure_errors
from ziggurat.precision.products import DenseProducts, Settings, Shapes, exchanged, products_of, shapes_of_products
from ziggurat.typed import Reader

FORMATS = ("int8", "mx6", "mx9")
_FP32 = ProductKernel.FP32.name
_TURNS = 15
# Of all turns of one product, and of whole networks; at least three turns are made.
_PRODUCT_BUDGET_S = 0.2
_WHOLE_BUDGET_S = 20.0
# A turn is at least this long, so that the clock's own steps do not count.
_TURN_S = 0.002
_WAYS_OUT = (
    "make one here: ziggurat numerics dispatch RUN --for scoring --out scoring.json",
    "one format for all products: ziggurat export RUN --products int8 --out FOLDER",
)
SCORING_PLAN = Format(
    name="ziggurat.scoring_plan",
    what="a dispatch for scoring",
    version=2,
    migrations={1: without_settings},
    ways_out=_WAYS_OUT,
    error=ConfigError,
)

Formats = dict[str, BlockFormat]  # of packed weights, by the names of their modules


@dataclass(frozen=True, kw_only=True)
class ScoringPlan:
    """Formats of a model's packed weights.

    Args:
        model: its class.
        machine: facts that times hold for, by name.
        rows: of the requests that were timed.
        choices: a format or "fp32" for each module, with its reason.
        whole: why these were taken, by the times of whole networks.
        shapes: of the weights of the model.
        settings: of its network, by flag; None where they are not known (files of version 1).
    """

    model: str
    machine: dict[str, str]
    rows: int
    choices: dict[str, Choice]
    whole: str
    shapes: Shapes
    settings: Settings | None

    @property
    def formats(self) -> Formats:
        """The formats of the modules that are packed."""
        chosen = {name: each.kernel for name, each in self.choices.items() if each.kernel != _FP32}
        return {name: packed_format(kernel, where="a dispatch for scoring") for name, kernel in chosen.items()}

    def write(self, path: str | Path) -> Path:
        """Write a file."""
        return SCORING_PLAN.write(path, to_json(self))

    @classmethod
    def model_of(cls, path: str | Path) -> str:
        """Return the class of the model that a file is of."""
        return cls._of_file(path).model

    @classmethod
    def read(cls, path: str | Path, *, model: Model) -> ScoringPlan:
        """Read a file, if it is of this model, this machine and these versions.

        Args:
            path: of the file.
            model: that is to be packed.

        Raises:
            MissingFileError: there is none.
            ConfigError: it is damaged, packs nothing, or is of something else, which the message names.
        """
        plan = cls._of_file(path)
        refuse_unlike(
            plan.model,
            machine=plan.machine,
            shapes=plan.shapes,
            settings=plan.settings,
            modules=plan.choices.keys(),
            model=type(model).__name__,
            of_model=shapes_of_products(model),
            settings_of_model=network_settings(model),
            may_be_set=False,
            device=torch.device("cpu"),
            where=f"{path}",
            command="ziggurat numerics dispatch RUN --for scoring --measure --out scoring.json",
            ways_out=_WAYS_OUT,
        )
        if not plan.formats:
            raise ConfigError(
                expected="a dispatch that packs the weights of a product",
                found=f"one that leaves all {len(plan.choices)} in FP32: {plan.whole}",
                where=f"{path}",
                ways_out=("export in FP32: leave --dispatch out", *_WAYS_OUT[1:]),
            )
        return plan

    @classmethod
    def _of_file(cls, path: str | Path) -> ScoringPlan:
        reader = Reader(where=f"{path}", noun="key", error=ConfigError, ways_out=_WAYS_OUT)
        plan = reader.read(cls, SCORING_PLAN.read(path))
        for module, choice in plan.choices.items():
            if choice.kernel != _FP32:
                packed_format(choice.kernel, where=f"{path}, choices.{module}.kernel")
        return plan


def plan_scoring(
    model: Model,
    record: ProbeRecord,
    *,
    batch: Batch,
    batch_size: int,
    seed: int = 0,
    formats: Sequence[str] = FORMATS,
    folder: str | Path = "RUN",
) -> ScoringPlan:
    """Measure packed weights in all products of a model, and choose.

    Args:
        model: on a CPU, with its trained weights, not packed.
        record: statistics of its products.
        batch: rows of one request.
        batch_size: of the steps whose shapes the record has.
        seed: of the draws.
        formats: candidates.
        folder: of the run, for errors.

    Raises:
        ConfigError: the model is packed already, or the record is of no product that can be packed.
    """
    if any(module.arithmetic.holds_weight for module in products_of(model).values()):
        raise ConfigError(
            expected="a run with FP32 weights, whose products are to be packed",
            found="one whose products are packed already",
            where=f"{folder}, dispatch for scoring",
            ways_out="name the run that it was packed of: products.json says which",
        )
    modules = packable_modules(model)
    products = _products_by_module(record, modules)
    if not products:
        raise ConfigError(
            expected="statistics of products that can be packed: an MLP, a cross network, a projection",
            found=f"none of {len(modules)} modules; {record.num_passes} batches were looked at",
            where=f"the probe of a run of {record.model}",
            ways_out=f"take them now: ziggurat numerics dispatch {pasted(folder)} --for scoring --measure --out FILE",
        )
    candidates = [packed_format(name, where="formats of a dispatch for scoring") for name in formats]
    maps = {
        (name, format.name): _packed(module, format, name=name)
        for name, module in modules.items()
        for format in candidates
    }
    measured = {
        name: _measured(
            module, products[name], maps=maps, name=name, formats=candidates, share=batch.batch_size / batch_size
        )
        for name, module in modules.items()
        if name in products
    }
    _add_errors(measured, products, candidates, seed=seed)
    of_each = {name: choose(found) for name, found in measured.items()}
    plans = {"fp32": _in_fp32(measured), "each its own": of_each}
    plans |= {format.name: _in_one_format(measured, format.name) for format in candidates}
    kernels = {title: {name: choice.kernel for name, choice in plan.items()} for title, plan in plans.items()}
    # Two plans of the same kernels are one, whatever their reasons say.
    different = [title for at, title in enumerate(kernels) if kernels[title] not in list(kernels.values())[:at]]
    seconds = _seconds_of_plans(model, [kernels[title] for title in different], maps=maps, batch=batch)
    best, whole = _fastest(different, seconds, rows=batch.batch_size)
    unknown = "fp32 only: nothing is known of its error, as the probe left it out"
    choices = {name: plans[best].get(name, Choice(kernel=_FP32, reason=unknown)) for name in modules}
    return ScoringPlan(
        model=type(model).__name__,
        machine=machine_facts(torch.device("cpu")),
        rows=batch.batch_size,
        choices=choices,
        whole=whole,
        shapes=shapes_of_products(model),
        settings=network_settings(model),
    )


_Measured = dict[str, dict[str, KernelMeasured]]  # by module and format
_Maps = Mapping[tuple[str, str], PackedArithmetic]  # by module and format


def _products_by_module(record: ProbeRecord, modules: Mapping[str, object]) -> dict[str, list[ProductStatistics]]:
    found = dict[str, list[ProductStatistics]]()
    for product in record.products.values():
        # Several products of a module are told apart by what stands behind #.
        name = product.name.partition("#")[0]
        if name in modules:
            found.setdefault(name, []).append(product)
    return found


def _weight_of(module: DenseProducts) -> tuple[Tensor, Tensor | None]:
    weight = module.weight
    bias = module.bias
    assert isinstance(weight, Tensor), "it can be packed"
    assert bias is None or isinstance(bias, Tensor)
    return weight, bias


def _packed(module: DenseProducts, format: BlockFormat, *, name: str) -> PackedArithmetic:
    weight, bias = _weight_of(module)
    return PackedArithmetic(pack_linear(weight, format, bias=bias, name=f"{name}.weight"), module=name)


@torch.no_grad()
def _measured(
    module: DenseProducts,
    products: Sequence[ProductStatistics],
    *,
    maps: _Maps,
    name: str,
    formats: Sequence[BlockFormat],
    share: float,
) -> dict[str, KernelMeasured]:
    """Time the product of a module for the rows of one request, in FP32 and in each format."""
    weight, bias = _weight_of(module)
    # A module that is called for each field has several rows a sample; its slowest call counts.
    num_rows = max(math.prod(product.left_shape[:-1]) for product in products)
    x = torch.randn(max(1, round(share * num_rows)), weight.shape[1])
    work = [functools.partial(F.linear, x, weight, bias)]
    work += [functools.partial(linear, x, maps[name, format.name].map) for format in formats]
    repeats = repeats_in_turn(seconds_of(work[0], repeats=1, device=x.device), least_s=_TURN_S)

    def seconds(product: functools.partial[Tensor], turn: int) -> float:
        del turn
        return seconds_of(product, repeats=repeats, device=x.device)

    fp32, *others = seconds_in_turns(
        [functools.partial(seconds, each) for each in work], turns=_TURNS, budget_s=_PRODUCT_BUDGET_S
    )
    speedups = [median_ratio(fp32, other) for other in others]
    return {
        format.name: KernelMeasured(error=0.0, speedup=speedup)
        for format, speedup in zip(formats, speedups, strict=True)
    }


def _add_errors(
    measured: _Measured,
    products: Mapping[str, Sequence[ProductStatistics]],
    formats: Sequence[BlockFormat],
    *,
    seed: int,
) -> None:
    """Put the errors of formats beside their times; the largest of a module's products counts."""
    kernels = [PackedKernel(format) for format in formats]
    not_drawn = KernelError(error=math.inf, normal_error=math.nan, why="it does not take drawn operands")
    for name, found in measured.items():
        for product in products[name]:
            errors = measure_errors(product, Direction.FORWARD, kernels, device=torch.device("cpu"), seed=seed)
            for format in formats:
                error = errors.get(format.name, not_drawn)
                now = KernelMeasured(error=error.error, speedup=found[format.name].speedup, why=error.why)
                found[format.name] = found[format.name].and_worse(now)


def _in_fp32(measured: _Measured) -> dict[str, Choice]:
    found = dict[str, Choice]()
    for name, formats in measured.items():
        told = ", ".join(f"{format}: {each.text()}" for format, each in formats.items())
        found[name] = Choice(kernel=_FP32, reason=f"whole networks in few bits are not faster ({told})", error=0.0)
    return found


def _in_one_format(measured: _Measured, format: str) -> dict[str, Choice]:
    """Return one format for all products that it is accurate enough for, whatever their own times are."""
    found = dict[str, Choice]()
    for name, formats in measured.items():
        it = formats[format]
        if it.error < MAX_ERROR:
            found[name] = Choice(kernel=format, reason=f"one format for the whole network: {it.text()}", error=it.error)
        else:
            found[name] = Choice(kernel=_FP32, reason=f"{format}: {it.text()}, not below {MAX_ERROR}", error=0.0)
    return found


@torch.no_grad()
def _seconds_of_plans(
    model: Model, plans: Sequence[Mapping[str, str]], *, maps: _Maps, batch: Batch
) -> list[list[float]]:
    """Return the seconds of a score of the whole model by each plan, turn by turn."""
    modules = products_of(model)
    was_training = model.training
    model.eval()
    model(batch)  # warms up
    device = torch.device("cpu")
    score = functools.partial(model, batch)
    repeats = repeats_in_turn(seconds_of(score, repeats=1, device=device), least_s=_TURN_S)

    def seconds(plan: Mapping[str, str], turn: int) -> float:
        del turn
        with exchanged(modules, lambda name: maps.get((name, plan.get(name, _FP32)), NATIVE)):
            score()  # whose arithmetic was exchanged just now
            return seconds_of(score, repeats=repeats, device=device)

    try:
        return seconds_in_turns(
            [functools.partial(seconds, each) for each in plans], turns=_TURNS, budget_s=_WHOLE_BUDGET_S
        )
    finally:
        model.train(was_training)


def _fastest(titles: Sequence[str], seconds: Sequence[Sequence[float]], *, rows: int) -> tuple[str, str]:
    """Return the title of the fastest plan, FP32 where none is clearly faster, and the reason."""
    medians_ms = [1e3 * statistics.median(each) for each in seconds]
    told = ", ".join(f"{title} {each:.3f} ms" for title, each in zip(titles, medians_ms, strict=True))
    at = min(range(len(titles)), key=medians_ms.__getitem__)
    speedup = median_ratio(seconds[0], seconds[at])
    if at and speedup > MIN_SPEEDUP:
        return titles[at], f"{speedup:.2f} times as fast as FP32, requests of {rows} rows ({told})"
    return titles[0], f"no format is more than {MIN_SPEEDUP} times as fast as FP32, requests of {rows} rows ({told})"
