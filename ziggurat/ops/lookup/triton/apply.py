"""The launch of `apply_kernel`: what happens to the summed gradient of each row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from ziggurat.ops.kernel_choice import kernels_of, power_of_two
from ziggurat.ops.lookup.kernel import Step
from ziggurat.ops.lookup.triton.runs import UPDATE_KERNELS, Runs, chunk_sums
from ziggurat.ops.machine.launches import Launch, tile_rows


@dataclass(frozen=True, kw_only=True)
class RuleTarget:
    """Rows that a rule is applied to.

    Args:
        weight: FP32, or upper halves in int16.
        state: of the rule.
        step: the rule, and the numbers of this step, which may be tensors.
        origins: of the noise that rounds upper halves (`origins_of`); None rounds them to the nearest.
    """

    weight: Shaped[Tensor, "R D"]
    state: dict[str, Tensor]
    step: Step
    origins: Int64[Tensor, "origins 4"] | None

    def arguments(self) -> dict[str, object]:
        """Return the arguments of the kernel."""
        step = self.step
        rule = self.step.rule
        any_tensor = self.weight
        # A launch needs a tensor for every pointer; the kernel reads none that its rule has not.
        first, second, *_ = [*self.state.values(), any_tensor, any_tensor]
        rounding = "none"
        if self.weight.dtype == torch.int16:
            rounding = "nearest" if self.origins is None else "stochastic"
        numbers = _numbers(
            learning_rate=rule.kind.step_size(step),
            scale=step.scale,
            applies=1.0 if step.applies is None else step.applies,
            step_number=step.number,
        )
        return numbers | {
            "weight": self.weight,
            "first_state": first,
            "second_state": second,
            "sums": any_tensor,
            "summed_rows": any_tensor,
            "eps": rule.eps,
            "weight_decay": rule.weight_decay,
            "rest1": 1.0 - rule.beta1,
            "rest2": 1.0 - rule.beta2,
            "origins": any_tensor if self.origins is None else self.origins,
            "num_origins": 0 if self.origins is None else len(self.origins),
            "rule": rule.kind.triton_rule,
            "has_decay": bool(rule.weight_decay),
            "rounding": rounding,
        }


@dataclass(frozen=True, kw_only=True)
class SumTarget:
    """Tensor that sums are written to, and the rows of the sums."""

    sums: Float[Tensor, "N D"]
    rows: Int64[Tensor, "N"]

    def arguments(self) -> dict[str, object]:
        """Return the arguments of the kernel, which reads no number of a rule."""
        # As above: sums stand for every tensor that is not read.
        unused: dict[str, object] = dict.fromkeys(("weight", "first_state", "second_state", "origins"), self.sums)
        unused |= dict.fromkeys(("eps", "weight_decay", "rest1", "rest2"), 0.0)
        unused |= _numbers(learning_rate=1.0, scale=1.0, applies=1.0, step_number=0)
        unused |= {"num_origins": 0, "has_decay": False, "rounding": "none"}
        return unused | {"sums": self.sums, "summed_rows": self.rows, "rule": "sum"}


def _numbers(
    *, learning_rate: float | Tensor, scale: float | Tensor, applies: float | Tensor, step_number: int | Tensor
) -> dict[str, object]:
    """Numbers of a step, and which of them are on the device."""
    return {
        "learning_rate": learning_rate,
        "scale": scale,
        "applies": applies,
        "step_number": step_number,
        "size_there": isinstance(learning_rate, Tensor),
        "scale_there": isinstance(scale, Tensor),
        "applies_there": isinstance(applies, Tensor),
        "number_there": isinstance(step_number, Tensor),
    }


def apply_runs(
    target: RuleTarget | SumTarget, vectors: Float[Tensor, "M"], *, runs: Runs, dim: int, launch: Launch
) -> None:
    """Sum the gradients of equal rows, and do with each sum what the target says.

    Args:
        target: what to do.
        vectors: gradients, flat.
        runs: sorted lookups of them.
        dim: D.
        launch: of the kernel.
    """
    partials = chunk_sums(runs, vectors, dim=dim)
    lookups = {
        "vectors": vectors,
        "rows": runs.rows,
        "sources": runs.sources,
        "starts": runs.starts,
        "num_runs": runs.count,
        "first_chunks": runs.starts if runs.chunks is None else runs.chunks.first,
        "partials": vectors if partials is None else partials,
        "is_summed": False,
        "has_long": partials is not None,
        "long_run": 0 if runs.chunks is None else runs.chunks.long_run,
        "align": runs.align,
    }
    _launch(target, lookups, most_runs=runs.num_lookups, dim=dim, launch=launch)


def apply_sums(target: RuleTarget, sums: Float[Tensor, "U D"], *, rows: Int64[Tensor, "U"], launch: Launch) -> None:
    """Do with gradients that are summed already what the target says.

    Args:
        target: what to do.
        sums: gradients.
        rows: of the storage.
        launch: of the kernel.
    """
    lookups = {
        "vectors": sums,
        "rows": rows,
        **dict.fromkeys(("sources", "starts", "first_chunks", "partials"), sums),
        "num_runs": len(rows),
        "is_summed": True,
        "has_long": False,
        "long_run": 0,
        "align": 1,
    }
    _launch(target, lookups, most_runs=len(rows), dim=sums.shape[1], launch=launch)


def _launch(
    target: RuleTarget | SumTarget, lookups: dict[str, object], *, most_runs: int, dim: int, launch: Launch
) -> None:
    tile = tile_rows(dim, numbers=launch.numbers)
    # As many programs as there could be runs: how many there are, only the device knows.
    kernels_of(UPDATE_KERNELS).apply_kernel[(-(-most_runs // tile),)](
        **target.arguments(),
        **lookups,
        most_runs=most_runs,
        dim=dim,
        padded_dim=power_of_two(dim, least=1),
        tile=tile,
        unroll=launch.reads_ahead,
        num_warps=launch.warps,
        # Products and sums are rounded one by one, as the reference rounds them.
        enable_fp_fusion=False,
    )
