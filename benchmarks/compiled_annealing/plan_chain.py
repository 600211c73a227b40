"""The C++ kernel of plan search: `plan_chain.cpp`, for cost models whose prices are small networks.

    arrays of a problem, networks, starts  ──►  anneal, one candidate at a time  ──►  the best plan as slots

numpy needs about 2 ms for a step over 576 candidates, whatever their size, because every operation on a small matrix
costs a microsecond to start. Here a candidate costs less than that altogether, most are dropped after a part of it, and
each sees the plan that the one before left. `annealing.py` uses it;
`ziggurat/planning/search/annealing.py` is the readable reference. Only arrays pass through this module: it knows no
tables.

Cost: about 4 bytes a weight of the networks, 2 MiB to remember exchanges, one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, c_double, c_float, c_int64, c_uint8, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Float32, Int64

from ziggurat.ops.cpp_build import CppLibrary, CppSource
from ziggurat.typed import checked

_SOURCE = CppSource(
    path=Path(__file__).with_name("plan_chain.cpp"),
    flags=("-ffp-contract=fast", "-fno-math-errno"),
    without="go on without: numpy searches for plans, too, with fewer candidates a second",
)
_Spent = CFUNCTYPE(c_double)
Dense = Sequence[tuple[np.ndarray, np.ndarray]]  # (in, out) weights and (out,) biases of each layer


class _Layers(Structure):
    _fields_ = [("depth", c_int64), ("sizes", POINTER(c_int64)), ("numbers", POINTER(c_float))]


class _Networks(Structure):
    _fields_ = [
        *[("width", c_int64), ("num_hidden", c_int64), ("bias", POINTER(c_float)), ("sum_place", c_int64)],
        *[("group", c_int64), ("local", _Layers), ("together", _Layers), ("apart", _Layers)],
    ]


class _Problem(Structure):
    _fields_ = [
        *[(name, c_int64) for name in ("num_tables", "num_devices", "num_kinds", "num_levels", "distinct")],
        *[("encodings", POINTER(c_float)), ("bytes", POINTER(c_double)), ("column_kind", POINTER(c_int64))],
        *[("most_levels", POINTER(c_int64)), ("allowed", POINTER(c_uint8)), ("room", POINTER(c_double))],
    ]


class _Annealing(Structure):
    _fields_ = [
        *[("seed", c_uint64), ("num_chains", c_int64), ("evaluations", c_int64)],
        *[(name, c_double) for name in ("hot", "cold", "focus", "fine", "slack")],
        ("spent", _Spent),
    ]


class _Plans(Structure):
    _fields_ = [
        ("num_starts", c_int64),
        *[(name, POINTER(c_int64)) for name in ("device", "level", "count")],
        *[(name, POINTER(c_int64)) for name in ("best_device", "best_level", "best_count")],
        *[("history_size", c_int64), ("num_history", c_int64), ("history", POINTER(c_double))],
        *[("best_cost", c_double), ("least_overflow", c_double)],
        *[(name, c_int64) for name in ("num_evaluations", "num_priced", "num_accepted")],
    ]


@dataclass(frozen=True, kw_only=True)
class ChainNetworks:
    """Prices: see `benchmarks.compiled_annealing.annealing.NetworkForm`, which has the same fields.

    Args:
        bias: (W,) of the first W numbers of a device's state.
        local: from relu(state + bias) to (1,) ms.
        sum_place: place in the state of the sum that exchanges depend on.
        together: from (G,) sums to (G,) ms.
        apart: from (2 G,) sums and later starts to (G,) ms.
    """

    bias: Float32[np.ndarray, " W"]
    local: Dense
    sum_place: int
    together: Dense
    apart: Dense


@dataclass(frozen=True, kw_only=True)
class ChainProblem:
    """What is placed; names and shapes are those of `SearchSpace`.

    Args:
        encodings: of each kind of shard.
        bytes: of each kind.
        column_kind: kind of each table after each number of halvings, −1 if it may not be cut so often.
        most_levels: halvings of each table, at most.
        allowed: devices of each table.
        room: bytes of each device.
        is_distinct: parts of a table are on different devices.
    """

    encodings: Float32[np.ndarray, "S H"]
    bytes: Float[np.ndarray, " S"]
    column_kind: Int64[np.ndarray, "T L"]
    most_levels: Int64[np.ndarray, " T"]
    allowed: Bool[np.ndarray, "T P"]
    room: Float[np.ndarray, " P"]
    is_distinct: bool


@dataclass(frozen=True, kw_only=True)
class ChainSlots:
    """Plans as slots: table t owns 2^most_levels[t] of them in a row, its parts fill the first of these.

    Args:
        device: of the part in each slot; −1: none.
        level: how often its columns are halved.
        count: parts of each table.
    """

    device: Int64[np.ndarray, "N slots"]
    level: Int64[np.ndarray, "N slots"]
    count: Int64[np.ndarray, "N T"]


@dataclass(frozen=True, kw_only=True)
@checked
class ChainSettings:
    """How to anneal, and for how long.

    Args:
        seed: of all randomness.
        num_chains: annealings one after the other, which share the budget; the best plan of all is kept.
        evaluations: candidates; 0: until `spent` says 1.
        spent: share of the budget that is spent; asked once every 1,024 candidates.
        hot, cold: temperatures at the start and the end, as in `AnnealingConfig`.
        focus: share of changes that start on the most expensive device.
        fine: of bytes that do not fit.
        slack: how many times the usual error of the cheap estimate a candidate may miss its limit by and still be
            priced.
    """

    seed: int
    num_chains: int
    evaluations: int
    spent: Callable[[], float]
    hot: float
    cold: float
    focus: float
    fine: float
    slack: float


@dataclass(frozen=True, kw_only=True)
class ChainAnswer:
    """The best plan.

    Args:
        slots: one plan; meaningless where `cost_ms` is inf.
        cost_ms: of its most expensive device; inf: nothing fits.
        overflow_bytes: least that did not fit, where nothing fits.
        num_evaluations: candidates.
        num_priced: of them, those that reached the last question; num_accepted: those that were taken.
        history: (share of the budget, ms) of improvements; the first 1,000 and the last.
    """

    slots: ChainSlots
    cost_ms: float
    overflow_bytes: float
    num_evaluations: int
    num_priced: int
    num_accepted: int
    history: tuple[tuple[float, float], ...]


def why_no_chain() -> str:
    """The reason for having no kernel here, "" if there is one; builds it if need be."""
    return _LIBRARY.reason


def anneal_chain(
    networks: ChainNetworks, problem: ChainProblem, *, starts: ChainSlots, settings: ChainSettings
) -> ChainAnswer:
    """Anneal until the budget is spent.

    Args:
        networks: prices, for a multiple of G devices.
        problem: what is placed.
        starts: one plan or more, used in turn by the chains.
        settings: how, and for how long.
    """
    assert problem.allowed.shape[1] % networks.together[-1][1].size == 0, "devices in groups"
    failed: list[BaseException] = []

    def spent() -> float:
        try:
            return settings.spent()
        except BaseException as error:  # it cannot pass through C++: stop, and raise it behind
            failed.append(error)
            return 2.0

    keep = _Arrays()
    slots = ChainSlots(**{name: getattr(starts, name)[0].copy() for name in ("device", "level", "count")})
    history = np.zeros((1000, 2))
    plans = _Plans(
        num_starts=len(starts.device),
        device=keep.int64(starts.device),
        level=keep.int64(starts.level),
        count=keep.int64(starts.count),
        best_device=keep.int64(slots.device),
        best_level=keep.int64(slots.level),
        best_count=keep.int64(slots.count),
        history_size=len(history),
        history=keep.float64(history),
    )
    names = ("seed", "num_chains", "evaluations", "hot", "cold", "focus", "fine", "slack")
    how = _Annealing(**{name: getattr(settings, name) for name in names}, spent=_Spent(spent))
    given = _networks(keep, networks, width=problem.encodings.shape[1]), _problem(keep, problem), how, plans
    _LIBRARY.needed().ziggurat_plan_anneal(*(ctypes.byref(each) for each in given))
    if failed:
        raise failed[0]
    return ChainAnswer(
        slots=slots,
        cost_ms=plans.best_cost,
        overflow_bytes=plans.least_overflow,
        num_evaluations=plans.num_evaluations,
        num_priced=plans.num_priced,
        num_accepted=plans.num_accepted,
        history=tuple((float(when), float(cost)) for when, cost in history[: plans.num_history]),
    )


def price_states(networks: ChainNetworks, states: Float32[np.ndarray, "N P H"]) -> Float32[np.ndarray, "N P"]:
    """Milliseconds of every device in N plans: what the chain believes, to be held against the cost model."""
    num, devices, width = states.shape
    keep, out = _Arrays(), np.empty((num, devices), dtype=np.float32)
    given = ctypes.byref(_networks(keep, networks, width=width))
    _LIBRARY.needed().ziggurat_plan_price(given, num, devices, keep.float32(states), keep.float32(out))
    return out


class _Arrays:
    """Pointers to arrays that live as long as this does."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def float32(self, array: np.ndarray) -> object:
        return self._pointer(array, np.float32, c_float)

    def float64(self, array: np.ndarray) -> object:
        return self._pointer(array, np.float64, c_double)

    def int64(self, array: np.ndarray) -> object:
        return self._pointer(array, np.int64, c_int64)

    def uint8(self, array: np.ndarray) -> object:
        return self._pointer(array, np.uint8, c_uint8)

    def _pointer(self, array: np.ndarray, dtype: type, kind: type) -> object:
        array = np.ascontiguousarray(array, dtype=dtype)
        self._kept.append(array)
        return array.ctypes.data_as(POINTER(kind))

    def layers(self, layers: Dense) -> _Layers:
        sizes = [layers[0][0].shape[0], *(weight.shape[1] for weight, _ in layers)]
        numbers = np.concatenate([part.ravel() for weight, bias in layers for part in (weight, bias)])
        return _Layers(depth=len(layers), sizes=self.int64(np.array(sizes)), numbers=self.float32(numbers))


