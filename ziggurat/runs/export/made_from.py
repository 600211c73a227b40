"""Say in the manifest of an export which run each part comes from, and which versions have made it."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

import ziggurat
from ziggurat.data.preprocess.preprocessing import Preprocessing
from ziggurat.files import digest_of
from ziggurat.recipes.run_config import RunConfig, run_config_to_json
from ziggurat.serving.export.export_folder import Source


def source_of(part: str, *, folder: Path, config: RunConfig, preprocessing: Preprocessing, step: int) -> Source:
    """Return what an export keeps of the run that a part of it comes from.

    Args:
        part: of the export.
        folder: of the run.
        config: of the run.
        preprocessing: as the part has it.
        step: of the weights.
    """
    return Source(
        part=part,
        run=folder.absolute().name,
        model=config.model.kind,
        step=step,
        config=digest_of(run_config_to_json(config))[:16],
        preprocessing=preprocessing.fingerprint,
    )


def versions() -> dict[str, str]:
    """Return the versions that make an export here."""
    return {
        "ziggurat": ziggurat.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
