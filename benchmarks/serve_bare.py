"""The module without a server: a process that ranks batches as fast as it can, for a time that it is told.

    python -m benchmarks.serve_bare EXPORT ITEMS     one line of JSON in, one out

The first line out has the bodies of requests; every line in, {"batch": 64, "seconds": 0.7, "pause_s": 0}, is answered
with the requests a second and the median time of a batch; after a pause, its time holds what waking up costs.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

import torch

from ziggurat.serving.answers import RankRequest
from ziggurat.serving.recommender import Recommender

NUM_REQUESTS = 512


def main() -> None:
    torch.set_num_threads(1)
    recommender = Recommender.load(sys.argv[1])
    draws = random.Random(0)
    users = recommender.users(limit=2000)
    known = sorted({item for user in users[:200] for item in recommender.history({"user_id": user}, limit=50)})
    data = [
        {"user": {"user_id": draws.choice(users)}, "items": draws.sample(known, int(sys.argv[2]))}
        for _ in range(NUM_REQUESTS)
    ]
    requests = [RankRequest.from_json(each) for each in data]
    recommender.rank_many(requests[:64])
    print(json.dumps(data), flush=True)
    place = 0
    for line in sys.stdin:
        told = json.loads(line)
        begin, times = time.perf_counter(), []
        while time.perf_counter() < begin + told["seconds"]:
            chosen = [requests[(place + index) % NUM_REQUESTS] for index in range(told["batch"])]
            place += told["batch"]
            if told["pause_s"]:
                time.sleep(told["pause_s"])
            started = time.perf_counter()
            with torch.inference_mode():
                recommender.rank_many(chosen)
            times.append(time.perf_counter() - started)
        rate = len(times) * told["batch"] / (time.perf_counter() - begin)
        print(json.dumps({"per_s": rate, "median_s": statistics.median(times)}), flush=True)


if __name__ == "__main__":
    main()
