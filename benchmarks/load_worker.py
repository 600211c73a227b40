"""One rank that loads epochs of encoded rows and trains nothing, for `data_loading.py`; its parent says when.

    python -m benchmarks.load_worker FOLDER SHUFFLE RANK WORLD_SIZE CORES        CORES as in "0" or "0,1"

A line "go N" on stdin loads N batches; the answer is "begin end rows", by the clock that all processes share.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

BATCH_SIZE = 2048


def main(folder: str, shuffle: str, rank: str, world_size: str, cores: str) -> None:
    """Load one epoch to warm up, then what is asked for."""
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.environ["LOCAL_WORLD_SIZE"] = world_size
    from ziggurat.data.encoded.dataset import EncodedDataset
    from ziggurat.data.encoded.loader import Loader, LoaderConfig, Shuffle
    from ziggurat.features.batch import Batch

    config = LoaderConfig(batch_size=BATCH_SIZE, shuffle=Shuffle(shuffle))
    loader = Loader(EncodedDataset(folder), config=config, rank=int(rank), world_size=int(world_size))

    def endless() -> Iterator[Batch]:
        epoch = 0
        while True:
            yield from loader.batches(epoch=epoch)
            epoch += 1

    batches = endless()
    for _ in range(loader.steps_per_epoch):
        next(batches)
    print("ready", flush=True)
    for line in sys.stdin:
        num_batches, begin = int(line.split()[1]), time.time()
        rows = sum(next(batches).batch_size for _ in range(num_batches))
        print(begin, time.time(), rows, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
