"""NaN or infinity in a step: the batch is kept, so that a person can find out why, and the error that says so."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from ziggurat.config import to_json
from ziggurat.errors import NumericsError
from ziggurat.features.batch import Batch
from ziggurat.features.inputs import InputSpec
from ziggurat.files import replacing


def dump_batch(batch: Batch, path: Path, inputs: InputSpec) -> Path:
    """Write a batch as safetensors; the names of its columns stand in the file's metadata. Returns the path."""
    plain = {name: value.detach().cpu().contiguous() for name, value in batch.tensors().items()}
    with replacing(path) as temporary:
        save_file(plain, str(temporary), metadata={"inputs": json.dumps(to_json(inputs))})
    return path


def has_bad_number(batch: Batch) -> bool:
    """Return whether a number of a batch itself is NaN or infinite; waits for the device."""
    return not all(bool(each.isfinite().all()) for each in batch.tensors().values() if each.is_floating_point())


def non_finite_error(
    *, loss: float, first_bad: str, step: int, epoch: int, path: Path, can_skip: bool
) -> NumericsError:
    """Return the error to raise when a step is not finite and may not be skipped.

    Args:
        loss: of the step.
        first_bad: the first tensor that is not finite.
        step: counted from 1.
        epoch: counted from 1.
        path: of the batch that was kept.
        can_skip: whether the run can be expected to go on without this batch.
    """
    ways_out = [
        "lower the learning rates, or warm up: --training.schedule.warmup-steps 1000",
        "clip gradients: --training.clip-norm 10",
    ]
    if can_skip:
        ways_out.append("skip such batches: --training.non-finite skip, then --resume")
    return NumericsError(
        expected="a finite loss and finite gradients",
        found=f"loss {loss}; first bad tensor: {first_bad}",
        where=f"step {step} (epoch {epoch}); the batch is in {path}; no weight was changed",
        ways_out=ways_out,
    )
