"""with_next: each batch together with the one after it, so that the next one's ids can leave early.

    step k      forward   backward   update
    ids k+1            ──────►                    travel while step k computes

Looking up embeddings on many ranks starts with ids that travel to the ranks that hold the rows. The batch is known long
before (the loader works ahead), so its ids leave one step early and no step waits for them. Only ids may do so: they do
not depend on weights, and the numbers stay those of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ziggurat.features.batch import Batch


def with_next(batches: Iterable[Batch], *, device: torch.device) -> Iterator[tuple[Batch, Batch | None]]:
    """(batch, the batch after it) on `device`; the last batch has None after it, and nothing is left over."""
    iterator = iter(batches)
    current = next(iterator, None)
    current = None if current is None else current.to(device)
    while current is not None:
        upcoming = next(iterator, None)
        upcoming = None if upcoming is None else upcoming.to(device)
        yield current, upcoming
        current = upcoming
