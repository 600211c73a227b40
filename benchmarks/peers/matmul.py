"""The limit: matrix products alone, as fast as this machine does them. A contestant like the others.

Settings: `what` "peak": one large square product (of `size` rows), the machine's rate; "network": the very products of
the workload's network, forward and backward, with nothing between them. `dtype` "fp32" | "bf16". One step of "network"
is one batch; one step of "peak" is one product.

A limit ratio is samples/s times FLOPs a sample, divided by the peak: 1 would mean that lookups, activations, losses,
optimizers and Python cost nothing and that the small products of the network ran like the large one.
"""

from __future__ import annotations

import torch

from benchmarks.worker import serve
from benchmarks.workload import ModelKind, Workload, linear_layers

PEAK_SIZE = 2048


class MatmulContestant:
    """Products only."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        dtype = torch.bfloat16 if settings.get("dtype") == "bf16" else torch.float32
        generator = torch.Generator().manual_seed(0)
        self.products: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.batched: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        if settings["what"] == "peak":
            size = int(str(settings.get("size", PEAK_SIZE)))
            self.products = [(random(size, size), random(size, size), random(size, size))]
            flop = 2.0 * size**3
        else:
            flop = self._network(workload, random)
        self.info: dict[str, object] = {"flop_per_step": flop}

    def _network(self, workload: Workload, random) -> float:
        batch, flop = workload.batch_size, 0.0
        for fan_in, fan_out, needs_input_gradient in linear_layers(workload):
            inputs, weight, output = random(batch, fan_in), random(fan_out, fan_in), random(batch, fan_out)
            self.products.append((inputs, weight.t(), output))
            self.products.append((output.t(), inputs, torch.empty_like(weight)))
            if needs_input_gradient:
                self.products.append((output, weight, torch.empty_like(inputs)))
            flop += 2.0 * batch * fan_in * fan_out * (2 + needs_input_gradient)
        if workload.model is ModelKind.DLRM:
            num_fields = len(workload.lengths) + 1
            fields, dots = random(batch, num_fields, workload.dim), random(batch, num_fields, num_fields)
            self.batched = [
                (fields, fields.transpose(1, 2), torch.empty_like(dots)),
                (dots, fields, torch.empty_like(fields)),
            ]
            flop += 4.0 * batch * num_fields * num_fields * workload.dim
        return flop

    def run(self, steps: int) -> float:
        """So many batches' products."""
        for _ in range(steps):
            for left, right, out in self.products:
                torch.mm(left, right, out=out)
            for left, right, out in self.batched:
                torch.bmm(left, right, out=out)
        return float(self.products[0][2][0, 0])


if __name__ == "__main__":
    serve(MatmulContestant)
