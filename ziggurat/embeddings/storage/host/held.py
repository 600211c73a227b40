"""HeldRows: places on a device for rows of the host's memory, filled while the step before computes.

    compute    ─ update k-1 ─│── forward k ── backward k ── update k ──│── forward k+1 …
                             e                                         w
    side       ─────────────── rows that leave ─► host                 │   after e: nothing later has read or changed
    thread        Places ─ gather ─► locked memory ─► places ──────────┘   them; w: the computation waits for the side

The side queue of the device and the computation touch different places: what step k needs keeps its place while batch
k + 1 arrives (`places.py`). So neither waits for the other but at e and w, and the host waits for nothing: the thread
waits for rows that left one batch ago, before it reads the host's memory, since one of them may be asked for again.

The device knows where rows are by one number of 32 bits a row (`map`): -1 where it has none. On a CPU both memories are
the same, and nothing is copied twice: the code runs as it is, without queues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from ziggurat.embeddings.storage.host.places import Exchange, Places
from ziggurat.embeddings.storage.memory import MemoryStorage
from ziggurat.embeddings.storage.table_storage import WEIGHT

_FLUSHED_ROWS = 65_536  # that go back to the host at once


@dataclass(frozen=True)
class _Returning:
    """Rows on their way back to the host: complete when `arrived` says so."""

    rows: Int64[Tensor, "L"]
    values: Mapping[str, Tensor]
    arrived: torch.cuda.Event | torch.Event | None


class HeldRows:
    """Some rows of a table in the memory of a device.

    Args:
        rows: all rows, in the memory of the host.
        keys: the arrays that travel: weights, and those of the optimizer.
        num_places: rows that may be held.
        padding: rows that are never changed, and read as zeros.
        device: whose memory holds them.

    Attributes:
        places: which rows.
        arrays: (P, D) or (P,) by key; place 0 is padding.
        map: (R,) the place of each row, -1 where it has none.
    """

    def __init__(
        self, rows: MemoryStorage, *, keys: Sequence[str], num_places: int, padding: Sequence[int], device: torch.device
    ) -> None:
        self._rows = rows
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.places = Places(rows.num_rows, num_places=num_places)
        tails = {key: rows.tensor(key).shape[1:] for key in keys}
        self.arrays: dict[str, Tensor] = {
            key: torch.zeros(self.places.num_needed, *tail, device=device) for key, tail in tails.items()
        }
        self.map: Int32[Tensor, "R"] = torch.full((rows.num_rows,), -1, dtype=torch.int32, device=device)
        self._padding = self._sent(torch.tensor(sorted(padding), dtype=torch.int64))
        # Place 0 holds zeros and is nobody's: padding is read there.
        self.map.index_fill_(0, self._padding, 0)
        self._thread: ThreadPoolExecutor | None = None
        self._coming: Future[Exchange | None] | None = None
        self._returning: _Returning | None = None
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        self._is_changed = False

    @property
    def num_bytes(self) -> int:
        """The bytes taken on the device."""
        return sum(array.nbytes for array in self.arrays.values()) + self.map.nbytes

    def announce(self, rows_N: Int64[Tensor, "N"]) -> None:
        """Begin to bring the rows of a coming batch, which are in the memory of the host."""
        self.settle()
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="rows-ahead")
        # Asked here and not in the thread: each thread has a current stream of its own.
        computed = torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None
        self._coming = self._thread.submit(self._bring, rows_N, computed)

    def settle(self) -> None:
        """Let the rows that were announced have arrived for whatever the device is asked to compute from here on."""
        coming = self._coming
        self._coming = None
        if coming is None:
            return
        exchange = coming.result()
        if exchange is not None:  # there were too few places, and arrays that a step reads do not grow
            self._grow()
            self._move(exchange, torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None)
        if self._stream is not None:
            # On the device alone: the host goes on.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def gather(self, rows_N: Int64[Tensor, "N"], *, key: str) -> Float[Tensor, "N *D"]:
        """A copy of rows on the device, wherever they lie; the host waits.

        Args:
            rows_N: in the memory of the host.
            key: which array.
        """
        self.settle()
        # What is on its way would be found on neither side.
        self._land()
        places = self.places.find(rows_N)
        held = (places >= 0).nonzero().view(-1)
        found = self._sent(self._rows.gather(rows_N, key=key))
        # The host's copy of rows that are held is older, so the device's is laid over it.
        return found.index_copy_(0, self._sent(held), self.arrays[key].index_select(0, self._sent(places[held])))

    def scatter(self, rows_N: Int64[Tensor, "N"], values: Float[Tensor, "N *D"], *, key: str) -> None:
        """Replace rows wherever they lie; the host waits.

        Args:
            rows_N: distinct, in the memory of the host.
            values: on the host or the device.
            key: which array.
        """
        self.settle()
        self._land()
        places = self.places.find(rows_N)
        is_held = places >= 0
        mine = is_held.nonzero().view(-1)
        others = (~is_held).nonzero().view(-1)
        on_device = self._sent(values) if values.device != self._device else values
        self.arrays[key].index_copy_(0, self._sent(places[mine]), on_device.index_select(0, self._sent(mine)))
        if len(others):
            on_host = values.cpu()
            self._rows.scatter(rows_N[others], on_host[others], key=key)
        self._is_changed = True

    def changed(self) -> None:
        """Learn that a step has changed rows that are held."""
        self._is_changed = True

    def flush(self) -> None:
        """Let the memory of the host have all rows as they are; the host waits."""
        self.settle()
        self._land()
        if not self._is_changed:
            return
        rows, places = self.places.held()
        # In parts, so that what is gathered on the device stays small.
        for begin in range(0, len(rows), _FLUSHED_ROWS):
            some = slice(begin, begin + _FLUSHED_ROWS)
            at = self._sent(places[some])
            for key, array in self.arrays.items():
                self._rows.scatter(rows[some], array.index_select(0, at).cpu(), key=key)
        self._is_changed = False

    def _bring(self, rows_N: Int64[Tensor, "N"], computed: torch.cuda.Event | torch.Event | None) -> Exchange | None:
        """Decide and move, in the thread; the exchange, where it has to wait for more places."""
        exchange = self.places.announce(rows_N)
        if self.places.num_needed > len(self.arrays[WEIGHT]):
            return exchange
        self._move(exchange, computed)
        return None

    def _move(self, exchange: Exchange, computed: torch.cuda.Event | torch.Event | None) -> None:
        """Put rows that leave on their way to the host, and those that enter into their places.

        Args:
            exchange: which.
            computed: the event after the last update of what leaves; None on a CPU.
        """
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and computed is not None:
                # Rows that leave may have been changed by the step that is still computing.
                self._stream.wait_event(computed)
            # Before rows are read from the host: one that left a batch ago may be entering again.
            self._land()
            if len(exchange.leaving):
                self._return(exchange)
            if len(exchange.entering):
                taken = self._sent(exchange.taken)
                for key, array in self.arrays.items():
                    array.index_copy_(0, taken, self._read(exchange.entering, key=key))
                self.map.index_copy_(0, self._sent(exchange.entering), taken.to(torch.int32))
                # A batch asks for padding as for other rows; it goes on to be read at place 0.
                self.map.index_fill_(0, self._padding, 0)

    def _return(self, exchange: Exchange) -> None:
        """Begin to bring rows to the host."""
        left = self._sent(exchange.left)
        values = dict[str, Tensor]()
        for key, array in self.arrays.items():
            leaving = array.index_select(0, left)
            if self._stream is None:
                values[key] = leaving
                continue
            # Only into locked memory does a copy go on beside the host.
            values[key] = torch.empty(leaving.shape, dtype=leaving.dtype, pin_memory=True)
            values[key].copy_(leaving, non_blocking=True)
        # After the rows were read; from here on a lookup finds that they have no place.
        self.map.index_fill_(0, self._sent(exchange.leaving), -1)
        arrived = None if self._stream is None else self._stream.record_event()
        # Keeps the locked memory until the copy is done.
        self._returning = _Returning(exchange.leaving, values, arrived)

    def _land(self) -> None:
        """Give the host's memory the rows that were on their way to it."""
        returning = self._returning
        self._returning = None
        if returning is not None:
            if returning.arrived is not None:
                returning.arrived.synchronize()
            for key, values in returning.values.items():
                self._rows.scatter(returning.rows, values, key=key)

    def _read(self, rows: Int64[Tensor, "E"], *, key: str) -> Tensor:
        """Rows of the host's memory on the device, through locked memory."""
        whole = self._rows.tensor(key)
        if not self._is_cuda:
            return whole.index_select(0, rows)
        locked = torch.empty(len(rows), *whole.shape[1:], dtype=whole.dtype, pin_memory=True)
        torch.index_select(whole, 0, rows, out=locked)
        return locked.to(self._device, non_blocking=True)

    def _sent(self, tensor: Tensor) -> Tensor:
        """A small tensor of the host on the device, without the host waiting."""
        # A copy from memory that is not locked would make the host wait.
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._is_cuda else tensor

    def _grow(self) -> None:
        """Grow the arrays to as many places as are needed; whatever reads the old arrays was asked for before."""
        for key, array in self.arrays.items():
            larger = array.new_zeros(self.places.num_needed, *array.shape[1:])
            larger[: len(array)] = array
            self.arrays[key] = larger
