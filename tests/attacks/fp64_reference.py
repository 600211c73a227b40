"""Training steps in FP64, from the equations: no lookup, pooling, loss or optimizer of the package runs here.

    pooled_f = Σ T[r]  (mean: / length)         row 0 of a table is padding: zeros, never updated
    loss     = Σ_b w_b · BCE(logit_b, y_b) / Σ_b w_b          w_b times the positive weight where y_b = 1
    clip     all gradients times min(1, clip_norm / (their norm + 1e-6))
    tables   SGD, row-wise Adagrad, sparse Adam: once for each distinct row that the batch reads
    dense    SGD, Adam, Adagrad

The networks of logistic regression, DNN, DCNv2 (parallel) and DLRM, and linear towers, are written out
from their papers. The other models' `forward_dense` runs in FP64: for them the reference checks what is distributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

State = dict[str, Tensor]
NOTHING = 1e-4  # of the largest gradient of a weight, which has FP32's error of 6e-8 of each of its terms


class Reference:
    """A model on one device, in FP64.

    Args:
        model: freshly built; it is copied.
        kind: of its config.
        rates: learning rates of the dense network and of the tables.
        rules: names of the dense optimizer and of the tables'.
        clip_norm: of all gradients together; 0: off.
        written_out: whether the network is to be the one below instead of the model's own.

    Attributes:
        unseen: weights whose gradient was nothing in a step of Adam or Adagrad, such as what is added to all keys
            alike, which softmax does not see. Their updates are noise of full size.
    """

    def __init__(
        self,
        model: Any,
        *,
        kind: str,
        rates: tuple[float, float],
        rules: tuple[str, str],
        clip_norm: float,
        written_out: bool,
    ) -> None:
        self.inputs, self.rates, self.rules, self.clip_norm = model.inputs, rates, rules, clip_norm
        self.tables: State = {
            table.name: model.embeddings.tables.view(table.name).detach().double().clone()
            for table in model.inputs.tables
        }
        named = {name: weight.detach().double().clone() for name, weight in model.named_parameters()}
        self.dense: State = {name: weight for name, weight in named.items() if not name.startswith("embeddings.")}
        self.start = {name: weight.clone() for name, weight in (*self.tables.items(), *self.dense.items())}
        self._towers = [] if model.towers is None else [list(tower) for tower in model.towers.towers.towers]
        self._network = NETWORKS[kind] if written_out else None
        self._own = None if written_out else _OwnNetwork(model)
        self.unseen: State = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in self.dense.items()}
        self._moments: dict[str, State] = {}
        self._step, self._largest = 0, 0.0

    @torch.no_grad()
    def step(self, batch: Any) -> tuple[float, Tensor]:
        """Loss before the update, and logits."""
        self._step += 1
        with torch.enable_grad():
            leaves = {name: weight.clone().requires_grad_() for name, weight in self.dense.items()}
            tables = {name: weight.clone().requires_grad_() for name, weight in self.tables.items()}
            read: dict[str, list[Tensor]] = {name: [] for name in tables}
            pooled = {spec.name: self._pooled(batch, spec, tables, read) for spec in self.inputs.fields}
            if self._own is not None:
                sequences = {
                    spec.name: self._unpooled(batch, spec, tables, read)
                    for spec in getattr(self.inputs, "sequences", ())
                }
                logits, loss = self._own.run(leaves, pooled, sequences, batch)
            else:
                assert self._network is not None
                logits = self._network(leaves, self._fields(leaves, pooled), batch.dense.double())
                labels = batch.labels.double()
                more = 1 + (self.inputs.labels[0].positive_weight - 1) * labels[:, 0]
                loss = weighted_cross_entropy(logits, labels, more if batch.weights is None else batch.weights * more)
            wanted = {**leaves, **{f"table {name}": weight for name, weight in tables.items()}}
            found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
            gradients = self._clipped(dict(zip(wanted, found, strict=True)))
        self._largest = max(float(each.abs().max()) for each in gradients.values() if each is not None)
        for name in self.dense:
            gradient = gradients[name]
            self._update_dense(name, torch.zeros_like(self.dense[name]) if gradient is None else gradient)
        for name in self.tables:
            rows = torch.cat([*read[name], torch.empty(0, dtype=torch.int64)]).unique()
            gradient = gradients[f"table {name}"]
            if gradient is not None and len(rows[rows > 0]):
                self._update_rows(name, rows[rows > 0], gradient)
        return float(loss), logits.detach()

    def _clipped(self, gradients: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        norm = sum(float((each**2).sum()) for each in gradients.values() if each is not None) ** 0.5
        factor = min(1.0, self.clip_norm / (norm + 1e-6)) if self.clip_norm else 1.0
        return {name: None if each is None else each * factor for name, each in gradients.items()}

    def _pooled(self, batch: Any, spec: Any, tables: State, read: dict[str, list[Tensor]]) -> Tensor:
        singles = [each.name for each in self.inputs.single]
        if spec.name in singles:
            rows = batch.single[singles.index(spec.name)]
            read[spec.table].append(rows)
            return tables[spec.table][rows] * (rows > 0).unsqueeze(1)
        rows, samples, lengths = self._list(batch, spec.name)
        read[spec.table].append(rows)
        vectors = tables[spec.table][rows] * (rows > 0).unsqueeze(1)
        sums = torch.zeros(batch.batch_size, vectors.shape[1], dtype=torch.float64).index_add(0, samples, vectors)
        return sums / lengths.clamp(min=1).unsqueeze(1) if spec.pooling.value == "mean" else sums

    def _unpooled(self, batch: Any, spec: Any, tables: State, read: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        rows, _, lengths = self._list(batch, spec.name)
        read[spec.table].append(rows)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return tables[spec.table][rows] * (rows > 0).unsqueeze(1), offsets

    def _list(self, batch: Any, name: str) -> tuple[Tensor, Tensor, Tensor]:
        index, size = [each.name for each in self.inputs.jagged].index(name), batch.batch_size
        offsets = batch.jagged.offsets[index * size : (index + 1) * size + 1]
        lengths = offsets.diff()
        rows = batch.jagged.values[int(offsets[0]) : int(offsets[-1])]
        return rows, torch.arange(size).repeat_interleave(lengths), lengths

    def _fields(self, leaves: State, pooled: State) -> list[Tensor]:
        if not self._towers:
            return list(pooled.values())
        outputs = []
        for tower, names in enumerate(self._towers):  # linear, c = 1, p = 0: o_f = W_f e_f
            weight = leaves[f"towers.modules_of_towers.{tower}.alone.groups.0.weight"]
            outputs += [pooled[name] @ weight[index] for index, name in enumerate(names)]
        return outputs

    def _moment(self, name: str, like: Tensor, which: str) -> Tensor:
        return self._moments.setdefault(which, {}).setdefault(name, torch.zeros_like(like))

    def _update_dense(self, name: str, gradient: Tensor) -> None:
        weight, rate, rule = self.dense[name], self.rates[0], self.rules[0]
        if rule != "sgd":  # they divide a gradient by its size: of one that is nothing, what FP32 makes of zero
            self.unseen[name] |= gradient.abs() <= max(NOTHING * float(gradient.abs().max()), 1e-9 * self._largest)
        if rule == "sgd":
            weight -= rate * gradient
        elif rule == "adagrad":
            total = self._moment(name, weight, "squares").add_(gradient**2)
            weight -= rate * gradient / (total.sqrt() + 1e-10)
        else:
            first = self._moment(name, weight, "first").mul_(0.9).add_(0.1 * gradient)
            second = self._moment(name, weight, "second").mul_(0.999).add_(0.001 * gradient**2)
            corrected = (second / (1 - 0.999**self._step)).sqrt() + 1e-8
            weight -= rate * first / (1 - 0.9**self._step) / corrected

    def _update_rows(self, name: str, rows: Tensor, gradient: Tensor) -> None:
        weight, rate, rule, g = self.tables[name], self.rates[1], self.rules[1], gradient[rows]
        if rule == "sgd":
            weight[rows] -= rate * g
        elif rule == "rowwise_adagrad":
            total = self._moment(name, weight[:, 0], "squares")
            total[rows] += (g**2).mean(dim=1)
            weight[rows] -= rate * g / (total[rows].sqrt().unsqueeze(1) + 1e-8)
        else:
            first, second = self._moment(name, weight, "first"), self._moment(name, weight, "second")
            first[rows] = 0.9 * first[rows] + 0.1 * g
            second[rows] = 0.999 * second[rows] + 0.001 * g**2
            scale = rate * (1 - 0.999**self._step) ** 0.5 / (1 - 0.9**self._step)
            weight[rows] -= scale * first[rows] / (second[rows].sqrt() + 1e-8)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Mean over samples, weighted."""
    each = torch.log1p(torch.exp(-logits.abs())) + logits.clamp(min=0) - logits * labels
    weight = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double()
    return (each * weight.unsqueeze(1)).sum() / weight.sum()


