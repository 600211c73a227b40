"""Tower modules and the last hop of a batch whose features repeat: a tower computes on slices where it can.

    all features of a tower are                the module computes on          over the last hop travel
    plain                                      samples                         samples
    in one group                               slices, U rows in place of B    slices, and become samples behind it
    in several parts (mixed)                   samples: slices are expanded    samples
                                               before the module

So a tower of user features, in a batch with six samples a slice, computes a sixth and sends a sixth between hosts. Each
part has a hop of its own, because the ranks' numbers of slices differ from part to part. Planning towers so that what
repeats together is in a tower together is what makes it pay: mixed towers save in the tower group alone.

Order matters: all hops start before one is waited for, on every rank in the same order, and so do their ways back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ziggurat.features.inputs import InputSpec
from ziggurat.features.jagged import FeatureGroup
from ziggurat.ops.repeat import expand
from ziggurat.parallel.exchange.blocks import Block, BlockExchange
from ziggurat.parallel.exchange.in_flight import InFlight, Message
from ziggurat.parallel.tables.repeated import MIXED, PLAIN, PooledParts, parts_of_towers
from ziggurat.parallel.topology import Topology
from ziggurat.plan import Towers

_Field = tuple[int, int]  # tower, and number of a field of its output


@dataclass(frozen=True)
class TowerShape:
    """The towers of a model, as hops need to know them.

    Args:
        towers: which features form a tower.
        inputs: of the model.
        pooled: the features of each tower that pass through it.
        output_field_dims: numbers of each field that leaves a tower.
        order: fields of the towers, as the model's dense network reads them.
        topology: the ranks.
    """

    towers: Towers
    inputs: InputSpec
    pooled: Sequence[tuple[str, ...]]
    output_field_dims: Sequence[Sequence[int]]
    order: Sequence[_Field]
    topology: Topology

    def of_group(self, group: int) -> range:
        """The towers that a tower group holds."""
        return self.topology.towers_of(group, num_towers=len(self.towers))


class SliceHops:
    """The last hops of batches with the same groups, one for each part that a tower computes on.

    Args:
        shape: the towers.
        groups: of the batches.
        make_hop: makes a hop between peers, given the widths that each tower group sends and the blocks.
    """

    def __init__(
        self,
        shape: TowerShape,
        groups: tuple[FeatureGroup, ...],
        *,
        make_hop: Callable[[list[list[int]], list[Block]], BlockExchange],
    ) -> None:
        self._shape = shape
        self._part_of = parts_of_towers(shape.towers, shape.inputs, groups)
        self._travels_as = [PLAIN if part == MIXED else part for part in self._part_of]
        self._parts = sorted(set(self._travels_as))
        self._fields: list[list[_Field]] = []
        self._hops: list[BlockExchange] = []
        for part in self._parts:
            widths = []
            blocks = []
            fields = []
            for group in range(shape.topology.num_groups):
                towers = [tower for tower in shape.of_group(group) if self._travels_as[tower] == part]
                mine = [(tower, index) for tower in towers for index in range(len(shape.output_field_dims[tower]))]
                dims = [shape.output_field_dims[tower][index] for tower, index in mine]
                begins = itertools.accumulate(dims, initial=0)
                blocks += [Block(dim, ((group, begin),)) for dim, begin in zip(dims, begins, strict=False)]
                widths.append(dims)
                fields += mine
            self._hops.append(make_hop(widths, blocks))
            self._fields.append(fields)

    def towers_on_slices(self) -> tuple[int, ...]:
        """The towers whose modules compute on slices."""
        return tuple(tower for tower, part in enumerate(self._part_of) if part > PLAIN)

    def start(self, given: PooledParts, *, run: Callable[[list[Tensor]], list[Tensor]]) -> InFlight:
        """Compute the modules of this rank's towers, and send what they give; collective.

        Args:
            given: pooled embeddings of this group's towers.
            run: from the input of each own tower to its output.
        """
        topology = self._shape.topology
        own = list(self._shape.of_group(topology.group_index))
        outputs = dict(zip(own, run(self._inputs_of(own, given)), strict=True))
        messages = []
        for part, hop in zip(self._parts, self._hops, strict=True):
            mine = [outputs[tower] for tower in own if self._travels_as[tower] == part]
            sizes = [given.sizes[part][rank] for rank in topology.peers.ranks]
            values = torch.cat(mine, dim=1) if mine else self._nothing(given.pooled[part], like=outputs[own[0]])
            token, transfer = hop.start(values, rows_sent=sizes, num_rows=sizes[topology.peers.position])
            messages.append(Message(hop, token, transfer))
        return InFlight(messages, lambda arrived: self._joined(arrived, given))

    def _inputs_of(self, own: Sequence[int], given: PooledParts) -> list[Tensor]:
        """Return the input of each tower, on samples or slices."""
        expanded: dict[int, Tensor] = {}
        for number, inverse in enumerate(given.peer_inverses):
            if inverse is not None:
                expanded[number + 1] = expand(given.pooled[number + 1], inverse)
        found = []
        for tower in own:
            is_mixed = self._part_of[tower] == MIXED
            pieces = []
            for name in self._shape.pooled[tower]:
                part = next(part for part, columns in enumerate(given.columns) if name in columns)
                whole = expanded[part] if is_mixed and part != PLAIN else given.pooled[part]
                pieces.append(whole[:, given.columns[part][name]])
            found.append(torch.cat(pieces, dim=1))
        return found

    @staticmethod
    def _nothing(pooled_RC: Tensor, *, like: Tensor) -> Tensor:
        """No columns, tied into the graph: other tower groups have towers of this part."""
        return pooled_RC[:, :0].to(like.dtype)

    def _joined(self, arrived: list[Tensor], given: PooledParts) -> Tensor:
        """Fields of all towers for this rank's samples, in the order of the model."""
        found: dict[_Field, Tensor] = {}
        for part, fields, values in zip(self._parts, self._fields, arrived, strict=True):
            samples = values if part == PLAIN else expand(values, given.inverses[part - 1])
            dims = [self._shape.output_field_dims[tower][index] for tower, index in fields]
            found |= dict(zip(fields, samples.split(dims, dim=1), strict=True))
        return torch.cat([found[field] for field in self._shape.order], dim=1)
