"""Negatives: where the wrong answers of a softmax over samples come from, and where drawn ones stand in a batch.

    in_batch   the items of the other samples of the block: item i is there about n·p(i) times; p: its share of samples
    uniform    m items of the training data, each as likely as any other: m / N times
    mixed      both: n·p(i) + m / N times (Yang et al., WWW 2020)
    mined      in_batch, and m items that the model itself gives users of the block high scores, but that they never
               liked (Xiong et al., ICLR 2021, for texts)

Items of a block come for nothing, but an item that nobody took is never a negative. Drawn items are looked up and
encoded like those of samples, with gradients. So they travel as further samples, m at the end of each block:

    batch   [ n samples | m drawn ] [ n samples | m drawn ] … [ k samples | m drawn ]      the last block may be shorter

Of a drawn sample the item's features are real; it has no label, no weight and no user. `extras[CANDIDATES]` holds the
row of each sample's item in the item's table, or -1 for one that is no candidate. Everything between data and loss
treats them as samples, so lookups, towers and pipelines on many ranks need know nothing of them. Who draws is
`training/negatives.py`.

Cost: m more lookups and passes of the item's encoder for each n samples. The user's encoder leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import torch
from jaxtyping import Int64
from torch import Tensor

from ziggurat.typed import Count, checked

CANDIDATES = "negatives.candidates"


class NegativesKind(StrEnum):
    """Sources of negatives: where the items that a user did not choose come from."""

    IN_BATCH = "in_batch"
    UNIFORM = "uniform"
    MIXED = "mixed"
    MINED = "mined"


@dataclass(frozen=True, kw_only=True)
@checked
class MiningConfig:
    """Settings of how often a model searches for negatives of its own, and how deep.

    Args:
        every: steps between two searches of all items for all users; the first is after so many. Until then no negative
            is mined.
        depth: best items of each user that a negative is drawn from.
    """

    every: Count = 200
    depth: Count = 100


@dataclass(frozen=True, kw_only=True)
@checked
class NegativesConfig:
    """Settings of where the wrong answers of a softmax over samples come from.

    Args:
        kind: where they come from.
        num_drawn: m, items that are drawn for each block; unused with `in_batch`.
        mining: of `mined`.
    """

    kind: NegativesKind = NegativesKind.IN_BATCH
    num_drawn: Count = 256
    mining: MiningConfig = field(default_factory=MiningConfig)

    @property
    def extra_samples(self) -> int:
        """Samples that are added to each block."""
        return 0 if self.kind is NegativesKind.IN_BATCH else self.num_drawn


@dataclass(frozen=True)
class DrawnLayout:
    """Places of samples and drawn items in a batch; Z blocks, S samples.

    Args:
        num_rows: S + Z·m, samples and drawn ones.
        block: n.
        drawn: m.
    """

    num_rows: int
    block: int
    drawn: int

    @property
    def num_blocks(self) -> int:
        """Z."""
        return -(-self.num_rows // (self.block + self.drawn))

    @property
    def num_samples(self) -> int:
        """S."""
        return self.num_rows - self.num_blocks * self.drawn

    def samples(self) -> Int64[Tensor, "S"]:
        """Places of the samples."""
        # In front of each sample stand those before it, and the drawn items of all earlier blocks.
        number_S = torch.arange(self.num_samples)
        return number_S + number_S // self.block * self.drawn

    def drawn_items(self) -> Int64[Tensor, "Z m"]:
        """Places of the drawn items of each block."""
        # The last block may be shorter: its drawn items follow its last sample.
        ends_Z = torch.clamp(torch.arange(1, self.num_blocks + 1) * self.block, max=self.num_samples)
        return (ends_Z + torch.arange(self.num_blocks) * self.drawn).unsqueeze(1) + torch.arange(self.drawn)

    def order(self) -> Int64[Tensor, "R"]:
        """Return the number of what stands at each place: samples from 0 on, then the drawn items of all blocks."""
        order_R = torch.empty(self.num_rows, dtype=torch.int64)
        order_R[self.samples()] = torch.arange(self.num_samples)
        order_R[self.drawn_items().reshape(-1)] = torch.arange(self.num_samples, self.num_rows)
        return order_R

    @staticmethod
    def of_samples(num_samples: int, *, block: int, drawn: int) -> DrawnLayout:
        """The layout of a batch of so many samples, after items were drawn for it."""
        return DrawnLayout(num_samples + -(-num_samples // block) * drawn, block, drawn)
