"""CellExchange: one hop of embeddings, forward and backward, in two rounds each.

    owner of tables                                  owner of samples
    codes of the next batch's cells      ─────────►  knows what comes when               during the present step
    cells that wait for nothing          ─────────►  kept                                during its backward pass
    cells of updated rows                ─────────►  put together                        begin of the next step
    gradients, first round               ◄─────────  of cells that the next step reads   end of the backward pass
    gradients, second round              ◄─────────  of all others                       behind the next step's begin

The plain hop (`exchange/blocks.py`) sends a matrix, zeros for lists that are empty on the sending rank included; of a
table whose rows are spread over R ranks that is all but 1/R of it. Here only cells travel that have rows, so both
rounds together carry less than the plain hop wherever rows are spread.

Values that several ranks have parts of are added up in the order of the ranks, as the plain hop does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor

from ziggurat.parallel.exchange.collectives import Pending, all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.exchange.wire import Wire
from ziggurat.parallel.prioritised.cells import (
    NOTHING,
    NOW,
    WAITS,
    MemberCells,
    num_packed,
    pack_codes,
    pick,
    put,
    unpack_codes,
)
from ziggurat.parallel.topology import RankGroup


@dataclass
class CellTransfer:
    """The cells of one batch in flight, there and back.

    Args:
        rows_sent: samples of each member, in what this rank looks up.
        rows_came: rows of the cells that come from each member.
        begins: where the rows of each member begin in the output.
        num_rows: rows of the output.
        codes: of the cells that this rank looks up.
        came: codes of the cells that come from each member.
        firsts: of the cells that this rank looked up, `WAITS` where their gradient comes first; None: all do.
        firsts_came: the same of the cells that came from each member.
        targets: where each unit that came belongs in the output, by member.
    """

    rows_sent: list[int]
    rows_came: list[int]
    begins: list[int]
    num_rows: int
    codes: UInt8[Tensor, "R F"]
    came: list[UInt8[Tensor, "B F"]] = field(default_factory=list)
    firsts: UInt8[Tensor, "R F"] | None = None
    firsts_came: list[UInt8[Tensor, "B F"]] | None = None
    targets: list[Int64[Tensor, "n"]] = field(default_factory=list)
    dtype: torch.dtype = torch.float32


@dataclass
class GradientRounds:
    """Gradients of one batch's cells on their way back, in two rounds.

    Args:
        transfer: of the batch.
        first: under way.
        largest: the largest magnitude of what this rank sends, as it travels; infinite if any of it is not finite.
        second: what the second round will send.
        second_sizes: items of it for each member.
        rest: the second round, once it is under way.
    """

    transfer: CellTransfer
    first: Pending
    largest: float
    second: Tensor
    second_sizes: list[int]
    rest: Pending | None = field(default=None, repr=False)

    @property
    def is_whole(self) -> bool:
        """True if the first round has everything, on all ranks."""
        return self.transfer.firsts is None


class CellExchange:
    """One hop of embeddings in two rounds each way. All methods are collective but where they say otherwise.

    Args:
        group: who takes part.
        behind: the same ranks in a process group of their own, for what travels while the step computes.
        members: the cells of each.
        output_dim: numbers of a sample that a rank wants.
        wire: format of values, and of their gradients.
        traffic: counts messages.
        purpose: name of the hop.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        behind: RankGroup,
        members: Sequence[MemberCells],
        output_dim: int,
        wire: Wire,
        traffic: Traffic,
        purpose: str,
    ) -> None:
        self.group = group
        self._behind = behind
        self.members = list(members)
        self.mine = members[group.position]
        self._output_dim = output_dim
        self._wire = wire
        self._traffic = traffic
        self._purpose = purpose
        self.unit = self.mine.unit
        self._output_units = output_dim // self.unit

    # ------------------------------------------------------------------------------------------------- there

    def send_codes(self, transfer: CellTransfer, *, present: CellTransfer | None) -> Pending:
        """Send the codes of a batch's cells, and which gradients of the present batch are wanted first.

        Args:
            transfer: of the next batch.
            present: whose `firsts` are set; None where they are not in use.
        """
        pieces = []
        sent = []
        received = []
        parts = [(each.codes, each) for each in (transfer,)]
        if present is not None and present.firsts is not None:
            parts.append((present.firsts, present))
        split = [(codes.split(each.rows_sent), each) for codes, each in parts]
        # Codes of both batches for one member lie side by side: one message, cut again in `receive_codes`.
        for number, member in enumerate(self.members):
            packed = [pack_codes(rows[number]) for rows, _ in split]
            pieces += packed
            sent.append(sum(codes.numel() for codes in packed))
            received.append(sum(num_packed(each.rows_came[number], member.num_fields) for _, each in split))
        return self._send(torch.cat(pieces), sent, received, "codes", behind=True)

    def receive_codes(self, codes: Pending, transfer: CellTransfer, *, present: CellTransfer | None) -> None:
        """Wait for the codes of `send_codes`."""
        both = [transfer, *([present] if present is not None and present.firsts is not None else [])]
        members = list(enumerate(self.members))
        lengths = [num_packed(each.rows_came[at], member.num_fields) for at, member in members for each in both]
        # In the order in which the senders wrote them: by member, then by batch.
        pieces = iter(codes.wait().split(lengths))
        unpacked: list[list[Tensor]] = [[] for _ in both]
        for at, member in members:
            for each, found in zip(both, unpacked, strict=True):
                found.append(unpack_codes(next(pieces), num_rows=each.rows_came[at], num_fields=member.num_fields))
        transfer.came = unpacked[0]
        if present is not None and len(both) == 2:
            present.firsts_came = unpacked[1]

    def send_now(self, transfer: CellTransfer, values_RC: Float[Tensor, "R C"]) -> Pending:
        """Send the cells that wait for nothing."""
        return self._send_cells(transfer, values_RC, code=NOW, purpose="ahead", behind=True)

    def send_waiting(self, transfer: CellTransfer, values_RC: Float[Tensor, "R C"]) -> Pending:
        """Send the other cells, after the update."""
        return self._send_cells(transfer, values_RC, code=WAITS, purpose="forward", behind=False)

    def receive(self, transfer: CellTransfer, *, now: Pending, waiting: Pending) -> Float[Tensor, "B T"]:
        """Wait for both rounds, and put the cells of all members together.

        Args:
            transfer: of the batch.
            now: what `send_now` started.
            waiting: what `send_waiting` started.
        """
        early_of_members = self._received(now.wait(), transfer, code=NOW)
        late_of_members = self._received(waiting.wait(), transfer, code=WAITS)
        like = early_of_members[0]
        # Zeros: cells without rows do not travel, and an empty list pools to zeros.
        out = like.new_zeros(transfer.num_rows * self._output_units, self.unit)
        transfer.targets = []
        for member, begin, codes, early, late in zip(
            self.members, transfer.begins, transfer.came, early_of_members, late_of_members, strict=True
        ):
            chosen_BU = member.units(codes != NOTHING)
            # Row by row, as the sender picked them; `send_gradient` uses the same places on the way back.
            samples, units = chosen_BU.nonzero(as_tuple=True)
            target_U = member.target_of_unit.to(units.device)
            targets = (samples + begin) * self._output_units + target_U[units]
            transfer.targets.append(targets)
            # One round alone needs no merging.
            if not len(late):
                values = early
            elif not len(early):
                values = late
            else:
                values = like.new_empty(len(targets), self.unit)
                is_late = member.units(codes == WAITS)[chosen_BU]
                values[is_late], values[~is_late] = late, early
            # Within one member targets are distinct, so only the order of the members counts.
            out.index_add_(0, targets, values)
        return out.view(transfer.num_rows, self._output_dim)

    # -------------------------------------------------------------------------------------------------- back

    def send_gradient(self, transfer: CellTransfer, gradient_BT: Float[Tensor, "B T"]) -> GradientRounds:
        """Send the first round, and keep the second."""
        units_Nu = gradient_BT.reshape(-1, self.unit)
        rounds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for number, (member, targets) in enumerate(zip(self.members, transfer.targets, strict=True)):
            values = units_Nu[targets]
            is_first = None
            if transfer.firsts_came is not None:
                firsts = transfer.firsts_came[number]
                # Among the units that came at all: `values` has no others.
                is_first = member.units(firsts == WAITS)[member.units(firsts != NOTHING)]
            rounds[0].append(values if is_first is None else values[is_first])
            # An empty piece where there is no second round, so that both have one for each member.
            rounds[1].append(values[:0] if is_first is None else values[~is_first])
        # Encoded now, both: `largest` is of what travels, after rounding.
        messages = [self._wire.encode(torch.cat(pieces)) for pieces in rounds]
        first = self._send(
            messages[0],
            [piece.numel() for piece in rounds[0]],
            self._sizes(transfer, first=True),
            "backward",
            behind=False,
        )
        # Of the second round, too: the step must know whether it is finite before it has come.
        largest = max((_largest(message) for message in messages), default=0.0)
        return GradientRounds(transfer, first, largest, messages[1], [piece.numel() for piece in rounds[1]])

    def send_rest(self, rounds: GradientRounds) -> Pending | None:
        """Send the second round, once; return it, None where there is none."""
        # Asked again by whoever waits for it (`receive_rest`).
        if rounds.rest is None and not rounds.is_whole:
            received = self._sizes(rounds.transfer, first=False)
            rounds.rest = self._send(rounds.second, rounds.second_sizes, received, "behind", behind=True)
        return rounds.rest

    def receive_first(self, rounds: GradientRounds) -> Float[Tensor, "R C"]:
        """Wait for the first round; the gradient of what was looked up, zeros where nothing came yet."""
        transfer = rounds.transfer
        gradient_RC = torch.zeros(
            sum(transfer.rows_sent), self.mine.num_columns, dtype=transfer.dtype, device=transfer.codes.device
        )
        self._fill(gradient_RC, rounds.first, self._chosen(transfer, first=True))
        return gradient_RC

    def receive_rest(self, rounds: GradientRounds, gradient_RC: Float[Tensor, "R C"]) -> None:
        """Wait for the second round, where there is one, and complete what `receive_first` gave, in place."""
        rest = self.send_rest(rounds)
        if rest is not None:
            self._fill(gradient_RC, rest, self._chosen(rounds.transfer, first=False))

    # ----------------------------------------------------------------------------------------------- details

    def _fill(self, gradient_RC: Tensor, pending: Pending, chosen_RU: Bool[Tensor, "R U"]) -> None:
        came = pending.wait()
        flat = self._wire.decode(came, count=came.numel(), dtype=gradient_RC.dtype)
        put(gradient_RC, chosen_RU, flat.view(-1, self.unit))

    def _chosen(self, transfer: CellTransfer, *, first: bool) -> Bool[Tensor, "R U"]:
        """The units whose gradients come in one of the rounds."""
        if transfer.firsts is None:
            # No second round: all cells that have rows come in the first.
            return self.mine.units(transfer.codes != NOTHING)
        return self.mine.units(transfer.firsts == (WAITS if first else NOW))

    def _sizes(self, transfer: CellTransfer, *, first: bool) -> list[int]:
        """Numbers that come back from each member in one of the rounds."""
        return _counts(self._chosen(transfer, first=first), transfer.rows_sent, unit=self.unit)

    def _send_cells(
        self, transfer: CellTransfer, values_RC: Tensor, *, code: int, purpose: str, behind: bool
    ) -> Pending:
        # Noted for the receiving side, which decodes to what it looked up itself.
        transfer.dtype = values_RC.dtype
        chosen_RU = self.mine.units(transfer.codes == code)
        message = self._wire.encode(pick(values_RC, chosen_RU, unit=self.unit))
        sent = _counts(chosen_RU, transfer.rows_sent, unit=self.unit)
        return self._send(message, sent, self._coming(transfer, code), purpose, behind=behind)

    def _coming(self, transfer: CellTransfer, code: int) -> list[int]:
        """Numbers that come from each member."""
        pairs = zip(self.members, transfer.came, strict=True)
        return [int(member.units(codes == code).sum()) * self.unit for member, codes in pairs]

    def _received(self, buffer: Tensor, transfer: CellTransfer, *, code: int) -> list[Float[Tensor, "n u"]]:
        flat = self._wire.decode(buffer, count=buffer.numel(), dtype=transfer.dtype)
        return [piece.view(-1, self.unit) for piece in flat.split(self._coming(transfer, code))]

    def _send(self, message: Tensor, sent: list[int], received: list[int], purpose: str, *, behind: bool) -> Pending:
        return all_to_all(
            message,
            sent=sent,
            received=received,
            group=self._behind if behind else self.group,
            traffic=self._traffic,
            purpose=f"{self._purpose} {purpose}",
        )


def _counts(chosen_RU: Bool[Tensor, "R U"], rows_sent: list[int], *, unit: int) -> list[int]:
    """Numbers in the chosen units of each member's samples."""
    return [int(piece.sum()) * unit for piece in chosen_RU.split(rows_sent)]


def _largest(message: Tensor) -> float:
    """The largest magnitude; NaN or infinity if there is one."""
    if not message.numel():
        return 0.0
    low, high = (float(each) for each in torch.aminmax(message.float()))
    return max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf
