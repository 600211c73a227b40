"""The training run that the chaos test kills: small, but with everything that has state (dropout, Adam, Adagrad)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from tests.training.tiny import tiny_dataset
from ziggurat.data.encoded.loader import LoaderConfig
from ziggurat.embeddings import EmbeddingConfig, KernelChoice
from ziggurat.embeddings.storage import TablePart
from ziggurat.embeddings.storage.disk import DiskStorage
from ziggurat.embeddings.tables_config import TablesConfig
from ziggurat.models import DLRMConfig, MLPConfig, build_model
from ziggurat.training.checkpoint import CheckpointConfig
from ziggurat.training.checkpoint.rows import earlier
from ziggurat.training.config import EarlyStopConfig, Precision, TrainingConfig
from ziggurat.training.trainer import Trainer

CONFIG = TrainingConfig(
    epochs=3,
    learning_rate=0.01,
    table_learning_rate=0.1,
    precision=Precision.FP32,
    log_every=1,
    checkpoint_every=4,
    threads=1,
    early_stop=EarlyStopConfig(patience=0),
    loader=LoaderConfig(batch_size=64, shuffle_buffer_rows=700),
    checkpoint=CheckpointConfig(keep=2),
)
MODEL = DLRMConfig(
    embedding_dim=8,
    bottom=MLPConfig(hidden_dims=(64,), dropout=0.1),
    top=MLPConfig(hidden_dims=(256, 64), dropout=0.1),
    embedding=EmbeddingConfig(kernel=KernelChoice.TORCH),
)
NUM_ROWS = 64 * 40 + 13


def train(folder: str) -> None:
    """Train to the end, from wherever the folder stands, and write what the run ended with."""
    _train(folder, tables=TablesConfig())


def train_on_disk(folder: str) -> None:
    """The same with tables on a disk, of which so few rows are held that every step writes some back.

    All rows are few and change often: checkpoints share files although rows are overridden three times, and merge some.
    """
    earlier.MAX_OVERRIDDEN, earlier.MAX_GENERATIONS = 3.0, 3
    rows = Path(folder).parent / "rows"
    rows.mkdir(exist_ok=True)
    _train(folder, tables=TablesConfig(disk=str(rows)))
    assert not list(rows.iterdir())


def _train(folder: str, *, tables: TablesConfig) -> None:
    torch.set_num_threads(1)
    data = tiny_dataset(NUM_ROWS)
    model = build_model(MODEL, data.inputs, seed=5, make_storage=tables.make_storage(seed=5))
    for index in range(model.embeddings.tables.num_storages):
        storage = model.embeddings.tables.storage(index)
        if isinstance(storage, DiskStorage):
            storage.num_places = 20
    trainer = Trainer(model, config=CONFIG, train=data, valid=tiny_dataset(300, seed=1), folder=folder)
    result = trainer.fit(resume=True)
    evaluation = trainer.evaluate(trainer.valid)
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        rows = value.rows.read(0, value.rows.num_rows) if isinstance(value, TablePart) else value
        digest.update(name.encode() + rows.numpy().tobytes())
    summary = {"weights": digest.hexdigest(), "metrics": evaluation.metrics, "steps": result.steps}
    (Path(folder) / "summary.json").write_text(json.dumps(summary))


def outcome(folder: Path) -> dict[str, Any]:
    """Final weights, metrics, every logged record without its timing, and the ledger."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    log = [{name: value for name, value in record.items() if name != "timing"} for record in records]
    ledger = hashlib.sha256((folder / "ledger.bin").read_bytes()).hexdigest()
    return json.loads((folder / "summary.json").read_text()) | {"log": log, "ledger": ledger}
