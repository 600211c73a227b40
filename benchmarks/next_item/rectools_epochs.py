"""RecTools' side: `fit` of its HSTUModel or SASRecModel, its own loader and Lightning's loop, in turns. A worker.

Settings: `events`, a file of arrays users, items and times (`contest.py` writes it); `model` "hstu" | "sasrec";
`threads`.
The model has the settings of RecTools' HSTU tutorial. Validation, checkpoints, progress and logs are off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch
from pytorch_lightning import Callback, Trainer
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import HSTUModel, SASRecModel
from rectools.models.nn.item_net import IdEmbeddingsItemNet

from benchmarks.worker import Turns, serve
from benchmarks.workload import Workload

TUTORIAL: dict[str, Any] = {
    "session_max_len": 200,
    "lightning_module_kwargs": {"logits_t": 0.05},
    "item_net_block_types": (IdEmbeddingsItemNet,),
    "loss": "sampled_softmax",
    "n_negatives": 128,
    "use_pos_emb": True,
    "dropout_rate": 0.2,
    "n_factors": 50,
    "n_heads": 1,
    "n_blocks": 2,
    "lr": 0.001,
    "batch_size": 128,
}


class _Held(Callback):
    def __init__(self, turns: Turns) -> None:
        self.turns, self.step = turns, 0

    def __deepcopy__(self, _memo: object) -> _Held:
        return self  # `fit` copies its trainer; pipes cannot be copied

    def on_train_batch_start(self, *_: object) -> None:
        self.turns.next_step(float(self.step))
        self.step += 1


class RecToolsEpochs:
    """Its whole training loop, held before each batch; fetching the batch is inside the turn before."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        del workload
        torch.set_num_threads(int(str(settings["threads"])))
        with np.load(str(settings["events"])) as arrays:
            events = pd.DataFrame(
                {
                    Columns.User: arrays["users"],
                    Columns.Item: arrays["items"],
                    Columns.Datetime: pd.to_datetime(arrays["times"], unit="s"),
                    Columns.Weight: 1.0,
                }
            )
        self.dataset = Dataset.construct(events)
        self.model_class = {"hstu": HSTUModel, "sasrec": SASRecModel}[str(settings["model"])]
        self.info: dict[str, object] = {"library": "RecTools", "torch": torch.__version__}

    def loop(self, turns: Turns) -> None:
        """Train until the harness has seen enough."""

        def trainer() -> Trainer:
            quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
            return Trainer(
                max_epochs=10_000,
                accelerator="cpu",
                enable_checkpointing=False,
                callbacks=[_Held(turns)],
                **quiet,
            )

        relative = {"relative_time_attention": True, "relative_pos_attention": True}
        options = relative if self.model_class is HSTUModel else {}
        self.model_class(**TUTORIAL, **options, get_trainer_func=trainer).fit(self.dataset)


if __name__ == "__main__":
    serve(RecToolsEpochs)
