"""The same network in plain torch, padded: what a careful user writes without a kernel for jagged attention. A worker.

    events (B, L, D), L the longest history of the batch ─► SiLU(QKᵀ + b) / n, masked ─► (B, L, D) ─► questions

Same sizes, biases, dropout, negatives (128 for each 128 questions), batches and optimizer as `movielens_hstu`; the loss
is computed on real questions alone. BF16 by autocast where the processor has it, as ours chooses it.

Settings: `threads`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.worker import serve
from benchmarks.workload import Workload
from ziggurat.data.encoded.loader import Loader
from ziggurat.features.batch import Batch
from ziggurat.features.events import HISTORY
from ziggurat.features.schema import NUM_RESERVED_ROWS
from ziggurat.models.sequence.next_item_inputs import question_times
from ziggurat.precision.choice import resolve_precision
from ziggurat.recipes.catalogue import recipe_named
from ziggurat.runs.execute import prepare_run
from ziggurat.training.config import Precision

USERS, DIM, LENGTH, SHARED, TEMPERATURE, DROPOUT = 128, 50, 200, 128, 0.05, 0.2


class PaddedLayer(nn.Module):
    """One HSTU layer on padded events."""

    def __init__(self) -> None:
        super().__init__()
        self.projection, self.output = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.w_pos, self.w_time = (nn.Parameter(0.02 * torch.randn(size)) for size in (2 * LENGTH - 1, 129))

    def forward(self, events_BLD: Tensor, buckets_BLL: Tensor, seen_BLL: Tensor) -> Tensor:
        """The events as the next layer takes them."""
        u, v, q, k = F.silu(self.projection(F.layer_norm(events_BLD, (DIM,), eps=1e-6))).chunk(4, dim=2)
        places = torch.arange(events_BLD.shape[1])
        scores = q @ k.transpose(1, 2) + self.w_pos[places - places[:, None] + LENGTH - 1] + self.w_time[buckets_BLL]
        found = (F.silu(scores) / LENGTH * seen_BLL).to(v.dtype) @ v
        gated = F.dropout(u * F.layer_norm(found, (DIM,), eps=1e-6), DROPOUT)
        return events_BLD + self.output(gated)


class PaddedHSTU(nn.Module):
    """Two layers, items and positions; `forward` gives the loss of a batch."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(num_rows, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(PaddedLayer() for _ in range(2))
        for table in (self.items, self.positions):
            nn.init.trunc_normal_(table.weight, std=0.02)

    def forward(self, rows_N: Tensor, answers_N: Tensor, times: tuple[Tensor, Tensor], lengths_B: Tensor) -> Tensor:
        """The mean loss of all questions."""
        longest = int(lengths_B.max())
        inside_BL = torch.arange(longest) < lengths_B[:, None]

        def padded(values: Tensor) -> Tensor:
            return values.new_zeros(inside_BL.shape).masked_scatter(inside_BL, values)

        keys_BL, asked_BL = (padded(each) for each in times)
        apart = (asked_BL[:, :, None] - keys_BL[:, None, :]).abs().clamp(min=1).log() / 0.301
        buckets_BLL = apart.long().clamp(max=128)
        seen_BLL = torch.ones(longest, longest, dtype=torch.bool).tril() & inside_BL[:, None, :]
        events = self.items(padded(rows_N)) * DIM**0.5 + self.positions(torch.arange(longest))
        events = F.dropout(events, DROPOUT)
        for layer in self.layers:
            events = layer(events, buckets_BLL, seen_BLL)
        return self._loss(events[inside_BL].float(), answers_N)

    def _loss(self, states_ND: Tensor, answers_N: Tensor) -> Tensor:
        count = -(-len(states_ND) // SHARED)
        missing = count * SHARED - len(states_ND)
        drawn_GC = torch.randint(NUM_RESERVED_ROWS, self.items.num_embeddings, (count, 128))
        states = F.normalize(F.pad(states_ND, (0, 0, 0, missing)), dim=1).view(count, SHARED, DIM)
        answers_GS = F.pad(answers_N, (0, missing)).view(count, SHARED)
        own = (states * F.normalize(self.items(answers_GS), dim=2)).sum(2, keepdim=True)
        others = states @ F.normalize(self.items(drawn_GC), dim=2).transpose(1, 2)
        others = others.masked_fill(answers_GS[:, :, None] == drawn_GC[:, None, :], -torch.inf)
        scores = torch.cat([own, others], dim=2).flatten(0, 1)[: len(states_ND)] / TEMPERATURE
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64))


class PaddedContestant:
    """Steps of the padded network on the batches of our loader."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        del workload
        torch.set_num_threads(int(str(settings["threads"])))
        config = recipe_named("movielens_hstu")
        prepared = prepare_run(config)
        self.inputs = prepared.inputs
        self.loader = Loader(prepared.train, config=replace(config.training.loader, batch_size=USERS))
        self.network = PaddedHSTU(self.inputs.table(self.inputs.single[0].table).num_rows)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
        self.precision, _ = resolve_precision(Precision.AUTO, device=torch.device("cpu"))
        self.batches = self._batches()
        self.info: dict[str, object] = {"precision": self.precision.value}

    def run(self, steps: int) -> float:
        """Train on so many batches."""
        value = 0.0
        for batch in itertools.islice(self.batches, steps):
            index = [spec.name for spec in self.inputs.jagged].index(HISTORY)
            lists, _ = batch.lists(index)
            offsets = lists.offsets
            times, last = question_times(batch, offsets)
            ends = offsets[1:] - 1
            answers, asked = lists.values.roll(-1), times.roll(-1)
            answers[ends], asked[ends] = batch.single[0], last
            with torch.autocast("cpu", torch.bfloat16, enabled=self.precision is Precision.BF16):
                loss = self.network(lists.values, answers, (times, asked), offsets.diff())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            value = float(loss.detach())
        return value

    def _batches(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.loader.batches(epoch=epoch)


if __name__ == "__main__":
    serve(PaddedContestant)
