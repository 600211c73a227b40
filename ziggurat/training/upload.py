"""Upload: batches reach a GPU while it computes, two steps before they are trained.

    thread       pack k+2 into locked memory
    copy queue                              copy k+2 ─ widen ids          (`features/batches/packed.py`)
    compute      ──────────────── step k ────────────────────│──── step k+1 ────

The copy has a queue of its own on the GPU, so it runs beside the step; what uses the batch waits for the copy on the
GPU, not on the host. Packing looks at every row once and writes it, more than a step takes on a large GPU, so a thread
does it. The locked memory goes back to torch's pool when the copy is done, which torch knows.

On a CPU a batch is where it belongs already.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ziggurat.features.batch import Batch
from ziggurat.features.batches.packed import pack


class Upload:
    """Brings batches to a device.

    Args:
        device: of the model.
        is_beside: bring them beside the computation, where the device can.

    Attributes:
        depth: batches to have on their way.
    """

    def __init__(self, device: torch.device, *, is_beside: bool) -> None:
        self._device = device
        self._is_beside = is_beside and device.type == "cuda"
        self.depth = 2 if self._is_beside else 1
        if self._is_beside:
            self._stream = torch.cuda.Stream(device)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")

    def start(self, batch: Batch) -> Callable[[], Batch]:
        """Begin to bring a batch; calling the result gives it on the device, without the host waiting for the copy."""
        if not self._is_beside:
            arrived = batch.to(self._device)
            return lambda: arrived
        coming = self._thread.submit(self._bring, batch)
        found: list[Batch] = []

        def landed() -> Batch:
            if not found:
                found.append(self._land(coming))
            return found[0]

        return landed

    def close(self) -> None:
        """Let the thread end; batches on their way are left there."""
        if self._is_beside:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _bring(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | torch.Event]:
        """Pack and send a batch, in the thread."""
        packed = pack(batch, is_locked=True)
        with torch.cuda.stream(self._stream):
            arriving = packed.to(self._device)
            return arriving, self._stream.record_event()

    def _land(self, coming: Future[tuple[Batch, torch.cuda.Event | torch.Event]]) -> Batch:
        """Let the computation wait for a batch, and its memory live until the computation has read it."""
        batch, sent = coming.result()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(sent)
        for tensor in batch.tensors().values():
            if tensor.is_cuda:
                # Made on the queue of copies: torch would otherwise hand the memory out while a step reads it.
                tensor.record_stream(computing)
        return batch
