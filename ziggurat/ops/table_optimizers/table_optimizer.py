"""TableOptimizerKind: how embedding tables learn, and everything that follows from it.

The rest of the package asks a table optimizer

    what it keeps of each row       `row_state`, `weight_state`, `initial`         storages, checkpoints, plans
    what a step does to a row       `change`, `step_size`, `decays_gradient`       ops/lookup
    what a row needs of itself      `mean_squares`                                 tables that are cut by columns
    which kernels have its rule     `cpp_code`, `triton_rule`, `fbgemm_rule`       ops/lookup
    whether tables are parameters   `is_dense`                                     embeddings

and never which optimizer it is. `change` is in torch and defines the rule; compiled code that is named by `cpp_code`,
`triton_rule` or `fbgemm_rule` agrees with it up to the rounding of FP32. A rule without any is computed by torch, and
its answer is looked at in every step before anything is written (`checked_change`): code from outside may be right
when it is tried out and wrong at step 10,000.

Rules (η: learning rate, λ: weight decay; g: the gradient of a row, summed over all lookups of the step and scaled):
each row that a step touches is updated once, others stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from ziggurat.errors import ConfigError, NumericsError
from ziggurat.specification import Specification, answer_of

if TYPE_CHECKING:
    from ziggurat.ops.lookup.kernel import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class TouchedRows:
    """The rows of a step, as a rule sees them.

    Args:
        grad: (U, D) their gradients g, scaled; with λ·w added where the rule says `decays_gradient`.
        state: of each array of the rule, before the step: (U,) or (U, D).
        step: learning rate, number, and the constants of the rule. Numbers may be scalar tensors on the device of the
            rows, whose values the host does not know: compute with them, and never ask.
        weight: (U, D) their weights; read when it is called.
    """

    grad: Float[Tensor, "U D"]
    state: Mapping[str, Tensor]
    step: Step
    weight: Callable[[], Float[Tensor, "U D"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChange:
    """Change that a step makes to rows: w ← w + factor · direction.

    Args:
        direction: (U, D).
        factor: of all rows; None is 1.
        state: of each array of the rule, after the step.
    """

    direction: Float[Tensor, "U D"]
    factor: float | Tensor | None = None
    state: Mapping[str, Tensor] = field(default_factory=dict)


class TableOptimizerKind(Specification, kind="table optimizer"):
    """Rule by which embedding tables learn. See the module's docstring.

    Attributes:
        row_state: names of arrays with one number a row.
        weight_state: names of arrays with one number a weight.
        is_dense: tables are ordinary parameters with dense gradients, for a torch optimizer; there is no rule.
        decays_gradient: λ·w is added to the gradient before the rule; otherwise the rule decays weights itself.
        mean_squares: the array of `row_state` that is the sum of mean squares of a row's gradients, by whose root it
            is divided, so that ranks with some columns each can add it up; "" where there is none.
        cpp_code: its number in `ops/csrc/lookup/rules.h`; None: C++ does not know it.
        triton_rule: what `ops/lookup/triton/update_kernels.py` calls it; "": Triton does not know it.
        fbgemm_rule: which operator of FBGEMM is the same rule; "": none.
    """

    row_state: ClassVar[tuple[str, ...]] = ()
    weight_state: ClassVar[tuple[str, ...]] = ()
    is_dense: ClassVar[bool] = False
    decays_gradient: ClassVar[bool] = True
    mean_squares: ClassVar[str] = ""
    cpp_code: ClassVar[int | None] = None
    triton_rule: ClassVar[str] = ""
    fbgemm_rule: ClassVar[str] = ""

    def change(self, rows: TouchedRows) -> RowChange:
        """Return what a step does to its rows."""
        raise NotImplementedError(f"{self} has no rule: its tables are parameters")

    @property
    def is_in_torch_alone(self) -> bool:
        """True if no compiled code has its rule, so that its own `change` is asked in every step."""
        return not self.is_dense and self.cpp_code is None and not self.triton_rule and not self.fbgemm_rule

    def checked_change(self, rows: TouchedRows) -> RowChange:
        """Return `change`, and refuse an answer that cannot be written; of a rule in torch alone.

        With `step.applies` the host does not wait for a device: numbers that are not finite are then not looked for.
        Training keeps such a rule from those steps (`training/step/late.py`).

        Raises:
            ConfigError: `change` failed, or its answer has not the arrays, shapes or dtypes that the rule declares.
            NumericsError: a number of it is NaN or infinite where the number before the step was finite.
        """
        if not self.is_in_torch_alone:
            return self.change(rows)
        where = f"{self._where} in a step with {len(rows.grad):,} rows"
        change = answer_of(lambda: self.change(rows), expected="a RowChange of the rows of a step", where=where)
        self._check_form(change, rows=rows, where=where)
        if rows.step.applies is None:
            self._check_numbers(change, rows=rows, where=where)
        return change

    def _check_form(self, change: object, *, rows: TouchedRows, where: str) -> None:
        """Refuse a change of other arrays, shapes, dtypes or devices than the rule declares."""
        if not isinstance(change, RowChange):
            raise self._broken("a RowChange", f"{type(change).__name__}", where)
        wanted = {"direction": _form(rows.grad), **{key: _form(each) for key, each in rows.state.items()}}
        found = {"direction": _form(change.direction), **{key: _form(each) for key, each in change.state.items()}}
        if found != wanted:
            wrong = sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key))
            expected = ", ".join(f"{key}: {wanted.get(key, 'nothing')}" for key in wrong)
            given = ", ".join(f"{key}: {found.get(key, 'nothing')}" for key in wrong)
            raise self._broken(f"a direction, and each array that it declares after the step: {expected}", given, where)
        factor = change.factor
        is_number = factor is None or isinstance(factor, int | float)
        if not is_number and not (isinstance(factor, Tensor) and factor.numel() == 1):
            raise self._broken("a factor that is one number for all rows, or None", f"factor: {_form(factor)}", where)

    def _check_numbers(self, change: RowChange, *, rows: TouchedRows, where: str) -> None:
        """Refuse numbers that would be written as NaN or infinity."""
        wrong = [
            key
            for key, each in change.state.items()  # infinity may stand for "nothing yet": it may stay
            if not math.isfinite(_largest(each))
            and not bool((each.isfinite() | ((each == rows.state[key]) & each.isinf())).all())
        ]
        factor = 1.0 if change.factor is None else float(change.factor)
        moved = _largest(change.direction) * factor
        # Infinity times a factor of 0 is NaN, of which no comparison is true.
        if not abs(moved) <= torch.finfo(torch.float32).max:  # nor where it is NaN
            wrong = ["factor · direction", *wrong]
        if not wrong:
            return
        number = rows.step.number
        gradients = "finite" if bool(rows.grad.isfinite().all()) else "not finite either"
        raise NumericsError(
            expected="finite numbers from the rule of a table optimizer",
            found=f"NaN or infinity in {', '.join(wrong)} (factor {factor}); the gradients are {gradients}",
            where=f"{where}, step {number}; nothing of it was written, but other weights may have made this step",
            ways_out=(
                "correct `change` (a root or a quotient of 0?), then go on from the last checkpoint: --resume",
                "lower the learning rates, if its numbers overflow",
            ),
        )

    def step_size(self, step: Step) -> float | Tensor:
        """Return the learning rate that compiled code is given, which may depend on the number of the step."""
        return step.learning_rate

    def initial(self, key: str, *, initial_sum: float) -> float:
        """Return the number with which an array of its state begins.

        Args:
            key: of `row_state` or `weight_state`.
            initial_sum: of `EmbeddingConfig`.
        """
        del key, initial_sum
        return 0.0

    def try_out(self) -> None:
        """Try a step of its rule, with the usual constants."""
        from ziggurat.ops.lookup.kernel import Step, UpdateRule  # which imports this module

        if not self.is_dense:
            self.check(Step(rule=UpdateRule(kind=self), learning_rate=0.1))

    def check(self, step: Step) -> None:
        """Refuse a rule that breaks what kernels, storages and checkpoints rely on; tried with a few rows.

        Args:
            step: with the constants of the rule.

        Raises:
            ConfigError: the change, or the state after it, has not the shapes that the rule declares; or a row of zeros
                without a gradient, which is padding, is changed; or a row depends on those beside it.
        """
        draw = torch.Generator().manual_seed(0)
        weight = torch.randn(3, 4, generator=draw)
        grad = torch.randn(3, 4, generator=draw)
        weight[0] = 0.0  # as padding is
        grad[0] = 0.0
        initial = {key: self.initial(key, initial_sum=0.5) for key in self.state_keys}
        state = {key: torch.full((3,), initial[key]) for key in self.row_state}
        state |= {key: torch.full((3, 4), initial[key]) for key in self.weight_state}

        def changed(chosen: slice) -> RowChange:
            # Copies: a rule that writes into what it is given must not change what it is compared with.
            known = {key: each[chosen].clone() for key, each in state.items()}
            mine = weight[chosen].clone()
            return self.change(TouchedRows(grad=grad[chosen].clone(), state=known, step=step, weight=lambda: mine))

        change = changed(slice(0, 3))
        shapes = {"direction": (3, 4), **{key: tuple(each.shape) for key, each in state.items()}}
        found = {"direction": tuple(change.direction.shape)}
        found |= {key: tuple(each.shape) for key, each in change.state.items()}
        if found != shapes:
            raise self._broken(f"a direction, and each array that it declares after the step: {shapes}", f"{found}")
        if bool(change.direction[0].any()) or not all(
            torch.equal(change.state[key][0], each[0]) for key, each in state.items()
        ):
            raise self._broken("no change of a row of zeros that has no gradient, which is padding", "another row")
        alone = changed(slice(1, 2))
        pairs = [(alone.direction, change.direction), *((alone.state[key], change.state[key]) for key in state)]
        # Up to rounding: torch computes one row by other instructions than three.
        if not all(torch.allclose(one, all_rows[1:2]) for one, all_rows in pairs):
            raise self._broken("a row that does not depend on others", "another change where it is alone")

    @property
    def _where(self) -> str:
        return f"table optimizer {self}, {type(self).__module__}.{type(self).__qualname__}.change"

    def _broken(self, expected: str, found: str, where: str = "") -> ConfigError:
        return ConfigError(
            expected=expected,
            found=found,
            where=where or self._where,
            ways_out="correct `change`; docs/guides/extending.md says what a table optimizer promises",
        )

    @property
    def state_keys(self) -> tuple[str, ...]:
        """Names of what it keeps for each row."""
        return (*self.row_state, *self.weight_state)

    @property
    def keeps_rows_whole(self) -> bool:
        """True if a row has a number for all its columns that parts of it cannot add up, so that no plan cuts them."""
        return bool(self.row_state) and not self.mean_squares

    @property
    def row_state_bytes(self) -> int:
        """Bytes of FP32 state for each row, whatever its columns."""
        return 4 * len(self.row_state)

    @property
    def weight_state_bytes(self) -> int:
        """Bytes of FP32 state for each weight."""
        return 4 * len(self.weight_state)


def _form(value: object) -> str:
    """Return the shape, dtype and device of a tensor, for comparison and for messages."""
    if not isinstance(value, Tensor):
        return f"{type(value).__name__}"
    return f"{tuple(value.shape)} of {value.dtype} on {value.device}"


def _largest(values: Tensor) -> float:
    """Return the largest magnitude; NaN if a number is NaN."""
    if not values.numel():
        return 0.0
    low, high = torch.stack(torch.aminmax(values)).tolist()  # both are NaN if a number is
    return max(abs(low), abs(high))
