"""Messages of hops by Triton against those by torch, bit for bit; run by test_packing.py, where Triton is interpreted.

TRITON_INTERPRET=1 python -m tests.parallel.exchange.packing_cases cpu
python -m tests.parallel.exchange.packing_cases cuda
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from torch import Tensor

from ziggurat.ops.wire import triton
from ziggurat.parallel.exchange import blocks, packing
from ziggurat.parallel.exchange.blocks import Block, BlockExchange
from ziggurat.parallel.exchange.collectives import Pending
from ziggurat.parallel.exchange.wire import Rounding, Wire, WireFormat
from ziggurat.parallel.topology import RankGroup

DEVICE = torch.device("cpu")
# All that the kernels know, and one that they leave to torch.
FORMATS = [each for each in WireFormat if each.kernel_code(torch.float32)] + [WireFormat.MX9]
WIDTHS = ((16, 16, 3), (), (64,), (1, 5))  # of what each of four members sends
SENT: list[Tensor] = []
NO_TRAFFIC: Any = None


def _came(messages: list[Tensor]) -> Pending:
    return Pending(lambda: torch.cat(messages), where="test")


def _record(message: Tensor, *, sent: list[int], **_: Any) -> None:
    assert message.numel() == sum(sent), (message.numel(), sent)
    SENT.append(message.clone())


def hop(position: int, wire: WireFormat, *, num_local: int = 0) -> BlockExchange:
    """One rank of four; the output begins with a column of the last member, and fields are out of order."""
    order = [(3, 1, 5), (0, 16, 16), (2, 0, 64), (3, 0, 1), (0, 0, 16), (0, 32, 3)]
    parts = [Block(width, ((member, first),)) for member, first, width in order]
    local = [Block(num_local, ((Block.LOCAL, 0),))] if num_local else []
    return BlockExchange(
        RankGroup(ranks=(0, 1, 2, 3), position=position),
        widths=WIDTHS,
        blocks=[*parts[:2], *local, *parts[2:]],
        wire=wire,
        traffic=NO_TRAFFIC,
        purpose="test",
        num_local=num_local,
    )


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Some large, some small, some zero; columns of one field have one size."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    drawn *= torch.exp2(torch.arange(shape[1]).remainder(40).float() - 20)
    drawn[:, ::7] = 0.0
    return drawn.to(DEVICE, dtype)


def there_and_back(
    position: int, wire: WireFormat, dtype: torch.dtype, *, rows: list[int], num_local: int
) -> list[Tensor]:
    """What a rank sends, and what it makes of what comes: values and gradients."""
    exchange, mine, SENT[:] = hop(position, wire, num_local=num_local), sum(WIDTHS[position]), []
    num_rows = rows[position]
    values = numbers(sum(rows), mine, dtype=dtype)
    local = numbers(num_rows, num_local, dtype=dtype, seed=3)
    token, transfer = exchange.start(values, rows_sent=rows, num_rows=num_rows, local_BL=local)
    del token
    others = [Wire(wire, tuple(widths)) for widths in WIDTHS]
    sent = [each.encode(numbers(num_rows, sum(each.widths), dtype=dtype, seed=9)) for each in others]
    transfer.forward = _came(sent)
    arrived = exchange.receive_values(transfer)
    gradient = numbers(num_rows, exchange.output_dim, dtype=dtype, seed=4)
    exchange.send_gradient(transfer, gradient)
    own = Wire(wire, WIDTHS[position])
    back = [own.encode(numbers(count, mine, dtype=dtype, seed=count)) for count in rows]
    transfer.backward = _came(back)
    return [*SENT, arrived, transfer.local, exchange.receive_gradient(transfer)]


def case_hops() -> None:
    """Every format and dtype, some ranks without columns or rows, columns that stay."""
    used = []
    plain = packing.why_not_triton
    for wire, dtype, position in itertools.product(FORMATS, (torch.float32, torch.bfloat16, torch.float16), (0, 1, 3)):
        for rows, num_local in (([5, 0, 3, 9], 0), ([1, 2, 0, 70], 6), ([0, 0, 0, 0], 2)):
            found = []
            for reason in (plain, lambda matrix: "torch"):
                packing.why_not_triton = reason
                found.append(there_and_back(position, wire, dtype, rows=rows, num_local=num_local))
            for mine, wanted in zip(*found, strict=True):
                assert mine.dtype is wanted.dtype, (wire, dtype, position)
                assert same_bits(mine, wanted), (wire, dtype, position, rows)
            used.append(wire)
    packing.why_not_triton = plain
    assert len(used) == len(FORMATS) * 3 * 3 * 3


def same_bits(mine: Tensor, wanted: Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[mine.element_size()]
    return mine.shape == wanted.shape and torch.equal(
        mine.contiguous().view(integers), wanted.contiguous().view(integers)
    )


def case_every_half() -> None:
    """All 2^16 upper halves of numbers, and their neighbours: rounding of BF16, FP16 and FP8, infinities and NaN."""
    upper = torch.arange(1 << 16, dtype=torch.int64)
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    every = ((upper[:, None] << 16) | lower).to(torch.int32).view(torch.float32).to(DEVICE)
    for wire in (WireFormat.BF16, WireFormat.FP16):
        agree(Wire(wire, (6,)), every)
    finite = every[every.isfinite().all(dim=1)]
    for wire in (WireFormat.INT8, WireFormat.FP8):
        agree(Wire(wire, (6,)), finite)
        agree(Wire(wire, (2, 4)), every)
    ends = torch.tensor([448.0, 127.0]).to(DEVICE)
    small = torch.arange(-3000, 3000, device=DEVICE) / 7.0 * 2.0**-10
    for end in ends:
        rows = torch.stack([end.expand_as(small), small], dim=1).contiguous()
        agree(Wire(WireFormat.FP8, (2,)), rows)
        agree(Wire(WireFormat.INT8, (2,)), rows * 1000)


def agree(wire: Wire, rows: Tensor) -> None:
    """Message and numbers; where a number is not finite the numbers that arrive decide, and NaN is NaN."""
    columns = tuple(itertools.accumulate(wire.widths, initial=0))[:-1]
    places = packing.places_of([packing.RowsForRank(wire, 0, len(rows), columns)], device=DEVICE)
    code = triton.WireCode(wire.format.kernel_code(rows.dtype))
    message, wanted = triton.pack(rows, code, places=places), wire.encode(rows)
    assert message.dtype is wanted.dtype
    count = rows.numel()
    ours, theirs = (wire.decode(each, count=count) for each in (message, wanted))
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    if bool(rows.isfinite().all()):
        assert same_bits(message, wanted)
    out = torch.empty_like(rows)
    triton.unpack(wanted, code, places=places, out=out)
    assert torch.equal(out.view(-1).nan_to_num(), theirs.nan_to_num())
    assert torch.equal(out.view(-1).isnan(), theirs.isnan())


def case_stays_with_torch() -> None:
    """Stochastic rounding, FP64 and sums."""
    matrix = torch.zeros(2, 4, device=DEVICE)
    wire = Wire(WireFormat.INT8, (4,), Rounding.STOCHASTIC)
    assert packing._code(wire, matrix) is None
    assert packing._code(Wire(WireFormat.BF16, (4,)), matrix.double()) is None
    assert packing._code(Wire(WireFormat.BF16, (4,), Rounding.STOCHASTIC), matrix.bfloat16()) is triton.WireCode.BF16


def main(device: str, *names: str) -> None:
    """Run all cases, or some."""
    global DEVICE
    DEVICE = torch.device(device)
    blocks.all_to_all = _record  # type: ignore[assignment]  # nothing is sent
    for name, case in list(globals().items()):
        if name.startswith("case_") and (not names or name in names):
            case()
            print(name, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
