"""The machine's limit, and whether BF16 is any use on it: both measured in the run that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.harness import Entry, Measured, Worker, say
from benchmarks.workload import Workload, flops_per_sample

MATMUL = "benchmarks.peers.matmul"
MIN_BF16_SPEEDUP = 1.3
PROBE_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class Bf16Probe:
    """Rates of a small product in both formats, in GFLOP/s, and what follows from them."""

    fp32_gflop_per_s: float
    bf16_gflop_per_s: float

    @property
    def pays(self) -> bool:
        """True if this CPU multiplies BF16 in hardware, to its advantage."""
        return self.bf16_gflop_per_s >= MIN_BF16_SPEEDUP * self.fp32_gflop_per_s

    @property
    def reason(self) -> str:
        """For the report."""
        verdict = "BF16 pays" if self.pays else "this CPU emulates BF16 and is slower in it"
        return f"{verdict}: FP32 {self.fp32_gflop_per_s:.0f}, BF16 {self.bf16_gflop_per_s:.1f} GFLOP/s at {PROBE_SIZE}³"


def probe_bf16() -> Bf16Probe:
    """Measure a product of 256 × 256 matrices in FP32 and BF16 on one thread, the best of 20.

    Small and on one thread, because a large one takes minutes where BF16 is emulated, and two threads wait for each
    other on a busy machine.
    """
    rates = {}
    for dtype in ("fp32", "bf16"):
        entry = Entry(name=dtype, module=MATMUL, settings={"what": "peak", "dtype": dtype, "size": PROBE_SIZE})
        with Worker(entry, threads=1) as worker:
            seconds = min(worker.run(1)["seconds"] for _ in range(20))
            rates[dtype] = 2.0 * PROBE_SIZE**3 / seconds / 1e9
    probe = Bf16Probe(fp32_gflop_per_s=rates["fp32"], bf16_gflop_per_s=rates["bf16"])
    say(f"  {probe.reason}")
    return probe


def limit_entries(workload: Workload, *, bf16: bool) -> list[Entry]:
    """Contestants that only multiply: the peak rate and the network's own products, in the formats that pay."""
    entries = []
    for dtype in ("fp32", "bf16") if bf16 else ("fp32",):
        peak = {"what": "peak", "dtype": dtype}
        entries.append(Entry(name=f"peak {dtype}", module=MATMUL, workload=workload, settings=peak, samples_per_step=1))
        network = {"what": "network", "dtype": dtype}
        entries.append(Entry(name=f"products only {dtype}", module=MATMUL, workload=workload, settings=network))
    return entries


def peak_gflop_per_s(results: dict[str, Measured], dtype: str) -> float:
    """The machine's rate as measured in this run."""
    measured = results[f"peak {dtype}"]
    return measured.rate * float(str(measured.info["flop_per_step"])) / 1e9


def limit_samples_per_s(
    results: dict[str, Measured], workload: Workload, dtype: str, *, training: bool = True
) -> float:
    """Samples a second if the network's products ran at the peak rate and nothing else took time."""
    return peak_gflop_per_s(results, dtype) * 1e9 / flops_per_sample(workload, training=training)
