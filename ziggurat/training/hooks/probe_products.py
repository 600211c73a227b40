"""The hook of LoKA Probe: statistics of every dense product's operands, while a run trains.

    ziggurat train criteo_wukong --hook probe_products      runs/criteo_wukong/probe/step_….json, .safetensors
    zg.fit(frame, label="bought", hooks=[ProbeProducts(every=50)])

Each `every` steps 251 samples of the batch pass through the model once more, on the side (`models/probed.py`), so that
the run has the bits of one without a probe. Statistics are saved with every checkpoint, those of checkpoints that are
gone are removed, and a resumed run goes on with those of its checkpoint. On one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ziggurat.commands import pasted
from ziggurat.errors import ConfigError
from ziggurat.models.probed import ModelProbe
from ziggurat.numerics.probe import ProbeRecord
from ziggurat.numerics.probe.record import probes_of
from ziggurat.training.hooks.hook import Hook

if TYPE_CHECKING:
    from ziggurat.training.ending import FitResult
    from ziggurat.training.judging import MadeStep
    from ziggurat.training.trainer import Trainer


class ProbeProducts(Hook):
    """Keeps statistics of the operands of dense products. See the module's docstring.

    Args:
        every: steps from one look to the next.
    """

    name = "probe_products"

    def __init__(self, *, every: int = 100) -> None:
        if every < 1:
            raise ConfigError(
                expected="every >= 1",
                found=f"every = {every}",
                where="ProbeProducts",
                ways_out="ProbeProducts(every=100)",
            )
        self.every = every
        self._probe: ModelProbe | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin anew, or go on with the statistics of the checkpoint.

        Raises:
            ConfigError: the model lies on several ranks.
        """
        if trainer.team.world_size > 1:
            raise ConfigError(
                expected="one rank, which computes whole products",
                found=f"{trainer.team.world_size} ranks",
                where="the hook probe_products",
                ways_out=(
                    "leave the hook out, and probe the finished run: ziggurat numerics probe RUN --measure",
                    "train on one device",
                ),
            )
        record = None
        if trainer.resume_step is not None:
            path = probes_of(trainer.folder.probe).get(trainer.resume_step)
            if path is None:
                trainer.progress.say(f"the probe begins anew: none was saved at step {trainer.resume_step:,}")
            else:
                record = ProbeRecord.read(path)
        self._probe = ModelProbe(trainer.model, loss=trainer.loss, record=record)

    @property
    def _begun(self) -> ModelProbe:
        if self._probe is None:
            raise self.not_begun()
        return self._probe

    def on_step(self, trainer: Trainer, made: MadeStep) -> None:
        """Look at the batch, if it is due."""
        del trainer
        if made.step % self.every == 0:
            self._begun.take(made.batch)

    def on_end(self, trainer: Trainer, result: FitResult) -> None:
        """Say that nothing was looked at, where a run is too short for its interval."""
        del result
        if not self._begun.record.num_passes:
            run = pasted(trainer.folder.path)
            interval = max(1, trainer.position.step // 10)
            trainer.progress.say(
                f"warning: the hook {self.name} looked at no batch: it looks at every {self.every:,}th step, and there "
                f"were {trainer.position.step:,}. Of the finished run: ziggurat numerics probe {run} --measure; while "
                f"it trains, in Python: hooks=[ProbeProducts(every={interval})]"
            )

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Write the statistics, and remove those of checkpoints that are gone."""
        folder = trainer.folder.probe
        record = self._begun.record
        record.step = trainer.position.step
        written = record.write(folder)
        found = probes_of(folder)
        # The newest two stay: the checkpoint before this one may still be on its way to the disk.
        kept = {*trainer.store.steps(), *sorted(found)[-2:]}
        for step, path in found.items():
            if step not in kept and path != written:
                path.unlink()
                path.with_suffix(".safetensors").unlink(missing_ok=True)


PROBE_PRODUCTS = Hook.add(ProbeProducts())
