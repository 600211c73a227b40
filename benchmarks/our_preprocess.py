"""Our side of `preprocess.py`: `prepare` on raw Criteo text, as `ziggurat train` calls it. A worker.

Settings: `text`: the TSV; `folder`: where to write; `min_count`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.worker import serve
from benchmarks.workload import Workload
from ziggurat.data.datasets.criteo import criteo_schema
from ziggurat.data.preprocess.data_config import DataConfig
from ziggurat.data.preprocess.prepare import prepare
from ziggurat.data.preprocess.splits import SplitBy, SplitConfig
from ziggurat.data.raw.source import FileFormat


class OurPreprocess:
    """One step is the whole file: fit vocabularies and statistics, validate, encode, write with checksums, open."""

    def __init__(self, workload: Workload, settings: dict[str, object]) -> None:
        self.folder = Path(str(settings["folder"]))
        self.schema = criteo_schema("criteo-kaggle", min_count=int(str(settings["min_count"])))
        self.config = DataConfig(
            train=(str(settings["text"]),), format=FileFormat.CRITEO, split=SplitConfig(by=SplitBy.FILES)
        )
        self.info: dict[str, object] = {"validation": "every cell", "engine": "ziggurat.data.preprocess.prepare"}

    def run(self, steps: int) -> float:
        """Preprocess the file so many times; returns the number of training rows written."""
        num_rows = 0
        for _ in range(steps):
            shutil.rmtree(self.folder, ignore_errors=True)
            num_rows = prepare(self.config, schema=self.schema, folder=self.folder).train.num_rows
        return float(num_rows)


if __name__ == "__main__":
    serve(OurPreprocess)
