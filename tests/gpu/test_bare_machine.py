"""A GPU machine often has torch and little else: what trains encoded data there imports none of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = ("polars", "tomlkit", "fbgemm_gpu", "scipy", "faiss", "duckdb", "uvicorn", "starlette")
SCRIPT = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # an import of it raises ImportError
import torch
import ziggurat.parallel.parallelize, ziggurat.runs.doctor
from ziggurat.data.encoded.dataset import EncodedDataset
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.models import MODEL_CONFIGS, DLRMConfig, build_model
from ziggurat.testing.encoded_examples import PLAIN, plain_table, written
from ziggurat.training.config import TrainingConfig
from ziggurat.training.trainer import Trainer
folder = sys.argv[1]
data = written(folder + "/data", plain_table(300), inputs=PLAIN)
config = DLRMConfig(embedding_dim=4, embedding=EmbeddingConfig(kernel=KernelChoice.TORCH))
model = build_model(config, data.inputs, seed=0)
config = TrainingConfig(precision="fp32", max_steps=2)
result = Trainer(model, config=config, train=data, valid=data, folder=folder + "/run").fit()
assert result.steps == 1, result
import tests.gpu.test_training_on_cuda
print("trained")
"""


@pytest.mark.slow
def test_training_needs_torch_pyarrow_and_numpy_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
