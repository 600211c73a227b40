"""Open the parent of a run: another run, and the checkpoint of it whose weights are taken. Nothing of it is changed.

Rows are read block by block out of a verified checkpoint, so that no table of the parent is in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.config import from_json
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.data.preprocess.preprocessing_io import load_preprocessing
from ziggurat.embeddings.growing.growing_batches import GrowingBatches
from ziggurat.embeddings.storage import MemoryStorage, StoredRows, TablePart
from ziggurat.embeddings.storage.table_storage import WEIGHT
from ziggurat.errors import CheckpointError, ConfigError, MissingFileError
from ziggurat.features.inputs import InputSpec
from ziggurat.models import ModelConfig
from ziggurat.recipes.run_config import RunConfig, load_config
from ziggurat.recipes.warm_start import WarmStartConfig
from ziggurat.runs.data_record import refuse_other_vocabularies
from ziggurat.training.checkpoint.errors import DamagedCheckpointError
from ziggurat.training.checkpoint.restore import read_tensors
from ziggurat.training.checkpoint.retention import complete_steps, step_folder
from ziggurat.training.checkpoint.storage import CheckpointReader
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import INPUTS, WARM_START, Ancestor, RunFolder

_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A run whose weights another one begins from.

    Args:
        folder: of the run.
        config: of the run.
        inputs: of its model.
        preprocessing: its vocabularies, those that have grown too.
        reader: of its checkpoint, verified.
        frequency: by growing table: how often each row was used.
        ancestors: the runs that it began from in turn, the nearest first.
    """

    folder: Path
    config: RunConfig
    inputs: InputSpec
    preprocessing: Preprocessing
    reader: CheckpointReader
    frequency: Mapping[str, UInt8[np.ndarray, " R"]] = field(default_factory=dict, repr=False)
    ancestors: tuple[Ancestor, ...] = ()

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.reader.manifest.step

    def ancestor(self) -> Ancestor:
        """Return what the run that begins from it remembers of it."""
        return {"run": str(self.folder), "step": self.step, "digest": self.reader.manifest_sha256()}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor of the checkpoint; None if it has none of that name."""
        stored = self.reader.manifest.named.get(name)
        return None if stored is None else tuple(stored.shape)

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same types and shapes."""
        read_tensors(self.reader, tensors)

    def known_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that the parent has."""
        shape = self.shape(name)
        assert shape is not None, name
        return shape

    def blocks(
        self, name: str, rows: Int64[np.ndarray, " K"], *, key: str = WEIGHT
    ) -> Iterator[tuple[Int64[np.ndarray, " C"], Tensor]]:
        """Read some rows of a table, block by block: where in `rows` those of a block stand, and their numbers.

        Args:
            name: of a tensor with one number, or D numbers, a row.
            rows: in any order; one may be there more than once.
            key: of the array, as the optimizer calls it.
        """
        shape = self.known_shape(name)
        row_bytes = 4 * int(np.prod(shape[1:], dtype=np.int64))
        step = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        num_blocks = -(-shape[0] // step)
        # Rows are only brought to their blocks, not sorted: numbers of 16 bits are ordered in one pass.
        blocks = (rows // step).astype(np.min_scalar_type(num_blocks))
        order = np.argsort(blocks, kind="stable")
        ends = np.zeros(num_blocks, dtype=np.int64)
        for first in range(0, len(blocks), step):  # `bincount` copies into numbers of 64 bits
            ends += np.bincount(blocks[first : first + step], minlength=num_blocks)
        ends = np.cumsum(ends)
        del blocks
        for block in range(num_blocks):
            chosen = order[ends[block - 1] if block else 0 : ends[block]]
            if not len(chosen):
                continue
            wanted = rows[chosen]
            first = int(wanted.min())
            count = int(wanted.max()) - first + 1
            storage = MemoryStorage(count, shape[1] if len(shape) == 2 else 1)
            if key != WEIGHT:
                storage.add_state(self.config.model.embedding.optimizer)
            held = StoredRows(storage=storage, first_row=0, num_rows=count, key=key)
            offsets = (first, *(0 for _ in shape[1:]))
            read_tensors(self.reader, {name: TablePart.of(held, offsets=offsets, shape=shape)})
            wanted -= first
            # Rows that go to several places are more than the block has.
            for begin in range(0, len(chosen), step):
                part = slice(begin, begin + step)
                yield chosen[part], storage.gather(torch.from_numpy(wanted[part]), key=key)


def require_run(folder: Path) -> None:
    """Refuse a folder that is no run.

    Raises:
        MissingFileError: it is none.
    """
    run = RunFolder(folder)
    if not run.config.is_file():
        is_export = (run.path / "export.json").is_file()
        raise MissingFileError(
            expected="the folder of a run, with its config.json and checkpoints",
            found="an export, which has neither vocabularies nor optimizers of training" if is_export else "no run",
            where=f"{run.path}, --warm-start",
            ways_out=(
                "name the run that was exported: --warm-start RUN" if is_export else "name another: --warm-start RUN",
                "begin from weights that are drawn: leave --warm-start out",
            ),
        )


def checkpoint_to_take(settings: WarmStartConfig) -> int:
    """Choose the checkpoint of the parent, and verify every file of it.

    Raises:
        MissingFileError: there is no run there, or it has no checkpoint.
        DamagedCheckpointError: the checkpoint, or the newest one, which names the best, is damaged.
    """
    run = RunFolder(Path(settings.run))
    require_run(run.path)
    steps = complete_steps(run.checkpoints)
    if run.products.exists() or not steps:
        packed = run.products.exists()
        raise MissingFileError(
            expected="a run with a checkpoint of weights in FP32",
            found="one whose weights are packed for scoring" if packed else "no checkpoint yet",
            where=f"{run.checkpoints}, --warm-start",
            ways_out=(
                "name the run that it was packed of"
                if packed
                else f"train it: ziggurat train {pasted(run.path)} --resume",
                "begin from weights that are drawn: leave --warm-start out",
            ),
        )
    try:
        wanted = settings.step
        if not wanted:
            newest = CheckpointReader(step_folder(run.checkpoints, steps[-1]), step=steps[-1])
            wanted = Position.from_json(newest.state().get("position")).best_step or steps[-1]
        if wanted not in steps:
            raise DamagedCheckpointError(
                expected=f"one of the steps {steps}",
                found=f"no checkpoint of step {wanted}",
                where=f"{run.checkpoints}, --warm-start",
                ways_out=f"name one of them: --warm-start.step {steps[-1]}",
            )
        reader = CheckpointReader(step_folder(run.checkpoints, wanted), step=wanted)
        reader.verify(reader.manifest.files)
    except DamagedCheckpointError as error:
        if settings.step in (0, *steps):
            left = [step for step in steps if str(step_folder(run.checkpoints, step)) not in error.where]
            named = [f"take another one: --warm-start.step {step}" for step in reversed(left)][:2]
            error.ways_out = (*named, "restore the file from a copy", "leave --warm-start out")
        raise
    return wanted


def open_parent(settings: WarmStartConfig, *, step: int, models: tuple[type[ModelConfig], ...] = ()) -> Parent:
    """Open a run at a checkpoint that was verified.

    Args:
        settings: name the run.
        step: of the checkpoint.
        models: config classes of the user's own.

    Raises:
        CheckpointError: its vocabularies are not those that it was trained with.
    """
    run = RunFolder(Path(settings.run))
    config = load_config(run.path, models=models)
    refuse_other_vocabularies(run)
    inputs = from_json(InputSpec, INPUTS.read(run.inputs), where=str(run.inputs))
    reader = CheckpointReader(step_folder(run.checkpoints, step), step=step)
    reader.trust(reader.manifest.files)
    growing = GrowingBatches(inputs)
    read_tensors(reader, growing.state())
    growing.rebuild()
    frequency = {name: ids.state.frequency.copy() for name, ids in growing.ids.items()}
    preprocessing = load_preprocessing(run.preprocessing)
    return Parent(
        folder=run.path,
        config=config,
        inputs=inputs,
        preprocessing=preprocessing.with_grown(growing.grown(), where=str(run.checkpoints)),
        reader=reader,
        frequency=frequency,
        ancestors=tuple(WARM_START.read(run.warm_start)["ancestors"]) if run.warm_start.exists() else (),
    )


def refuse_other_models(parent: Parent, config: RunConfig) -> None:
    """Refuse a parent whose model is of another kind, or whose table optimizer is, where its numbers are to be taken.

    Raises:
        ConfigError: it is.
    """
    if parent.config.model.kind != config.model.kind:
        raise ConfigError(
            expected=f"a parent with a model of the same kind, {config.model.kind!r}",
            found=f"model {parent.config.model.kind!r}",
            where=f"{parent.folder}, --warm-start",
            ways_out=(
                f"train the model of the parent: ziggurat train table_{parent.config.model.kind}",
                f"name a run of {config.model.kind}: --warm-start RUN",
            ),
        )
    mine = config.model.embedding.optimizer
    theirs = parent.config.model.embedding.optimizer
    if config.warm_start.optimizers and mine is not theirs:
        raise ConfigError(
            expected=f"a parent whose tables learn by {mine}, for --warm-start.optimizers",
            found=str(theirs),
            where=f"{parent.folder}, --warm-start.optimizers",
            ways_out=(
                f"take its rule too: --model.embedding.optimizer {theirs}",
                "let optimizers begin anew: leave --warm-start.optimizers out",
            ),
        )


def refuse_another_parent(parent: Parent, recorded: Ancestor) -> None:
    """Refuse a parent that is not as it was when a run first began from it, where that run begins again.

    Raises:
        CheckpointError: it is another one by now.
    """
    found = parent.ancestor()
    if found["digest"] != recorded["digest"]:
        raise CheckpointError(
            expected=f"the checkpoint that the run began from, step {recorded['step']:,}, {recorded['digest'][:12]}",
            found=f"step {found['step']:,}, {found['digest'][:12]}",
            where=f"{parent.folder}, --warm-start",
            ways_out=(
                "begin again in another folder: --out runs/another_name",
                "restore the checkpoint of the parent from a copy",
            ),
        )
