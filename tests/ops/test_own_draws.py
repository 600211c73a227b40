"""OwnDraws: the numbers of a seeded global generator, without a change to it that another thread could see."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ziggurat as zg
from ziggurat.ops.own_draws import OwnDraws
from ziggurat.testing.batches import small_inputs


def filled(fill: Callable[[Tensor], Tensor]) -> Callable[[], list[Tensor]]:
    return lambda: [fill(torch.empty(9, 17))]


def weights(make: Callable[[], nn.Module]) -> Callable[[], list[Tensor]]:
    return lambda: [each.detach().clone() for each in make().parameters()]


DRAWS: dict[str, Callable[[], list[Tensor]]] = {
    "linear": weights(lambda: nn.Linear(7, 33)),
    "embedding": weights(lambda: nn.Embedding(5, 3)),
    "lstm": weights(lambda: nn.LSTM(4, 5, num_layers=2)),
    "attention": weights(lambda: nn.MultiheadAttention(8, 2)),
    "bilinear": weights(lambda: nn.Bilinear(2, 3, 4)),
    "convolution": weights(lambda: nn.Conv2d(2, 3, 3)),
    "init.normal_": filled(nn.init.normal_),
    "init.uniform_": filled(nn.init.uniform_),
    "init.trunc_normal_": filled(nn.init.trunc_normal_),
    "init.xavier_uniform_": filled(nn.init.xavier_uniform_),
    "init.xavier_normal_": filled(nn.init.xavier_normal_),
    "init.kaiming_uniform_": filled(nn.init.kaiming_uniform_),
    "init.kaiming_normal_": filled(nn.init.kaiming_normal_),
    "init.orthogonal_": filled(nn.init.orthogonal_),
    "init.sparse_": filled(lambda x: nn.init.sparse_(x, 0.3)),
    "rand": lambda: [torch.rand(5), torch.rand(2, 3, dtype=torch.float64)],
    "randn": lambda: [torch.randn(2, 19)],
    "randint": lambda: [torch.randint(5, (7,)), torch.randint(1, 5, (7,))],
    "randperm": lambda: [torch.randperm(9)],
    "rand_like": lambda: [torch.rand_like(torch.ones(3, 4)), torch.rand_like(input=torch.ones(3, dtype=torch.float64))],
    "randn_like": lambda: [torch.randn_like(torch.ones(3, 4), dtype=torch.float64)],
    "bernoulli": lambda: [torch.bernoulli(torch.full((20,), 0.4)), torch.full((20,), 0.4).bernoulli()],
    "normal": lambda: [torch.normal(0.0, 1.0, (17,)), torch.normal(torch.zeros(20), 1.0)],
    "multinomial": lambda: [torch.multinomial(torch.ones(9), 3), torch.ones(9).multinomial(3)],
    "poisson": lambda: [torch.poisson(torch.ones(20))],
    "in place": lambda: [
        torch.empty(20).uniform_(),
        torch.empty(20).normal_(),
        torch.empty(20).exponential_(),
        torch.empty(20).log_normal_(),
        torch.empty(20).cauchy_(),
        torch.empty(20).geometric_(0.3),
        torch.empty(20).bernoulli_(0.3),
        torch.empty(20).random_(7),
    ],
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_the_global_generator_which_stays(name: str) -> None:
    draw = DRAWS[name]
    torch.manual_seed(5)
    expected = draw()
    before = torch.get_rng_state()
    with OwnDraws(5):
        found = draw()
    assert all(torch.equal(first, second) for first, second in zip(found, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_that_was_given_is_taken() -> None:
    def draw() -> list[Tensor]:
        mine = torch.Generator().manual_seed(3)
        weight = nn.init.xavier_uniform_(torch.empty(3, 4), generator=mine)
        return [torch.rand(3, generator=mine), torch.empty(4).normal_(generator=mine), weight]

    with OwnDraws(5):
        found = draw()
    assert all(torch.equal(first, second) for first, second in zip(found, draw(), strict=True))


def test_blocks_within_blocks_do_not_move_each_other() -> None:
    with OwnDraws(1):
        alone = [torch.rand(3), torch.rand(3)]
    with OwnDraws(1):
        first = torch.rand(3)
        with OwnDraws(2):
            inner = torch.rand(3)
        second = torch.rand(3)
    assert torch.equal(first, alone[0])
    assert torch.equal(second, alone[1])
    assert not torch.equal(inner, second)


def test_nothing_is_drawn_where_there_are_no_values() -> None:
    with OwnDraws(1), torch.device("meta"):
        assert nn.Linear(3, 4).weight.is_meta


def test_a_model_that_is_built_in_a_thread_leaves_the_draws_of_training_as_they_are() -> None:
    inputs = small_inputs()
    config = zg.DCNv2Config(embedding_dim=4)
    torch.manual_seed(7)
    expected = torch.rand(20_000, 8)
    torch.manual_seed(7)
    over = threading.Event()

    def build() -> None:
        while not over.is_set():
            zg.build_model(config, inputs, seed=0)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        # Small draws, so that the other thread comes between them.
        found = torch.cat([torch.rand(1, 8) for _ in range(20_000)])
    finally:
        over.set()
        thread.join()
    assert torch.equal(found, expected)
