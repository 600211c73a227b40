"""FuxiCTR 2.3.10 with its own training loop: Parquet through its Ray loader, dense Adam, gradient clipping.

The DCNv2 of its model zoo (parallel, three full cross layers, MLP 400-400-400; the zoo is not part of the wheel) put
together from FuxiCTR's layers; everything else is FuxiCTR's: `RankDataLoader` (shuffled), `BaseModel.train_epoch` with
`train_step` (zero_grad, loss, backward, clip_grad_norm_ over all parameters, Adam over whole tables).

In its favour: the loader's start-up and first batch of an epoch (5 to 10 s) are not timed, there is no evaluation and
no progress bar. Its loader works ahead in processes of its own, also while others are timed.

Settings: `parquet`: the file to train on.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator

from benchmarks.peers.fuxictr_features import fuxictr_features
from benchmarks.worker import serve
from benchmarks.workload import Workload


class FuxiCTRContestant:
    """FuxiCTR's DCNv2 and its loop, in slices of a few steps."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        warnings.filterwarnings("ignore")
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray
        from fuxictr.pytorch.dataloaders import RankDataLoader
        from fuxictr.pytorch.torch_utils import seed_everything

        seed_everything(workload.seed)
        ray.init(include_dashboard=False, num_cpus=int(settings["threads"]), logging_level=logging.ERROR)
        features = fuxictr_features(workload)
        self.model = _dcn_v2(features, workload)
        self.loader, _ = RankDataLoader(
            features,
            stage="train",
            train_data=str(settings["parquet"]),
            batch_size=workload.batch_size,
            shuffle=True,
            data_format="parquet",
        )
        self.model._eval_steps = 10**9
        self.model._total_steps = 0
        self.model._stop_training = False
        self.model._max_gradient_norm = 10.0
        self._batches = self._endless()
        num_parameters = sum(value.numel() for value in self.model.parameters())
        num_table_parameters = len(workload.lengths) * workload.num_rows * workload.dim
        self.info: dict[str, object] = {
            "dense_optimizer": "Adam, clip_grad_norm_(10) over all parameters",
            "table_optimizer": "Adam on whole tables (dense gradients)",
            "num_table_parameters": num_table_parameters,
            "num_dense_parameters": num_parameters - num_table_parameters,
        }

    def _endless(self) -> Iterator[dict[str, object]]:
        while True:
            yield from self.loader

    def run(self, steps: int) -> float:
        """FuxiCTR's `train_epoch` over the next so many batches."""
        self.model.train_epoch(itertools.islice(self._batches, steps))
        return 0.0


def _dcn_v2(features: object, workload: Workload):
    import torch
    from fuxictr.pytorch.layers import CrossNetV2, FeatureEmbedding, MLP_Block
    from fuxictr.pytorch.models import BaseModel

    class ParallelDCNv2(BaseModel):
        """The model zoo's DCNv2 with `model_structure: parallel`."""

        def __init__(self) -> None:
            folder = tempfile.mkdtemp()
            super().__init__(features, model_id="DCNv2", model_root=folder, metrics=["AUC"], verbose=0)
            width = features.sum_emb_out_dim()
            self.embedding_layer = FeatureEmbedding(features, workload.dim)
            self.crossnet = CrossNetV2(width, 3)
            self.parallel_dnn = MLP_Block(input_dim=width, hidden_units=[400, 400, 400], hidden_activations="ReLU")
            self.fc = torch.nn.Linear(width + 400, 1)
            self.compile("adam", "binary_crossentropy", 1e-3)
            self.reset_parameters()
            self.model_to_device()

        def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            """Predicted probabilities."""
            flat = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
            both = torch.cat([self.crossnet(flat), self.parallel_dnn(flat)], dim=-1)
            return {"y_pred": self.output_activation(self.fc(both))}

    return ParallelDCNv2()


if __name__ == "__main__":
    serve(FuxiCTRContestant)