def _networks(keep: _Arrays, networks: ChainNetworks, *, width: int) -> _Networks:
    return _Networks(
        width=width,
        num_hidden=len(networks.bias),
        bias=keep.float32(networks.bias),
        sum_place=networks.sum_place,
        group=networks.together[-1][1].size,
        local=keep.layers(networks.local),
        together=keep.layers(networks.together),
        apart=keep.layers(networks.apart),
    )


def _problem(keep: _Arrays, problem: ChainProblem) -> _Problem:
    return _Problem(
        num_tables=problem.allowed.shape[0],
        num_devices=problem.allowed.shape[1],
        num_kinds=len(problem.bytes),
        num_levels=problem.column_kind.shape[1],
        distinct=int(problem.is_distinct),
        encodings=keep.float32(problem.encodings),
        bytes=keep.float64(problem.bytes),
        column_kind=keep.int64(problem.column_kind),
        most_levels=keep.int64(problem.most_levels),
        allowed=keep.uint8(problem.allowed),
        room=keep.float64(problem.room),
    )


def _declare(library: ctypes.CDLL) -> None:
    """Say which arguments the functions of the library take."""
    library.ziggurat_plan_anneal.restype = library.ziggurat_plan_price.restype = None
    library.ziggurat_plan_anneal.argtypes = [c_void_p] * 4
    library.ziggurat_plan_price.argtypes = [c_void_p, c_int64, c_int64, c_void_p, c_void_p]


_LIBRARY = CppLibrary(_SOURCE, declare=_declare)
