"""Add a collective that orders of ranks are found for: a broadcast from rank 0 by a binomial tree, as MPI sends it.

    round 1    0 ─► 4                      8 places: who has the buffer sends it to the one half as far away
    round 2    0 ─► 2    4 ─► 6            as in the round before
    round 3    0 ─► 1    2 ─► 3    4 ─► 5    6 ─► 7

A place has the whole buffer when the message from its parent is over, and then sends to one child after the other, the
one with the most places behind it first. The broadcast is over when the last place has it. Cost of N places: N − 1
messages of the whole buffer in ⌈log₂ N⌉ rounds.

An order gains where few of the messages on the way to any place cross between racks. As for the package's trees,
messages of one round are taken to run beside each other, on links of their own:

    $ torchrun … -m ziggurat --extension broadcast_tree cluster order --for broadcast_tree --hostfile hosts.txt

Source: R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of collective communication operations in MPICH",
International Journal of High Performance Computing Applications 19 (2005).
"""

from __future__ import annotations

import numpy as np

from ziggurat.planning.rank_order.algorithms import CollectiveAlgorithm, Costs, Orders
from ziggurat.planning.rank_order.pair_times import PairTimes


class BroadcastTree(CollectiveAlgorithm):
    """Sends a buffer from the first place to all others down a binomial tree."""

    name = "broadcast_tree"

    def costs_ms(self, orders: Orders, pairs: PairTimes, *, num_bytes: float) -> Costs:
        """Return when the last place has the buffer: a place sends one message after the other."""
        size = orders.shape[1]
        message_ms = pairs.ms(num_bytes)
        # When each place is free to send: it has the buffer, and its messages so far are over.
        free_ms = np.zeros(orders.shape)
        distance = 1 << (size - 1).bit_length() >> 1
        while distance:
            senders = np.arange(0, size - distance, 2 * distance)
            receivers = senders + distance
            arrived_ms = free_ms[:, senders] + message_ms[orders[:, senders], orders[:, receivers]]
            free_ms[:, senders] = arrived_ms
            free_ms[:, receivers] = arrived_ms
            distance //= 2
        return free_ms.max(axis=1)


BROADCAST_TREE = CollectiveAlgorithm.add(BroadcastTree())
