"""HostMemory: ranks of one host exchange through memory that they share, instead of through sockets.

    rank 0   writes its message once ──► [ to 0 | to 1 | to 2 ]  ◄── ranks 1 and 2 copy their parts out
             number of messages += 1     who waits is woken           each says that it has read

A socket copies every byte into the kernel and out of it, and hands each message from thread to thread: on a machine
whose cores compute, those threads were a quarter of a step's processor time (docs/experiments). Here a message is
one copy in and one out, made by the threads that compute, and waiting is a futex: no spinning, so more ranks than cores
do no harm.

Memory belongs to the rank that writes it (`memfd`): it has no name, needs no room in /dev/shm, and the kernel takes it
back when the ranks have ended, however they end. Others open it through /proc/<pid>/fd, and see by a random number
whether it is the right one. Messages of a group have numbers, the same on every rank, since all ranks exchange the same
things in the same order; each carries its purpose, so that ranks that differ raise instead of mixing messages up.
Memory and slots are used again once everybody has read what was there, in any order: the ids of the next training batch
may lie unread through a whole evaluation. A message that finds no room makes the memory grow, so sending never waits.

    slots     [ 0 | 1 | … | 63 ]  [ 64 | 65 | … ]      message n lies in slot n mod 64; where an older one is unread
                                                        there, in a further slot, which readers find by the number

A rank that ends is noticed at once by its pidfd, one that hangs after the time limit of the process group.

Where any of this is missing (no compiler, no Linux, ranks in different containers), the group keeps gloo:
`open_host_memory` returns the reason, and the start-up report shows it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import secrets
import select
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_int32, c_int64, c_uint32, c_uint64
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ziggurat.errors import MissingDependencyError, TopologyError
from ziggurat.ops.cpp_build import CppSource
from ziggurat.parallel.lost_ranks import communicating
from ziggurat.parallel.process_groups import time_limit_s

_T = TypeVar("_T")
_SOURCE = CppSource(
    path=Path(__file__).parents[2] / "ops" / "csrc" / "words.cpp",
    without="go on without: ranks of one host then exchange through gloo's sockets, slower",
)
_NUM_SLOTS = 64  # a message looks for its place among these first: more than any step has under way
_MAX_SLOTS = 4096  # messages of a rank that may be unread; of slots that were never used no page exists
_LINE = 64  # bytes that processors exchange as one; also the alignment of messages
_FIRST_BYTES = 1 << 20
_GLANCE_MS = 100  # how often a waiting rank looks whether the other one still lives
_TOKEN, _USED, _POSTED = struct.Struct("<q"), 8, _LINE  # control memory: token, slots in use, messages, slots
_HEADER = struct.Struct("<Iqq")  # purpose, segment, its file; behind the number of the message
_HEADER_AT = _LINE + 4


@dataclass
class Ticket:
    """A message of this rank that is under way, and those of the others that belong to it."""

    number: int
    purpose: str
    code: int


@dataclass
class _Sent:
    """Memory of a message that others may still read."""

    slot: int
    segment: int
    begin: int
    end: int


@dataclass
class _Control:
    """A record of one rank's messages, in its memory, known to all ranks."""

    memory: mmap.mmap
    pid: int
    pidfd: int
    slot_bytes: int
    address: int = field(init=False)
    used: np.ndarray = field(init=False)  # (1,) slots that were ever used
    numbers: np.ndarray = field(init=False)  # (slots,) the message in each; read and written as one word
    segments: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # C++ takes addresses; the arrays below hold the buffer, which keeps the memory from being unmapped.
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.used = np.ndarray((1,), np.uint32, self.memory, _USED)
        first_number = self.slot_at(0) + _LINE
        # A view of one word in each slot: the slot's size is its stride, so no slot is unpacked to be searched.
        self.numbers = np.ndarray((_MAX_SLOTS,), np.uint32, self.memory, first_number, (self.slot_bytes,))

    def slot_at(self, slot: int) -> int:
        """The first byte of a slot."""
        return 2 * _LINE + slot * self.slot_bytes

    def slot_of(self, number: int) -> int | None:
        """The slot of a message that was sent and that this rank has not read; None: there is none."""
        # As it was written: numbers of messages are kept in 32 bits, and go round.
        number &= 0xFFFFFFFF
        usual = number % _NUM_SLOTS
        if self.numbers[usual] == number:
            return usual
        # Slots behind `used` were never written; reading them would make pages of the sparse file.
        found = np.flatnonzero(self.numbers[: int(self.used[0])] == number)
        return int(found[0]) if len(found) else None


