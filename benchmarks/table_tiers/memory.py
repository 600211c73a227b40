"""Bytes of tables in few bits behind a cache, everything counted, against FP32 in memory: as the storages say."""

from __future__ import annotations

from dataclasses import dataclass

from ziggurat.embeddings.storage import MemoryStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.ops.lookup import TableOptimizerKind
from ziggurat.ops.row_cache import CachePolicy
from ziggurat.ops.row_formats import RowFormat

_ROWS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One kind of tables.

    Args:
        dim: columns.
        row_format: of rows behind the cache.
        cache: share of the rows in FP32.
        policy: which row leaves it.
        optimizer: what is kept beside them; None: nothing, tables that are only read.
        goal: the ratio that is wanted.
    """

    dim: int
    row_format: RowFormat
    cache: float
    policy: CachePolicy = CachePolicy.LRU
    optimizer: TableOptimizerKind | None = TableOptimizerKind.ROWWISE_ADAGRAD
    goal: float

    def measure(self) -> dict[str, object]:
        """Bytes of both, and their ratio."""
        made = TablesConfig(weights=self.row_format, cache=self.cache, cache_policy=self.policy).make_storage(seed=0)
        ours, plain = made(_ROWS, self.dim), MemoryStorage(_ROWS, self.dim)
        if self.optimizer is not None:
            ours.add_state(self.optimizer)
            plain.add_state(self.optimizer)
        ratio = plain.num_bytes / ours.num_bytes
        return {
            "rows": _ROWS,
            "dim": self.dim,
            "format": self.row_format.value,
            "cache": self.cache,
            "policy": self.policy.value,
            "optimizer": "none" if self.optimizer is None else self.optimizer.value,
            "ours": ours.num_bytes,
            "peer": plain.num_bytes,
            "unit": "bytes",
            "ratio": ratio,
            "goal": self.goal,
            "verdict": "met" if ratio >= self.goal else "missed",
        }


CASES = {
    "dlrm_d64_int8_cache5_memory": MemoryCase(dim=64, row_format=RowFormat.INT8, cache=0.05, goal=3.0),
    "dlrm_d128_int4_cache1_memory": MemoryCase(dim=128, row_format=RowFormat.INT4, cache=0.01, goal=6.0),
    "dlrm_d128_int4_lfu1_memory": MemoryCase(
        dim=128, row_format=RowFormat.INT4, cache=0.01, policy=CachePolicy.LFU, goal=6.0
    ),
    "dlrm_d128_int4_cache1_memory_no_state": MemoryCase(
        dim=128, row_format=RowFormat.INT4, cache=0.01, optimizer=None, goal=7.0
    ),
}


def table(found: dict[str, dict[str, object]]) -> str:
    """Markdown: one row a case."""
    lines = ["| case | bytes a row | FP32 | times smaller | goal | |", "|---|---:|---:|---:|---:|---|"]
    for name, case in found.items():
        ours, peer = (float(str(case[key])) / _ROWS for key in ("ours", "peer"))
        ratio = f"{float(str(case['ratio'])):.2f}"
        lines.append(f"| {name} | {ours:.1f} | {peer:.1f} | {ratio} | {case['goal']} | {case['verdict']} |")
    return "\n".join(lines)
