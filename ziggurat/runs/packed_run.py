"""Runs whose dense products are packed in few bits: what stands in their folder, and what they refuse.

    products.json     the format, the modules that are packed, those that stay FP32 and why, and what it cost
    checkpoints/      one; `products.top.layers.0` (UINT8 bits of the format) in place of `model.top.layers.0.weight`
    config.json       of a version that an earlier Ziggurat refuses; everything else as the run has it

Such a run scores: it is evaluated, predicts, is exported and served. It has no optimizer and is not trained on.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.config import to_json
from ziggurat.errors import CheckpointError, ConfigError, DataError, ZigguratError
from ziggurat.files import remove_left_behind, replacing_folder
from ziggurat.models.packed import packed_format
from ziggurat.numerics import BlockFormat
from ziggurat.parallel.device import Device
from ziggurat.plain import JSON
from ziggurat.precision import Precision
from ziggurat.recipes.run_config import run_config_to_json
from ziggurat.runs.data_paths import located
from ziggurat.runs.many_ranks import Ranks
from ziggurat.runs.watermark import WATERMARK_KEY, stream_watermark
from ziggurat.training.checkpoint import CheckpointConfig, CheckpointStore, SaveMode
from ziggurat.training.growing.growing_tables import GrowingTables
from ziggurat.training.position import Position
from ziggurat.training.records.run_folder import CONFIG, CONFIG_OF_PACKED, PRODUCTS, RunFolder

if TYPE_CHECKING:
    from ziggurat.runs.load import Run

_BITS = "products."


@dataclass(frozen=True, kw_only=True)
class RecordedProducts:
    """The content of products.json that loading needs.

    Args:
        format: of packed weights.
        modules: that have them.
        source: name of the run that was packed.
    """

    format: BlockFormat
    modules: tuple[str, ...]
    source: str


def read_products(run: RunFolder) -> RecordedProducts | None:
    """Return which products of a run are packed; None for a run in FP32.

    Raises:
        DataError: the file is damaged, or gone although the run is packed.
        ConfigError: its format is unknown here.
    """
    if not run.products.exists():
        if run.config.exists() and CONFIG.version_of(run.config) == CONFIG_OF_PACKED:
            raise DataError(
                expected=f"{run.products.name} of a run whose products are packed, as its {run.config.name} says",
                found="no such file",
                where=str(run.products),
                ways_out=(
                    f"restore {run.products.name} from a copy",
                    "pack the run that it was made of again: ziggurat quantise RUN --products mx6 --out FOLDER",
                ),
            )
        return None
    content = PRODUCTS.read(run.products)
    try:
        name = str(content["format_of_weights"])
        modules = tuple(map(str, content["modules"]))
        source = str(content["source"]["run"])
    except (KeyError, TypeError) as problem:
        raise DataError(
            expected="the packed products of a run: format_of_weights, modules, source",
            found=f"other content ({type(problem).__name__}: {problem})",
            where=str(run.products),
            ways_out="pack it again: ziggurat quantise RUN --products mx6 --out FOLDER",
        ) from problem
    return RecordedProducts(format=packed_format(name, where=str(run.products)), modules=modules, source=source)


def refuse_packing(
    run: RunFolder,
    recorded: RecordedProducts | None,
    *,
    precision: Precision | None,
    products: BlockFormat | Mapping[str, BlockFormat] | None,
    ranks: Ranks | None,
    device: Device | None,
) -> None:
    """Refuse what a run in few bits cannot be asked for: another format, several ranks, a GPU.

    Raises:
        ConfigError: names it.
    """
    asked = "few bits" if isinstance(products, Mapping) else products
    where = f"{run.path}, products in {recorded.format if recorded is not None else asked}"
    if recorded is not None and products is not None:
        raise ConfigError(
            expected="a run with FP32 weights",
            found=f"one whose products are in {recorded.format} already: bits that were rounded away do not come back",
            where=where,
            ways_out=f"pack the run that it was made of ({recorded.source}): ziggurat quantise RUN --products FORMAT",
        )
    if precision is not None:
        raise ConfigError(
            expected="no precision: its products are computed by packed weights",
            found=f"precision {precision}",
            where=where,
            ways_out=("leave --precision out", "score the run that it was made of, which has FP32 weights"),
        )
    if ranks is not None and ranks.world_size > 1:
        raise ConfigError(
            expected="one process",
            found=f"{ranks.world_size} ranks",
            where=where,
            ways_out=("leave torchrun out", "score the run that it was made of, which has FP32 weights"),
        )
    if device not in (None, Device.AUTO, Device.CPU):
        raise ConfigError(
            expected="device cpu, whose integers multiply packed weights",
            found=f"device {device}",
            where=where,
            ways_out=("leave the device out", "score the run that it was made of, which has FP32 weights"),
        )


def other_products(run: RunFolder, recorded: RecordedProducts, *, problem: CheckpointError) -> DataError:
    """Return the error for weights that are not packed as products.json says.

    Args:
        run: its folder.
        recorded: what products.json says.
        problem: what the checkpoint lacks.
    """
    return DataError(
        expected=f"weights of {len(recorded.modules)} modules packed in {recorded.format}, as {run.products.name} says",
        found=f"a checkpoint that holds others: {problem.found}",
        where=str(run.products),
        ways_out=(
            f"restore {run.products.name} and checkpoints of one run from a copy",
            f"pack the run again ({recorded.source} by {run.products.name}): "
            f"ziggurat quantise RUN --products {recorded.format} --out FOLDER",
        ),
    )


def with_bits(into: Mapping[str, Tensor], bits: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint with bits in the place of the weights that they are."""
    weights = {f"model.{name}.weight" for name in bits}
    kept = {name: tensor for name, tensor in into.items() if name not in weights}
    return kept | {f"{_BITS}{name}": rows for name, rows in bits.items()}


