"""A contestant for tests of jobs: adds numbers over ranks, and fails in the ways that its settings ask for."""

import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.datacentre.serve import serve_ranks


class ToyRanks:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank = int(os.environ["RANK"])
        self.settings = settings
        keys = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
        self.info = {"rank": self.rank, "pid": os.getpid(), **{key: os.environ[key] for key in keys}}

    def run(self, name: str, steps: int) -> float:
        if self.rank == self.settings.get("bad_rank"):
            print("the last words of this rank", file=sys.stderr, flush=True)
            if name == "raise":
                raise ValueError("a bad number")
            if name == "die":
                os._exit(7)
            if name == "hang":
                time.sleep(60)
        total = torch.tensor(float(self.rank + 1))
        for _ in range(steps):
            dist.all_reduce(total)
        return float(total)


if __name__ == "__main__":
    serve_ranks(ToyRanks)
