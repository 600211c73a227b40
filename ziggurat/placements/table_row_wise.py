"""Table-row-wise: blocks of rows over ranks of one host, whose partial sums are added up there.

Row-wise parts on k ranks send k partial sums of every sample over the links between hosts. On ranks of one host the sum
is made first, each rank adding up D/k of the columns (`parallel/tables/host_sums.py`): 1/k of the bytes leave the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from ziggurat.placements.placement import Hop, Moved, StepBytes
from ziggurat.placements.row_wise import RowWise


class TableRowWise(RowWise):
    """A block of rows on each rank of a host; only sums leave it."""

    name = "table_row_wise"
    sums_in_host = True
    is_of_one_host = True

    def device_sets(self, devices: Sequence[int], *, devices_per_host: int) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each host on which the table may lie on two or more."""
        hosts = sorted({device // devices_per_host for device in devices})
        sets = [tuple(device for device in devices if device // devices_per_host == host) for host in hosts]
        return tuple(each for each in sets if len(each) > 1)

    def bytes_moved(self, step: StepBytes, *, num_parts: int, hop: Hop) -> Moved:
        """Send (k−1)/k of the partial sums inside the host, and a k-th of what leaves a rank between hosts."""
        between = hop.to_all(step.pooled / num_parts)[1]
        sent = (step.pooled * (num_parts - 1) / num_parts, between)
        return Moved(ids=hop.from_world(step.ids), sent=sent)