class HostMemory:
    """Exchanges of a group whose ranks share a host; made by `open_host_memory`.

    Args:
        library: `words.cpp`, compiled.
        controls: of every member; this rank's own is at `position`.
        position: of this rank.
        timeout_s: how long to wait for a rank that lives.
    """

    def __init__(self, library: ctypes.CDLL, *, controls: Sequence[_Control], position: int, timeout_s: float) -> None:
        self.size = len(controls)
        self.position = position
        self._words = library
        self._controls = list(controls)
        self._timeout_s = timeout_s
        self._own = controls[position]
        # Two for each member, as `_slot_bytes` counts them.
        self._places = struct.Struct(f"<{2 * self.size}q")  # of a message: first byte and number of bytes, by member
        self._next = 0
        self._sent: list[_Sent] = []  # what somebody has not read yet
        self._segment = -1
        self._file = -1
        self._free = 0
        self._ready: tuple[int, Tensor] | None = None
        self._files = [each.pidfd for each in controls]  # and those of this rank's segments
        self._is_released = False

    def release(self) -> None:
        """Close all files, once every rank has received what was sent to it; nothing can be sent any more.

        The memory itself goes with the last object that holds it, here and on the other ranks.
        """
        # Before files are closed: `_post` then refuses, where it would name a file that is another one by now.
        self._is_released = True
        for file in self._files:
            os.close(file)
        self._files.clear()

    def outbox(self, count: int, *, dtype: torch.dtype) -> Tensor:
        """Memory for the next message, to be filled and then sent: what is written there is not copied again."""
        self._ready = self._memory(count, dtype)
        return self._ready[1]

    def send(self, numbers: Tensor, *, sizes: Sequence[int], purpose: str) -> Ticket:
        """Write a message for everybody; waits for nobody.

        Args:
            numbers: flat and contiguous, member after member.
            sizes: numbers for each member.
            purpose: the same on every rank.
        """
        item = numbers.element_size()
        begin = self._written(numbers)
        places = []
        at = begin
        for size in sizes:
            # Bytes: the receiver views them in the dtype that it expects.
            places += [at, size * item]
            at += size * item
        return self._post(begin, places, purpose=purpose)

    def share(self, numbers: Tensor, *, purpose: str) -> Ticket:
        """Write one message that every member reads whole; waits for nobody."""
        num_bytes = numbers.numel() * numbers.element_size()
        begin = self._written(numbers)
        return self._post(begin, [begin, num_bytes] * self.size, purpose=purpose)

    def receive(self, ticket: Ticket, *, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Copy out what all members have sent here; waits for them.

        Args:
            ticket: of this rank's own message.
            sizes: numbers from each member.
            dtype: of the numbers.
        """
        with self.pieces(ticket, sizes=sizes, dtype=dtype) as pieces:
            return torch.cat(pieces)

    @contextlib.contextmanager
    def pieces(self, ticket: Ticket, *, sizes: Sequence[int], dtype: torch.dtype) -> Iterator[list[Tensor]]:
        """Wait for each member's message to this rank, and yield it where it lies in that member's memory.

        The memory may be overwritten once the context is left.
        """
        # All are waited for before any is handed out: a sum over members needs every one of them.
        peeked = [self._peek(ticket, member) for member in range(self.size)]
        found = [piece.view(dtype) for _, piece in peeked]
        came = [piece.numel() for piece in found]
        if came != list(sizes):
            raise self._differing(ticket.purpose, expected=f"{list(sizes)} numbers", found=f"{came} numbers")
        yield found
        # Not reached where the context ends by an error: the writer then keeps the memory, and nobody reads other
        # bytes.
        for control, (slot, _) in zip(self._controls, peeked, strict=True):
            self._words.ziggurat_word_add(control.address + control.slot_at(slot))

    # ----------------------------------------------------------------------------------------------------- inside

    def _peek(self, ticket: Ticket, member: int) -> tuple[int, Tensor]:
        """The slot of a member's message, and the bytes that it has sent here, in its memory; waits for it."""
        control = self._controls[member]
        # Messages are counted from 0, so message n is there once n + 1 were sent.
        self._wait(control, control.address + _POSTED, ticket.number + 1, member=member, purpose=ticket.purpose)
        slot = control.slot_of(ticket.number)
        assert slot is not None, "a message keeps its slot until everybody has read it, once"
        at = control.slot_at(slot) + _HEADER_AT
        code, segment, file = _HEADER.unpack_from(control.memory, at)
        if code != ticket.code:
            found = f"member {member} of the group exchanges something else"
            raise self._differing(ticket.purpose, expected="all ranks to exchange the same, in one order", found=found)
        places = self._places.unpack_from(control.memory, at + _HEADER.size)
        if segment not in control.segments:
            # Opened once a segment: messages name the file that the writer still holds.
            opened = _opened(control.pid, file)
            control.segments[segment] = _mapped(opened)
            os.close(opened)
        begin, count = places[2 * self.position : 2 * self.position + 2]
        return slot, control.segments[segment][begin : begin + count]

    def _written(self, numbers: Tensor) -> int:
        """Return where a message lies in this rank's memory; put it there now unless it was made there (`outbox`)."""
        # An outbox serves one message; whatever is sent, it is used up.
        ready = self._ready
        self._ready = None
        if ready is not None and ready[1].data_ptr() == numbers.data_ptr() and ready[1].numel() == numbers.numel():
            return ready[0]
        begin, target = self._memory(numbers.numel(), numbers.dtype)
        target.copy_(numbers.reshape(-1))
        return begin

    def _memory(self, count: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        """Memory for so many numbers, with its first byte in the segment."""
        num_bytes = count * dtype.itemsize
        begin = self._room(num_bytes)
        return begin, self._own.segments[self._segment][begin : begin + num_bytes].view(dtype)

    def _differing(self, purpose: str, *, expected: str, found: str) -> TopologyError:
        return TopologyError(
            expected=expected,
            found=found,
            where=f"{purpose}, member {self.position} of a group of {self.size} ranks that share memory",
            ways_out="let all ranks take the same steps with the same settings: an exchange needs everybody",
        )

    def _post(self, begin: int, places: list[int], *, purpose: str) -> Ticket:
        """Tell everybody of the message that lies in this rank's memory."""
        if self._is_released:
            raise TopologyError(
                expected="a topology that is open",
                found="one that was closed, and its memory with it",
                where=f"{purpose}, member {self.position} of a group of {self.size} ranks that share memory",
                ways_out=(
                    "close the topology after the last step: `with Topology.create(…) as topology:` around all of them",
                    "make the model parallel again, on a topology that is open",
                ),
            )
        own = self._own
        number = self._next
        code = zlib.crc32(purpose.encode())
        self._next += 1
        slot = self._free_slot(number)
        at = own.slot_at(slot)
        # The order counts: everything of the slot is written before the number of messages rises, which wakes readers.
        self._words.ziggurat_word_set(own.address + at, 0)  # nobody has read it
        _HEADER.pack_into(own.memory, at + _HEADER_AT, code, self._segment, self._file)
        self._places.pack_into(own.memory, at + _HEADER_AT + _HEADER.size, *places)
        own.numbers[slot] = number & 0xFFFFFFFF
        own.used[0] = max(int(own.used[0]), slot + 1)
        self._words.ziggurat_word_set(own.address + _POSTED, (number + 1) & 0xFFFFFFFF)
        # The last member's place ends the message; rounded up to a line, as `_room` gives it out.
        end = -(-(places[-2] + places[-1]) // _LINE) * _LINE
        self._sent.append(_Sent(slot, self._segment, begin, end))
        return Ticket(number, purpose, code)

    def _free_slot(self, number: int) -> int:
        """The slot for a message; those of messages that somebody has not read stay as they are."""
        taken = {each.slot for each in self._sent}
        usual = number % _NUM_SLOTS
        if usual not in taken:
            return usual
        further = next((slot for slot in range(_NUM_SLOTS, _MAX_SLOTS) if slot not in taken), None)
        if further is None:
            found = f"{len(taken)} messages of this rank that are not read"
            raise self._differing("the next message", expected="messages to be received", found=found)
        return further

    def _room(self, num_bytes: int) -> int:
        """Return where a message of so many bytes begins in this rank's memory, a ring that grows if need be.

        What is unread stays where it is, and the ring goes around it.
        """
        self._sent = [each for each in self._sent if not self._is_read(each)]
        num_bytes = -(-num_bytes // _LINE) * _LINE
        begin = self._gap(num_bytes)
        # Not even the front has room: messages that are unread stay in the old segment.
        if begin is None:
            self._grow(num_bytes)
            begin = 0
        self._free = begin + num_bytes
        return begin

    def _gap(self, num_bytes: int) -> int | None:
        """The first place in the present segment with room, from where the last message ended on; None: there is none.

        Where nothing is unread it is the front: what lies there is in the caches of the processor.
        """
        if self._segment < 0:
            return None
        unread = sorted((each.begin, each.end) for each in self._sent if each.segment == self._segment)
        room = self._own.segments[self._segment].numel()
        for begin in (self._free, 0) if unread else (0,):
            for first, end in unread:
                if begin + num_bytes <= first:
                    return begin
                begin = max(begin, end)
            if begin + num_bytes <= room:
                return begin
        return None

    def _is_read(self, sent: _Sent) -> bool:
        # Each member counts up once, this rank among them: it reads its own part, too.
        return self._words.ziggurat_word_get(self._own.address + self._own.slot_at(sent.slot)) == self.size

    def _grow(self, num_bytes: int) -> None:
        """Go on in a new segment, four times as large as what is needed; the old ones stay for who still reads."""
        old = self._own.segments[self._segment].numel() if self._segment >= 0 else 0
        size = max(_FIRST_BYTES, 2 * old, 1 << (4 * num_bytes - 1).bit_length())
        self._segment += 1
        self._file = _new_file(f"ziggurat-messages-{self._segment}", num_bytes=size)
        self._files.append(self._file)
        self._own.segments[self._segment] = _mapped(self._file)

    def _wait(self, control: _Control, address: int, value: int, *, member: int, purpose: str) -> None:
        """Wait until a rank has sent that many messages.

        Raises:
            RuntimeError: it has ended, or does not answer within the time limit; as torch words it (`lost_ranks.py`).
        """
        wait = self._words.ziggurat_word_wait
        # The word in shared memory has 32 bits, and goes round.
        number = value & 0xFFFFFFFF
        # A short wait first: most messages come at once, and asking the system who still lives takes longer.
        if wait(address, number, _GLANCE_MS):
            return
        deadline = time.monotonic() + self._timeout_s
        watched = select.poll()
        watched.register(control.pidfd, select.POLLIN)
        while not wait(address, number, _GLANCE_MS):
            # A rank that has ended may have sent the message as the last thing it did.
            if watched.poll(0) and not wait(address, number, 0):
                raise RuntimeError(f"Connection closed by peer: rank {member} of the group has ended ({purpose})")
            if time.monotonic() > deadline:
                limit = f"{self._timeout_s:g} s"
                raise RuntimeError(f"Timed out waiting {limit} for rank {member} of the group ({purpose})")


def open_host_memory(group: dist.ProcessGroup, *, timeout_s: float | None = None) -> tuple[HostMemory | None, str]:
    """Share memory among the ranks of a group, which lie on one host; collective.

    Args:
        group: of gloo; used once, to meet.
        timeout_s: how long to wait for a rank later; None: as the group.

    Returns:
        The memory, and ""; or None on every rank, and the first rank's reason.
    """
    position, size = group.rank(), group.size()
    made, reason = _attempt(lambda: _made(size))
    token, file = (0, -1) if made is None else made[2:]
    # Ranks that could not make memory gather all the same, or the others would wait here for ever.
    offers = _gathered([os.getpid(), file, token, int(made is not None)], group)
    controls: list[_Control] | None = None
    if made is not None and all(is_made for *_, is_made in offers):
        own = made[1]
        controls, reason = _attempt(
            lambda: [own if i == position else _met(*row[:3], size=size) for i, row in enumerate(offers)]
        )
    # Again by all: one rank that could not open another's memory sends the whole group back to gloo.
    met = _gathered([int(controls is not None)], group)
    if made is not None:
        os.close(file)  # everybody who can has opened it
    failed = [i for i in range(size) if not (offers[i][3] and met[i][0])]
    if failed or made is None or controls is None:  # where this rank could not, it is among those that failed
        first = next((i for i in failed if not offers[i][3]), failed[0])
        return None, reason or f"member {first} of the group cannot share memory"
    limit = time_limit_s(group) if timeout_s is None else timeout_s
    return HostMemory(made[0], controls=controls, position=position, timeout_s=limit), ""


def _made(size: int) -> tuple[ctypes.CDLL, _Control, int, int]:
    """The library, and this rank's control memory with a token in it."""
    library = _library()
    # In containers a number may be another process to other ranks; the token proves that the right one was found.
    token = secrets.randbits(62)
    file = _new_file("ziggurat-control", num_bytes=_control_bytes(size))
    memory = mmap.mmap(file, 0)
    _TOKEN.pack_into(memory, 0, token)
    # A pidfd is of this very process, where a number may be given to another one once it has ended.
    return library, _Control(memory, os.getpid(), os.pidfd_open(os.getpid()), _slot_bytes(size)), token, file


def _met(pid: int, file: int, token: int, *, size: int) -> _Control:
    """The control memory of another rank."""
    opened = _opened(pid, file)
    memory = mmap.mmap(opened, _control_bytes(size))
    os.close(opened)
    if _TOKEN.unpack_from(memory, 0)[0] != token:
        raise OSError(f"process {pid} is another one here: the ranks see different processes")
    return _Control(memory, pid, os.pidfd_open(pid), _slot_bytes(size))


def _attempt(action: Callable[[], _T]) -> tuple[_T | None, str]:
    """Return the result of an action, or the reason why this machine does not allow it."""
    try:
        return action(), ""
    except MissingDependencyError as error:
        return None, error.found
    except (OSError, AttributeError, ValueError) as error:  # no Linux, an old one, or other containers
        return None, f"{type(error).__name__}: {error}"


@functools.cache
def _library() -> ctypes.CDLL:
    library = _SOURCE.load()
    library.ziggurat_word_set.argtypes = [c_uint64, c_uint32]
    library.ziggurat_word_set.restype = None
    library.ziggurat_word_add.argtypes = [c_uint64]
    library.ziggurat_word_add.restype = c_uint32
    library.ziggurat_word_get.argtypes = [c_uint64]
    library.ziggurat_word_get.restype = c_uint32
    library.ziggurat_word_wait.argtypes = [c_uint64, c_uint32, c_int64]
    library.ziggurat_word_wait.restype = c_int32
    return library


def _slot_bytes(size: int) -> int:
    """A slot: how many have read it, then number, header and places."""
    return -(-(_HEADER_AT + _HEADER.size + 16 * size) // _LINE) * _LINE


def _control_bytes(size: int) -> int:
    # The line of the token, that of the number of messages, then the slots.
    return 2 * _LINE + _MAX_SLOTS * _slot_bytes(size)


def _gathered(numbers: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    mine = torch.tensor(numbers, dtype=torch.int64)
    found = [torch.empty_like(mine) for _ in range(group.size())]
    with communicating("meeting over shared memory"):
        dist.all_gather(found, mine, group=group)
    return [each.tolist() for each in found]


def _new_file(name: str, *, num_bytes: int) -> int:
    file = os.memfd_create(name)
    os.ftruncate(file, num_bytes)
    return file


def _opened(pid: int, file: int) -> int:
    return os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)


def _mapped(file: int) -> Tensor:
    """All bytes of a file as a tensor."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)
