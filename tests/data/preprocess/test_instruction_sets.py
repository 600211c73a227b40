"""What is fitted and encoded does not depend on the processor: the same bits with other vectors than this machine has.

numpy chooses its functions by the processor; an environment variable makes it believe in an older one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ziggurat.data.preprocess.values.numeric import NumericFitter, to_bucket_rows, to_floats
from ziggurat.features.schema import Dense, NumericTransform
from ziggurat.ops import logarithm

# Names of groups that numpy of another version does not know are ignored.
AVX2 = "X86_V4 AVX512_ICL AVX512_SPR AVX512F AVX512CD AVX512_SKX"
SSE = f"{AVX2} X86_V3 AVX2 FMA3"


def digests() -> dict[str, str]:
    """By transform, what 50 columns of 200 numbers are fitted to, and encoded to."""
    rng = np.random.default_rng(0)
    columns = [np.ldexp(rng.random(200), rng.integers(-10, 20, 200)) for _ in range(25)]
    columns += [rng.integers(18, 70, 200).astype(np.float64) for _ in range(25)]
    found: dict[str, str] = {}
    # Other tests of this process may have listed transforms of their own, which the other process lacks.
    ours = [each for each in NumericTransform if type(each).__module__.startswith("ziggurat.")]
    for transform in ours:
        digest = hashlib.sha256()
        features = tuple(Dense(name=f"{index}", transform=transform) for index in range(len(columns)))
        fitter = NumericFitter(features)
        values = {feature.name: column for feature, column in zip(features, columns, strict=True)}
        fitter.add(values, global_rows=np.arange(200))
        for name, state in fitter.finish().items():
            digest.update(np.array([state.mean, state.sd, *state.quantiles]).tobytes())
            if transform.makes_ids:
                digest.update(transform.bucket_ids(values[name], logarithm).tobytes())
            elif transform.is_bucketed:
                digest.update(to_bucket_rows(values[name], state).tobytes())
            else:
                feature = features[int(name)]
                digest.update(to_floats(values[name], feature, state).tobytes())
        found[transform.value] = digest.hexdigest()
    return found


@pytest.mark.parametrize("disabled", [AVX2, SSE], ids=["avx2", "sse"])
def test_an_older_processor_fits_and_encodes_the_same_bits(disabled: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import digests; print(digests())"],
        env=os.environ | {"NPY_DISABLE_CPU_FEATURES": disabled},
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.stdout.strip() == str(digests())
