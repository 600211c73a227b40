"""DividedOutputs: evaluations and scores of whole samples, computed on pieces of their histories.

    rank 0 brings a, b      turn 0   pieces of a, b on all ranks ─► what answers them goes back to rank 0
    rank 1 brings c         turn 1   pieces of c    on all ranks ─► what answers it goes back to rank 1

A rank computes with the pieces of one rank's samples at a time, so it holds 1/N of the events that it would hold alone.
Who has a piece that answers a sample (the end of a history, or a candidate) sends the row to who brought the sample:
logits, and what `told_of_samples` names. Callers see the outputs of their own samples, as on one device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ziggurat.features.batch import Batch
from ziggurat.features.events import PIECE_HOMES, PIECE_STARTS
from ziggurat.models import Model, Outputs
from ziggurat.parallel.context.history_exchange import HistoryExchange
from ziggurat.parallel.exchange.collectives import all_to_all
from ziggurat.parallel.exchange.traffic import Traffic
from ziggurat.parallel.topology import Topology


class DividedOutputs:
    """Stands in for `Model.outputs_of`; calls are collective over all ranks where no gradients are kept.

    Args:
        model: which can cut histories, on many ranks.
        topology: the ranks.
        traffic: counts the messages.
    """

    def __init__(self, model: Model, *, topology: Topology, traffic: Traffic) -> None:
        self._model = model
        self._traffic = traffic
        self._exchange = HistoryExchange(model, topology=topology, traffic=traffic)

    def __call__(self, batch: Batch) -> Outputs:
        """The outputs of this rank's samples.

        Args:
            batch: what this rank brings; its size may differ from rank to rank, and be 0.
        """
        if torch.is_grad_enabled() or PIECE_STARTS in batch.extras:
            return self._computed(batch)
        device = batch.dense.device
        mine = self._exchange.pieces(batch.map(lambda tensor: tensor.cpu()))
        found = [self._answers(part, device) for part in self._exchange.exchanged(mine)]
        rows_BW = self._at_home(mine, [each.rows for each in found], num_samples=batch.batch_size)
        names = ("", *self._named_outputs)
        widths = found[0].widths
        columns = rows_BW.to(device).split(widths, dim=1)
        parts = {name: part.to(dtype) for name, part, dtype in zip(names, columns, found[0].dtypes, strict=True)}
        return Outputs(logits=parts.pop(""), named=parts)

    @property
    def _named_outputs(self) -> tuple[str, ...]:
        return self._exchange.model.told_of_samples

    def _computed(self, batch: Batch) -> Outputs:
        return self._model.dense_outputs(self._model.embed(batch))

    def _answers(self, part: Batch | None, device: torch.device) -> _Answers:
        """Return the answers of this rank's pieces of one rank's samples."""
        if part is None or not part.batch_size:
            part = Batch.empty(self._model.inputs)  # nobody of the group has any: whole histories, of which there are 0
        outputs = self._computed(part.to(device))
        tensors = [outputs.logits, *(outputs.named[name] for name in self._named_outputs)]
        rows = torch.cat(tensors, dim=1).cpu()  # FP64 where logits are: what travels beside them is none the worse
        if PIECE_HOMES in part.extras:
            rows = rows[part.extras[PIECE_HOMES] >= 0]
        return _Answers(rows, [each.shape[1] for each in tensors], [each.dtype for each in tensors])

    def _at_home(self, mine: list[Batch], answers: list[Tensor], *, num_samples: int) -> Tensor:
        """The rows of this rank's samples, from whoever computed them."""
        width = answers[0].shape[1]
        homes = [part.extras[PIECE_HOMES] for part in mine]
        homes = [each[each >= 0] for each in homes]
        came = all_to_all(
            torch.cat(answers).reshape(-1),
            sent=[each.numel() for each in answers],
            received=[len(each) * width for each in homes],
            group=self._exchange.group,
            traffic=self._traffic,
            purpose="context answers",
        )
        samples = torch.cat(homes)
        assert len(samples) == num_samples, "each sample is answered once"
        return torch.empty(num_samples, width, dtype=answers[0].dtype).index_copy(
            0, samples, came.wait().view(-1, width)
        )


class _Answers(NamedTuple):
    """Rows of logits and what goes with them, and width and dtype of each."""

    rows: Tensor
    widths: list[int]
    dtypes: list[torch.dtype]
