"""Checkpoints that are atomic, verified, asynchronous, reshardable, and free of pickles.

    with CheckpointStore(run / "checkpoints") as store:
        store.save(step, tensors={**model.state_dict(), **rng_state()}, state={"epoch": 3})
        …
        checkpoint = store.load(into=tensors)       # the newest that is intact
        checkpoint.skipped                          # newer ones that are damaged, and why

- *atomic*: written aside, on disk, read back, and only then renamed; a kill at any instant loses nothing.
- *verified*: SHA-256 of every file at every load. A flipped bit goes unnoticed by torch.save, by
  torch.distributed.checkpoint and by safetensors alike.
- *asynchronous*: `save` copies and returns; a thread writes; errors surface at the next call.
- *reshardable*: torch.distributed.checkpoint's planners below, so 4 ranks may save and 2 load.
- *free of pickles*: JSON and safetensors, on disk and between ranks.

Why this format: docs/decisions/0003-checkpoint-format.md. The layout on disk: `manifest.py` and `retention.py`.
"""

from ziggurat.config import JSON as JSON
from ziggurat.training.checkpoint.errors import DamagedCheckpointError as DamagedCheckpointError
from ziggurat.training.checkpoint.restore import Match as Match
from ziggurat.training.checkpoint.rng import rng_state as rng_state
from ziggurat.training.checkpoint.rng import set_rng_state as set_rng_state
from ziggurat.training.checkpoint.rows.earlier import SavedRows as SavedRows
from ziggurat.training.checkpoint.storage import CheckpointReader as CheckpointReader
from ziggurat.training.checkpoint.storage import CheckpointWriter as CheckpointWriter
from ziggurat.training.checkpoint.store import Checkpoint as Checkpoint
from ziggurat.training.checkpoint.store import CheckpointConfig as CheckpointConfig
from ziggurat.training.checkpoint.store import CheckpointStore as CheckpointStore
from ziggurat.training.checkpoint.store import SaveMode as SaveMode
