"""Batch normalisation that is the same on one device and on many ranks.

    y = γ · (x − mean) / sqrt(var + ε) + β          mean, var: over the samples of the batch, on whatever rank they are

The moments of a batch are sums over its samples. On many ranks `parallelize` gives the layer a function that adds up
over all of them (`world_sum`), differentiably; the layer itself knows nothing of processes:

    each rank   [ Σ x | Σ x² | number ]  ──► world_sum ──►  mean, var: the same bits on every rank

Sums are taken in FP64, because Σ x² / n − mean² would lose the digits of a column whose mean is large.

One sample has no standard deviation. With fewer than two, on all ranks together, a layer in training mode uses its
running statistics instead and leaves them alone, so the short last batch of an epoch can never stop a run.

Reference: Ioffe and Szegedy, arXiv 1502.03167. Cost on ranks: two sums of 16 bytes a column and layer in a step, one
forward and one backward, for which the pass waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ziggurat.errors import ConfigError
from ziggurat.models.blocks.whole_batch import WholeBatch


def refuse_lone_sample(model: nn.Module, *, where: str) -> None:
    """Refuse torch's own batch norm where a training batch has one sample, of which it can take no variance.

    Args:
        model: to train.
        where: the batch is, for the error.

    Raises:
        ConfigError: the model has one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d) and not isinstance(module, BatchNorm):
            raise ConfigError(
                expected="batches of two samples or more: batch normalisation takes the variance of a batch",
                found=f"one sample, and torch's {type(module).__name__} at {name!r}",
                where=where,
                ways_out=(
                    "ziggurat.models.blocks.batch_norm.BatchNorm in its place: it uses its running statistics then, "
                    "and has the same settings and weights",
                    "another batch size: --batch-size, or LoaderConfig(batch_size=…)",
                ),
            )


class BatchNorm(WholeBatch, nn.BatchNorm1d):
    """Normalises columns over the samples of a batch.

    Settings, weights and statistics are those of `nn.BatchNorm1d`.
    """

    def forward(self, input: Float[Tensor, "B C"], num_passes: int = 1) -> Float[Tensor, "B C"]:  # torch's name
        """Return the same shape; collective in training mode on many ranks.

        Args:
            input: columns of samples.
            num_passes: over the same samples that this call stands for: the running statistics move as by so many.
        """
        if self.training and self.world_sum is not None:
            return self._over_ranks(input, self.world_sum, num_passes=num_passes)
        # Of such a batch there is no variance: the running statistics are used, and stay as they are.
        is_too_small = self.training and input.shape[0] < 2
        if not is_too_small and (not self.training or num_passes == 1):
            return super().forward(input)
        if not is_too_small and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(num_passes)
        return F.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            training=not is_too_small,
            momentum=0.0 if is_too_small else self._momentum_of(num_passes),
            eps=self.eps,
        )

    def _momentum_of(self, num_passes: int) -> float:
        """Return the share of a batch in statistics that it moves so many times: r ← (1 − m) r + m · now."""
        assert self.momentum is not None, "a moving average"
        return self.momentum if num_passes == 1 else 1.0 - (1.0 - self.momentum) ** num_passes

    def _over_ranks(self, inputs_BC: Tensor, world_sum: Callable[[Tensor], Tensor], *, num_passes: int) -> Tensor:
        running_mean_C, running_var_C = self._running()
        # FP64: Σ x² / n − mean² would lose the digits of a column whose mean is large.
        exact_BC = inputs_BC.double()
        number = exact_BC.new_full((1,), inputs_BC.shape[0])
        sums = world_sum(torch.cat([exact_BC.sum(dim=0), exact_BC.square().sum(dim=0), number]))
        sum_C, squares_C, number = sums.split([self.num_features, self.num_features, 1])
        # A count has no gradient; the sums keep theirs, through `world_sum`.
        number = number.detach()
        is_known = number >= 2.0  # asked on the device: no rank waits for it
        mean_C = sum_C / number.clamp(min=1.0)
        # Rounding may take a column without spread below zero.
        var_C = (squares_C / number.clamp(min=1.0) - mean_C.square()).clamp(min=0.0)
        self._take_in(mean_C.detach(), var_C.detach(), number=number, num_passes=num_passes)
        used_mean_C = torch.where(is_known, mean_C, running_mean_C.double())
        used_var_C = torch.where(is_known, var_C, running_var_C.double())
        normal_BC = (exact_BC - used_mean_C) * (used_var_C + self.eps).rsqrt()
        result_BC = normal_BC.to(running_mean_C.dtype)
        if self.weight is not None:
            result_BC = result_BC * self.weight + self.bias
        return result_BC.to(inputs_BC.dtype)

    def _running(self) -> tuple[Tensor, Tensor]:
        """Return the running mean and variance, which torch lets a norm be without, and ours never is."""
        assert self.running_mean is not None
        assert self.running_var is not None
        return self.running_mean, self.running_var

    @torch.no_grad()
    def _take_in(self, mean_C: Tensor, var_C: Tensor, *, number: Tensor, num_passes: int) -> None:
        """Move the running statistics; a batch of fewer than two samples moves nothing."""
        factor = torch.where(number >= 2.0, self._momentum_of(num_passes), 0.0)
        # As torch does: a batch is normalised by its own variance, and the running one estimates that of the data.
        unbiased_C = var_C * number / (number - 1.0).clamp(min=1.0)
        for running_C, now_C in zip(self._running(), (mean_C, unbiased_C), strict=True):
            running_C.copy_(running_C + factor * (now_C - running_C))
        if self.num_batches_tracked is not None:
            self.num_batches_tracked += num_passes * (number >= 2.0).squeeze(0)