# ------------------------------------------------------------------------------------------------------------- networks


def _mlp(weights: State, prefix: str, x: Tensor, *, activate_last: bool) -> Tensor:
    index = 0
    while f"{prefix}.layers.{index}.weight" in weights:
        x = torch.relu(x @ weights[f"{prefix}.layers.{index}.weight"].T + weights[f"{prefix}.layers.{index}.bias"])
        index += 1
    if f"{prefix}.output.weight" in weights:
        x = x @ weights[f"{prefix}.output.weight"].T + weights[f"{prefix}.output.bias"]
        x = torch.relu(x) if activate_last else x
    return x


def logistic_regression(weights: State, fields: list[Tensor], dense: Tensor) -> Tensor:
    """Σ w_f + w·x + b."""
    return (
        torch.cat(fields, dim=1).sum(dim=1, keepdim=True) + dense @ weights["linear.weight"].T + weights["linear.bias"]
    )


def _with_numbers(weights: State, fields: list[Tensor], dense: Tensor) -> Tensor:
    """A number x_n becomes the field x_n · v_n."""
    vectors = weights["flat.dense.numeric_fields.weight"]
    return torch.cat([(dense.unsqueeze(2) * vectors).flatten(1), *fields], dim=1)


def dnn(weights: State, fields: list[Tensor], dense: Tensor) -> Tensor:
    """An MLP on everything side by side."""
    return _mlp(weights, "heads.networks.0", _with_numbers(weights, fields, dense), activate_last=False)


