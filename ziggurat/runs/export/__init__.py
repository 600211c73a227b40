"""From runs to an export: what goes into it (`make.py`), of which data (`data.py`), and its check (`parity.py`)."""

from ziggurat.runs.export.export_config import ExportConfig
from ziggurat.runs.export.make import export_run

__all__ = ["ExportConfig", "export_run"]
