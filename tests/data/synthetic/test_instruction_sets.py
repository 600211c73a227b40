"""Synthetic rows are the same bits on older processors; numpy is made to believe in one."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.preprocess.test_instruction_sets import AVX2, SSE
from tests.data.synthetic.test_drift import ALL
from ziggurat.data.synthetic.drift import DriftingTeacher
from ziggurat.data.synthetic.rows import BlockMaker, SyntheticConfig

CONFIG = SyntheticConfig(
    cardinalities=(2_000_000, 100),
    list_cardinalities=(1000,),
    zipf_exponent=0.9,
    conversion_rate=0.1,
    missing_share=0.1,
)
DRIFT = dataclasses.replace(ALL, teacher=dataclasses.replace(CONFIG, cardinalities=(50_000, 100)))


def digest() -> str:
    """Of all that files get of one block, and of one window of a teacher that drifts."""
    block = BlockMaker(CONFIG).block(3)
    found = hashlib.sha256()
    for values in block.columns.values():
        plain = values if isinstance(values, np.ndarray) else values.values.to_numpy()
        found.update(np.ascontiguousarray(plain).tobytes())
    found.update(block.labels.tobytes())
    for column in DriftingTeacher(DRIFT).frame(5).fill_null(-1.0).iter_columns():
        plain = column.explode() if column.dtype.is_nested() else column
        found.update(plain.fill_null(-1).to_numpy().tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("disabled", [AVX2, SSE], ids=["avx2", "sse"])
def test_an_older_processor_makes_the_same_rows(disabled: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"from {__name__} import digest; print(digest())"],
        env=os.environ | {"NPY_DISABLE_CPU_FEATURES": disabled},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == digest()