def dcn_v2(weights: State, fields: list[Tensor], dense: Tensor) -> Tensor:
    """Wang et al., arXiv 2008.13535, parallel: x_{l+1} = x_0 ⊙ (W x_l + b) + x_l beside a deep network."""
    start = _with_numbers(weights, fields, dense)
    crossed, layer = start, 0
    while f"cross.layers.{layer}.weight" in weights:
        product = crossed @ weights[f"cross.layers.{layer}.weight"].T + weights[f"cross.layers.{layer}.bias"]
        crossed = start * product + crossed
        layer += 1
    both = torch.cat([crossed, _mlp(weights, "deep.0", start, activate_last=True)], dim=1)
    return both @ weights["outputs.0.weight"].T + weights["outputs.0.bias"]


def dlrm(weights: State, fields: list[Tensor], dense: Tensor) -> Tensor:
    """Naumov et al., arXiv 1906.00091: bottom MLP, dot products of all pairs, top MLP."""
    bottom = _mlp(weights, "dense_inputs.bottom", dense, activate_last=True)
    stacked = torch.stack([bottom, *fields], dim=1)
    products = stacked @ stacked.transpose(1, 2)
    first, second = torch.triu_indices(stacked.shape[1], stacked.shape[1], offset=1)
    together = torch.cat([bottom, products[:, first, second]], dim=1)
    wide = weights["top.networks.0.layers.0.weight"].shape[1]
    return _mlp(
        weights, "top.networks.0", nn.functional.pad(together, (0, wide - together.shape[1])), activate_last=False
    )


NETWORKS: dict[str, Callable[[State, list[Tensor], Tensor], Tensor]] = {
    "logistic_regression": logistic_regression,
    "dnn": dnn,
    "dcn_v2": dcn_v2,
    "dlrm": dlrm,
}


def _single_if_not_double(tensor: Tensor) -> Tensor:
    """`Tensor.float` for FP64: what models keep in FP32 under autocast stays as exact as the rest."""
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.float32)


class _OwnNetwork(nn.Module):
    """The model's own dense network, towers and loss, in FP64."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)
        for name, child in self.model.named_children():
            if name != "embeddings":
                child.double()

    def forward(self, pooled: State, sequences: dict[str, tuple[Tensor, Tensor]], batch: Any) -> tuple[Tensor, Tensor]:
        from ziggurat.models.contract.model import Embedded, Unpooled

        exact = batch.map(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
        fields = torch.cat(list(pooled.values()), dim=1)
        fields = fields if self.model.towers is None else self.model.towers(fields)
        lists = {name: Unpooled(values=values, offsets=offsets) for name, (values, offsets) in sequences.items()}
        embedded = Embedded(dense=exact.dense, fields=fields, sequences=lists, vectors=exact.vectors)
        outputs = self.model.forward_dense(embedded)
        return outputs.logits, self.model.loss(outputs, exact).mean()

    def run(self, leaves: State, pooled: State, sequences: dict[str, tuple[Tensor, Tensor]], batch: Any) -> Any:
        """Logits and loss with the given weights."""
        named = {f"model.{name}": weight for name, weight in leaves.items()}
        with mock.patch.object(torch.Tensor, "float", _single_if_not_double):
            return torch.func.functional_call(self, named, (pooled, sequences, batch))
