"""TableOptimizer: the exact update of the rows that a step touched.

The backward pass left, for each storage, the gradient of the lookup's output and the rows that were read. Between
backward and `step` everything that a trainer wants to know or change is exact and cheap:

    tables(batch) … loss.backward()          records
    optimizer.all_finite()                   would the update write a NaN?  one scan of B·T numbers
    optimizer.grad_norm_squared()            of the gradient summed over duplicates, as a dense gradient would give
    optimizer.scale_grad(factor)             multiplies at no cost (applied inside the update)
    optimizer.step(lr)                       each distinct row once; forgets what was recorded

Several backward passes before one step accumulate, exactly as with dense gradients. The rules and their formulas are
in `ziggurat.ops.table_optimizers`. State is named by table (`<table>.sum`), whatever the storage or the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from ziggurat.embeddings.config import EmbeddingConfig
from ziggurat.embeddings.contract import Embeddings
from ziggurat.embeddings.room import TableUse
from ziggurat.embeddings.storage.part import StoredRows, TablePart, reader, table_tensor
from ziggurat.embeddings.storage.table_storage import state_keys
from ziggurat.embeddings.tables import whole_tables
from ziggurat.errors import CheckpointError, ConfigError
from ziggurat.ops.lookup import Step, SummedGradient
from ziggurat.ops.lookup.gradient import every_sum_is_finite
from ziggurat.ops.lookup.triton import finite_without_waiting, sums_without_waiting


class TableOptimizer:
    """Applies recorded gradients to embedding tables.

    Args:
        tables: what to update, on one device.
        config: constants of the rule; the tables' own config unless given. The kind must be the tables' own.

    Raises:
        ConfigError: the tables have dense gradients, the kinds differ, the memory does not hold the state, or a rule of
            the user's own breaks a promise of `TableOptimizerKind`.
    """

    def __init__(self, tables: Embeddings, config: EmbeddingConfig | None = None) -> None:
        self.config = config or tables.config
        if tables.has_dense_gradients or self.config.optimizer is not tables.config.optimizer:
            raise ConfigError(
                expected="tables and optimizer of one kind, which updates touched rows",
                found=f"tables: {tables.config.optimizer.value!r}, optimizer: {self.config.optimizer.value!r}",
                where="TableOptimizer",
                ways_out="give tables with dense gradients to a torch optimizer: they are in model.parameters()",
            )
        if self.config.optimizer.cpp_code is None:  # one of the user's own, which no test of ours has tried
            self.config.optimizer.check(Step(rule=self.config.rule, learning_rate=0.1))
        self._tables = whole_tables(tables)
        self._scale = 1.0
        self._summed: list[SummedGradient | None] | None = None
        self._is_replaced = False
        self._num_summed: list[int] = []
        self._num_steps = 0
        self._count: Tensor | None = None  # of steps that applied, on a device that the host does not wait for
        weights = self._tables.tables
        # Before the state is made: an allocator's error would name no table.
        weights.check_room(TableUse.STATE)
        for index in range(weights.num_storages):
            weights.storage(index).add_state(self.config.optimizer, initial_sum=self.config.initial_sum)

    def zero_grad(self) -> None:
        """Forget what was recorded."""
        for recorded in self._tables.recorded:
            recorded.clear()
        self._scale = 1.0
        self._summed = None
        self._is_replaced = False

    def all_finite(self) -> bool:
        """True if no summed gradient, scaled, is NaN or infinite. Costs one scan of the output gradients."""
        # Infinity times 0 is NaN: no row would be left in order, whatever the gradients are.
        if not math.isfinite(self._scale):
            return False
        verdict = None
        if not self._is_replaced:
            verdict = every_sum_is_finite([part for parts in self._tables.recorded for part in parts])
        # A factor above 1 may push a sum that is finite over the edge, so then the sums themselves are scaled.
        if verdict is not None and (abs(self._scale) <= 1.0 or not verdict):
            return verdict
        summed = [gradient for gradient in self.sums() if gradient is not None]
        finite = [torch.isfinite(gradient.sums * self._scale).all() for gradient in summed]
        return not finite or bool(torch.stack(finite).all())

    def grad_norm_squared(self) -> float:
        """Σ g² over all rows, with the gradients of equal rows summed first, and `scale_grad` applied."""
        total = 0.0
        for gradient in self.sums():
            if gradient is not None and len(gradient.rows):
                rows = torch.linalg.vector_norm(gradient.sums, dim=1, dtype=torch.float64)
                total += float(rows.square_().cumsum_(0)[-1])  # cumsum: one order whatever the number of threads
        return total * self._scale**2

    def are_finite_on_device(self) -> Bool[Tensor, ""]:
        """`all_finite` of gradients that nobody scaled, as a scalar that the host need not wait for."""
        parts = [part for recorded in self._tables.recorded for part in recorded]
        # No lookup, no gradient: nothing that could be in disorder.
        if not parts:
            return torch.ones((), dtype=torch.bool, device=self._tables.tables.device)
        return finite_without_waiting(self._tables.kernel, parts)

    @torch.no_grad()
    def norm_squared_on_device(self) -> Float64[Tensor, ""]:
        """`grad_norm_squared` of gradients that nobody scaled, as a scalar that the host need not wait for."""
        total = torch.zeros((), dtype=torch.float64, device=self._tables.tables.device)
        for gradient in self.sums(of_fixed_size=range(len(self._tables.recorded))):
            if gradient is not None:
                # Rows behind the distinct ones are zeros, and add nothing.
                total += torch.linalg.vector_norm(gradient.sums, dtype=torch.float64).square()
        return total

    @torch.no_grad()
    def step_where(
        self, applies: Bool[Tensor, ""], *, lr: Float[Tensor, ""], scale: Float[Tensor, ""] | None = None
    ) -> None:
        """`step` where a flag on the device is true, nothing where it is false; the host waits for neither.

        Args:
            applies: the flag. The host counts the step apart (`count`), since a graph makes it without Python.
            lr: learning rate η.
            scale: factor on the gradient.
        """
        # Made at the first such step, and changed in place from then on: a recorded graph counts there.
        if self._count is None:
            self._count = torch.full((), self._num_steps, device=applies.device)
        # The number that the step has if it applies; the count itself moves by 0 where it does not.
        number = self._count + 1
        self._count += applies
        factor = self._scale if scale is None else scale
        self._apply(Step(rule=self.config.rule, learning_rate=lr, scale=factor, number=number, applies=applies))

    def count(self) -> None:
        """Count a step of `step_where`; call it after that, and `take_back` when it turns out that it did not apply."""
        self._num_steps += 1

    def take_back(self) -> None:
        """Count one step less: it turned out that it did not apply."""
        self._num_steps -= 1

    def scale_grad(self, factor: float) -> None:
        """Multiply the gradient by `factor` (clipping, loss scaling); done inside `step`."""
        self._scale *= float(factor)

    def sums(self, *, of_fixed_size: Collection[int] = ()) -> list[SummedGradient | None]:
        """The gradient of each storage, equal rows summed; made once for what is recorded now, used by `step` too.

        Args:
            of_fixed_size: storages whose sums have as many rows as lookups (`sums_of_fixed_size`), so that nobody waits
                for a device to say how many are distinct.
        """
        num_recorded = [len(parts) for parts in self._tables.recorded]
        # A backward pass since the last sum has added parts, as accumulation over several batches does.
        if self._summed is None or num_recorded != self._num_summed:
            self._num_summed = num_recorded
            self._is_replaced = False
            kernel = self._tables.kernel
            with torch.no_grad():
                self._summed = [
                    (sums_without_waiting(kernel, parts) if index in of_fixed_size else kernel.sum_gradients(parts))
                    if parts
                    else None
                    for index, parts in enumerate(self._tables.recorded)
                ]
        return self._summed

    @property
    def is_replaced(self) -> bool:
        """True if `replace_sums` was called for what is recorded now."""
        return self._is_replaced and [len(parts) for parts in self._tables.recorded] == self._num_summed

    def replace_sums(self, sums: list[SummedGradient | None]) -> None:
        """Go on with other sums, one a storage: those of all ranks that hold these tables."""
        assert len(sums) == len(self.sums())
        self._summed = sums
        self._is_replaced = True

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every row that was read, once, then forget what was recorded.

        Args:
            lr: learning rate η.
        """
        self._num_steps += 1
        self._apply(self._step(lr))

    @torch.no_grad()
    def step_again(self, lr: float, *, scale: float = 1.0) -> None:
        """Update rows that were recorded since `step`, as part of that step: with its number.

        Args:
            lr: learning rate η of that step.
            scale: factor on the gradient, of that step.
        """
        # No count of a step: Adam's correction of bias must be that of the step that this completes.
        self._scale = scale
        self._apply(self._step(lr))

    def _step(self, lr: float) -> Step:
        return Step(rule=self.config.rule, learning_rate=float(lr), scale=self._scale, number=self._num_steps)

    def _apply(self, step: Step) -> None:
        kernel = self._tables.kernel
        for index, parts in enumerate(self._tables.recorded):
            if not parts:
                continue
            storage = self._tables.tables.storage(index)
            # Sums that somebody asked for (clipping, other ranks) are used; else the storage sums and updates at once.
            is_summed = self._summed is not None and self._num_summed[index] == len(parts)
            summed = self._summed[index] if self._summed is not None and is_summed else None
            if summed is not None:
                storage.apply(kernel, gradient=summed, step=step)
            else:
                storage.update(kernel, parts=parts, step=step)
        self.zero_grad()

    @torch.no_grad()
    def forget(self, share: float) -> None:
        """Take a share off the sums of mean squared gradients, by which rates of rows fall, of every row.

        Args:
            share: 0 to 1.
        """
        key = self.config.optimizer.mean_squares
        assert key, "this rule sums nothing up"
        for name, rows in self.state_rows().items():
            if name.rpartition(".")[2] != key:
                continue
            for first, count in rows.chunks():
                rows.write(first, rows.read(first, count) * (1.0 - share))

    def state_dict(self) -> dict[str, Tensor]:
        """State of every table (`<table>.sum`, or `.exp_avg` and `.exp_avg_sq`), sharing memory, and `step`.

        State of tables that are not in memory is there as `TablePart`.
        """
        entries = {name: table_tensor(rows) for name, rows in self.state_rows().items()}
        return {**entries, "step": torch.tensor(self._num_steps)}

    def state_rows(self) -> dict[str, StoredRows]:
        """State of every table, by the names of `state_dict`."""
        weights = self._tables.tables
        keys = state_keys(self.config.optimizer)
        return {
            f"{name}.{key}": weights.rows(name, key=key)
            for name, place in weights.places.items()
            for key in (*keys, *weights.storage(place.storage).extra_keys)
        }

    @property
    def num_steps(self) -> int:
        """Steps so far."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._num_steps = num_steps
        if self._count is not None:
            self._count.fill_(num_steps)  # in place: a graph counts there

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy the state of every table.

        Raises:
            CheckpointError: an entry is missing, unknown or of another shape; nothing has changed then.
        """
        # Everything is compared before anything is written: a state that does not fit changes no row.
        mine: dict[str, tuple[int, ...]] = {name: rows.shape for name, rows in self.state_rows().items()}
        mine["step"] = ()
        missing = sorted(mine.keys() - state.keys())
        unknown = sorted(state.keys() - mine.keys())
        wrong = [key for key in mine.keys() & state.keys() if mine[key] != tuple(state[key].shape)]
        if missing or unknown or wrong:
            raise CheckpointError(
                expected=f"the state of {self.config.optimizer.value!r} for {len(self._tables.tables.places)} tables",
                found=f"missing {missing}, unknown {unknown}, of another shape {sorted(wrong)}",
                where="TableOptimizer.load_state_dict",
                ways_out="load the state of a run with the same tables and the same table optimizer",
            )
        for key, rows in self.state_rows().items():
            given = state[key]
            if isinstance(given, TablePart) and given.rows == rows:
                continue  # they are the same numbers
            read = reader(state[key])
            for first, count in rows.chunks():
                rows.write(first, read(first, count))
        self.num_steps = int(state["step"])
