"""PEPNet against its equations, written as loops over samples; what its gates read, and what they teach."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.models.test_zoo import array, build, mlp, parts
from ziggurat.errors import ConfigError
from ziggurat.models import MLPConfig, PEPNetConfig, build_model
from ziggurat.testing.batches import random_batch, small_inputs

D = 4
INPUTS = small_inputs(num_dense=2, num_single=2, num_jagged=1, num_labels=2)
PLACES = {
    "dense0": ("number", 0),
    "dense1": ("number", 1),
    "single0": ("field", 0),
    "single1": ("field", 1),
    "jagged0": ("field", 2),
}


def named(names: tuple[str, ...], dense: np.ndarray, fields: np.ndarray) -> np.ndarray:
    """The features that a gate reads: fields in their order, then numbers."""
    places = sorted(PLACES[name] for name in names)
    parts = [fields[D * index : D * (index + 1)] for kind, index in places if kind == "field"]
    return np.concatenate([*parts, *(dense[index : index + 1] for kind, index in places if kind == "number")])


def gate(unit, context: np.ndarray, names: tuple[str, ...], dense: np.ndarray, fields: np.ndarray) -> np.ndarray:
    read = np.concatenate([named(names, dense, fields), context]) if names else context
    return 2.0 / (1.0 + np.exp(-mlp(read, unit.network)))


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5)])
@pytest.mark.parametrize(
    ("domain", "prior"),
    [((), ()), (("single1",), ()), ((), ("single0", "jagged0")), (("dense1", "single0"), ("jagged0", "dense0"))],
)
def test_pepnet(domain: tuple[str, ...], prior: tuple[str, ...], hidden: tuple[int, ...]) -> None:
    config = PEPNetConfig(embedding_dim=D, domain=domain, prior=prior, deep=MLPConfig(hidden_dims=hidden), gate_dim=3)
    model = build(config, INPUTS)
    dense, fields = parts(model)
    found = model.interact(dense, fields, {})
    for sample, x in enumerate(array(model.flat(dense, fields, {}))):
        of_sample = (array(dense)[sample], array(fields)[sample])
        if domain:
            x = gate(model.domain_gate, x, domain, *of_sample) * x
        gates = [np.split(gate(unit, x, prior, *of_sample), 2) for unit in model.gates]
        for label in range(2):
            h = x
            for layer, of_labels in enumerate(model.layers):
                h = mlp(gates[layer][label] * h, of_labels.networks[label])
            expected = mlp(gates[-1][label] * h, model.heads.networks[label])[0]
            assert found[sample, label].item() == pytest.approx(expected, rel=1e-9)


def test_gates_teach_the_features_that_are_named_and_no_others() -> None:
    config = PEPNetConfig(embedding_dim=D, domain=("single0",), prior=("single1",), deep=MLPConfig(hidden_dims=(5,)))
    model = build(config, INPUTS)
    dense, fields = parts(model)
    x = model.flat(dense, fields, {}).detach()
    for unit, place in ((model.domain_gate, 0), (model.gates[0], 1)):
        fields.requires_grad_()
        fields.grad = None
        context = x.clone().requires_grad_()
        unit(dense, fields, context).square().sum().backward()
        assert context.grad is None
        learned = fields.grad.reshape(len(dense), -1, D).abs().sum(dim=(0, 2)) > 0
        assert learned.tolist() == [index == place for index in range(3)]


def test_gates_that_say_nothing_leave_a_network_for_each_label() -> None:
    model = build(PEPNetConfig(embedding_dim=D, domain=("single0",), deep=MLPConfig(hidden_dims=(5,))), INPUTS)
    with torch.no_grad():
        for unit in (model.domain_gate, *model.gates):
            unit.network.output.weight.zero_()
            unit.network.output.bias.zero_()
    dense, fields = parts(model)
    x = model.flat(dense, fields, {})
    plain = [head(network(x)) for head, network in zip(model.heads.networks, model.layers[0].networks, strict=True)]
    assert torch.equal(model.interact(dense, fields, {}), torch.cat(plain, dim=1))


def test_a_feature_that_is_not_there_is_refused() -> None:
    for setting in ("domain", "prior"):
        with pytest.raises(ConfigError, match=f"(?s)found:    shop\n.*model.{setting}"):
            build_model(PEPNetConfig(**{setting: ("single0", "shop")}), INPUTS, seed=0)
    model = build_model(PEPNetConfig(domain=("single0", "single0")), INPUTS, seed=0)
    assert model(random_batch(INPUTS, 3)).shape == (3, 2)
