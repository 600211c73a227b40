"""One machine of a gradient-boosting job of LightGBM: `python -m benchmarks.boosting_rank FILE MACHINE` in its host.

FILE has a line "address port" for each machine, in the order of ranks. Prints milliseconds a tree, and some scores.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

NUM_ROWS = 4_000
NUM_FEATURES = 500
NUM_TREES = 2
NUM_LEAVES = 15


def _main(hosts: str, machine: str) -> None:
    import lightgbm  # pyright: ignore[reportMissingImports]

    lines = Path(hosts).read_text().splitlines()
    generator = np.random.default_rng(int(machine))
    features = generator.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(np.float32)
    label = (features[:, :5].sum(axis=1) + generator.normal(size=NUM_ROWS) > 0).astype(np.float32)
    settings = {
        "objective": "binary",
        "tree_learner": "data",
        "pre_partition": True,
        "num_leaves": NUM_LEAVES,
        "max_bin": 255,
        "min_data_in_bin": 1,
        "num_threads": 1,
        "verbosity": -1,
        "seed": 0,
        # What the command-line program of LightGBM reads from a file (`machine_list_filename`), Python hands over.
        "machines": ",".join(line.replace(" ", ":") for line in lines),
        "local_listen_port": int(lines[0].split()[1]),
        "num_machines": len(lines),
        "time_out": 2,
    }
    booster = lightgbm.Booster(settings, lightgbm.Dataset(features, label=label, params=settings))
    # Connections are made and bins are agreed on by now; the first tree is not timed.
    booster.update()
    start = time.perf_counter()
    for _ in range(NUM_TREES):
        booster.update()
    took_ms = 1e3 * (time.perf_counter() - start) / NUM_TREES
    rows = np.random.default_rng(99).normal(size=(16, NUM_FEATURES))
    print(json.dumps({"ms": took_ms, "scores": booster.predict(rows).tolist()}), flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
