"""Tables in the host's memory behind a GPU that is there: the bits of tables on it, and steps that nobody waits for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.gpu.test_training_on_cuda import no_waits
from tests.training.test_host_tables import model_on
from tests.training.test_late_steps import MODEL, settings
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.testing.batches import random_batch, small_inputs
from ziggurat.training.step.train_step import TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use"),
]


@pytest.mark.parametrize("kernel", [KernelChoice.TORCH, KernelChoice.AUTO])
def test_steps_have_the_bits_of_tables_on_the_gpu_and_do_not_wait(kernel: KernelChoice) -> None:
    inputs, cuda = small_inputs(num_jagged=2), torch.device("cuda", 0)
    config = dataclasses.replace(MODEL, embedding=EmbeddingConfig(kernel=kernel))
    batches = [random_batch(inputs, 64, seed=seed).to(cuda) for seed in range(12)]
    found = []
    for places in (0, 64):
        model = model_on(cuda, num_places=places, config=config, inputs=inputs)
        step, late = TrainStep(model, settings()), []
        assert step.waits == ""
        for number, (batch, upcoming) in enumerate(zip(batches, [*batches[1:], None], strict=True)):
            if number < 4:
                late.append(step(batch, upcoming=upcoming))
                continue
            with no_waits(cuda):
                late.append(step(batch, upcoming=upcoming))
        assert all(each.finite for each in late)
        tables = model.embeddings.tables
        found.append([tables.view(name).cpu() for name in tables.places])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