def refuse_training(run: RunFolder) -> None:
    """Refuse to go on with the training of a run whose weights are packed.

    Raises:
        ConfigError: they are.
    """
    recorded = read_products(run)
    if recorded is None:
        return
    raise ConfigError(
        expected="a run with FP32 weights and an optimizer, to go on with",
        found=f"a run whose products are packed in {recorded.format}, for scoring",
        where=str(run.path),
        ways_out=(
            f"go on with the run that it was made of ({recorded.source}), and pack it again",
            f"train in the precision: ziggurat quantise RUN --products {recorded.format} --epochs 1 --out FOLDER",
        ),
    )


def save_packed(run: Run, out: str | Path, *, report: Mapping[str, Any]) -> RunFolder:
    """Write a run with packed products into a folder of its own.

    Args:
        run: loaded with packed products.
        out: a folder that does not exist yet.
        report: what packing cost, as plain data.

    Raises:
        ConfigError: the folder holds something, or tables of the run are on a disk.
    """
    assert run.packed is not None, "it is packed"
    assert not run.packed.by_module, "products.json holds one format; unlike ones are of exports"
    folder = RunFolder(Path(out))
    refuse_output(run, out)
    remove_left_behind(folder.path)  # of processes that were killed while they wrote this run
    source = RunFolder(run.folder)
    with replacing_folder(folder.path) as temporary:
        made = RunFolder(Path(temporary))
        config = run_config_to_json(located(run.config, folder=run.folder))
        CONFIG.write(made.config, config, version=CONFIG_OF_PACKED)
        # The last names the runs that its weights began from.
        for file in (source.data, source.inputs, source.warm_start):
            if file.exists():
                shutil.copyfile(file, made.path / file.name)
        for each in (source.preprocessing, source.raw):
            if each.exists():
                shutil.copytree(each, made.path / each.name)
        tensors = {f"model.{name}": value for name, value in run.model.state_dict().items()}
        settings = CheckpointConfig(mode=SaveMode.SYNC)
        with CheckpointStore(made.checkpoints, config=settings) as store:
            position = Position(step=run.step, best_step=run.step, finished=True)
            state = {"position": position.to_json()}
            store.save(run.step, tensors=with_bits(tensors, run.packed.bits), state=state, pinned=True)
        PRODUCTS.write(
            made.products,
            {
                "format_of_weights": run.packed.most_common.name,
                "modules": list(run.packed.bits),
                "left": run.packed.left,
                "source": {"run": run.folder.absolute().name, "step": run.step},
                "report": dict(report),
                WATERMARK_KEY: _watermark_to_keep(source, step=run.step),
            },
        )
    return folder


def _watermark_to_keep(source: RunFolder, *, step: int) -> JSON:
    """Return the watermark of a stream, whose windows stay behind; None of another run, or where none is known."""
    if not source.is_stream():
        return None
    with contextlib.suppress(ZigguratError):
        return to_json(stream_watermark(source, step=step))
    return None


def refuse_output(run: Run, out: str | Path) -> None:
    """Refuse a folder that a packed run cannot be written to, before anything is computed.

    Raises:
        ConfigError: the folder holds something, or tables of the run are on a disk.
    """
    folder = Path(out).absolute()  # `--out .` has no name of its own
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            expected="a folder that does not exist yet",
            found="a folder with files" if folder.is_dir() else "a file",
            where=str(Path(out)),
            ways_out=f"--out {pasted(folder.with_name(f'{folder.name}_packed'))}",
        )
    problem = f"tables on a disk: {run.config.tables.disk}" if run.config.tables.disk else ""
    if GrowingTables(run.model).is_any:
        problem = "vocabularies that grow in training"
    if problem:
        raise ConfigError(
            expected="a run whose tables are in memory and have the rows that they began with, for a copy of it",
            found=problem,
            where=str(run.folder),
            ways_out=f"pack an export: ziggurat export {pasted(run.folder)} --products mx6 --out FOLDER",
        )
