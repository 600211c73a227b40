"""File of a probe: what is known of every product of a model, as it was at one step of a run.

probe/step_000000100.json          model, step, shapes, the digest of the tensors; sealed like every JSON of ours
probe/step_000000100.safetensors   means, covariances, factors of weights
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ziggurat.commands import pasted
from ziggurat.errors import DataError, MissingFileError
from ziggurat.files import Format, read_bytes, sha256_of, write_bytes
from ziggurat.numerics.probe.matrix_normal import MatrixNormal
from ziggurat.numerics.probe.moments import Moments
from ziggurat.numerics.probe.product import Operand, ProductStatistics

_WAYS_OUT = (
    "train with the probe: ziggurat train RECIPE --hook probe_products",
    "measure a finished run anew: ziggurat numerics probe RUN --measure",
)
PROBE = Format(name="ziggurat.probe", what="the statistics of a model's products", ways_out=_WAYS_OUT)
_MAX_BYTES = 4 * 2**30


@dataclass(kw_only=True)
class ProbeRecord:
    """Statistics of the products of one model.

    Args:
        model: its kind.
        step: after which they were taken.
        num_passes: batches that were looked at.
        products: by name, in the order of a forward pass.
        left_out: products of which nothing is kept, and why.
    """

    model: str
    step: int = 0
    num_passes: int = 0
    products: dict[str, ProductStatistics] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(each.numel() * each.element_size() for each in self._tensors().values())

    def write(self, folder: Path) -> Path:
        """Write both files of the present step; returns that of JSON."""
        from safetensors.torch import save

        content = save({name: tensor.contiguous() for name, tensor in self._tensors().items()})
        path = folder / f"step_{self.step:09d}.json"
        write_bytes(path.with_suffix(".safetensors"), content)
        facts = {
            "model": self.model,
            "step": self.step,
            "passes": self.num_passes,
            "left_out": self.left_out,
            "tensors_sha256": sha256_of(content),
            "products": [
                {"name": each.name, "left_shape": each.left_shape, "right_shape": each.right_shape}
                for each in self.products.values()
            ],
        }
        return PROBE.write(path, facts)

    @classmethod
    def read(cls, path: Path) -> ProbeRecord:
        """Read both files, from the path of the JSON.

        Raises:
            MissingFileError: one of them is not there.
            DataError: one is damaged, or they do not belong together.
        """
        from safetensors.torch import load

        facts = PROBE.read(path)
        beside = path.with_suffix(".safetensors")
        content = read_bytes(
            beside, what=PROBE.what, max_bytes=_MAX_BYTES, error=DataError, missing=MissingFileError, ways_out=_WAYS_OUT
        )
        if sha256_of(content) != facts["tensors_sha256"]:
            raise DataError(
                expected=f"tensors with sha256 {facts['tensors_sha256']!r}",
                found=f"sha256 {sha256_of(content)!r}",
                where=str(beside),
                ways_out=_WAYS_OUT,
            )
        tensors = load(content)
        found = cls(
            model=facts["model"], step=facts["step"], num_passes=facts["passes"], left_out=dict(facts["left_out"])
        )
        for index, each in enumerate(facts["products"]):
            product = ProductStatistics(
                name=each["name"],
                left_shape=tuple(each["left_shape"]),
                right_shape=tuple(each["right_shape"]),
                left=_operand(tensors, f"{index}.left"),
                right=_operand(tensors, f"{index}.right"),
            )
            product.gradient = Moments.of(_part(tensors, f"{index}.gradient"))
            found.products[product.name] = product
        return found

    def _tensors(self) -> dict[str, Tensor]:
        found = dict[str, Tensor]()
        for index, product in enumerate(self.products.values()):
            for role, kept in (("left", product.left), ("right", product.right), ("gradient", product.gradient)):
                found |= {f"{index}.{role}.{name}": tensor for name, tensor in kept.tensors().items()}
        return found


def probes_of(folder: Path) -> dict[int, Path]:
    """Return the files of JSON in a folder of probes, by their step, in its order."""
    found = dict[int, Path]()
    for path in sorted(folder.glob("step_*.json")) if folder.is_dir() else ():
        if match := re.fullmatch(r"step_(\d{9})\.json", path.name):
            found[int(match[1])] = path
    return found


def newest_probe(folder: Path) -> ProbeRecord:
    """Read the last probe of a folder.

    Raises:
        MissingFileError: there is none.
        DataError: it is damaged.
    """
    found = probes_of(folder)
    if not found:
        raise MissingFileError(
            expected="the probe of a run: step_….json and step_….safetensors",
            found="none",
            where=str(folder),
            ways_out=(
                "train with the probe: ziggurat train RECIPE --hook probe_products",
                f"measure a finished run anew: ziggurat numerics probe {pasted(folder.parent)} --measure",
            ),
        )
    return ProbeRecord.read(found[max(found)])


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(f"{prefix}."): each for name, each in tensors.items() if name.startswith(f"{prefix}.")}


def _operand(tensors: dict[str, Tensor], prefix: str) -> Operand:
    part = _part(tensors, prefix)
    return MatrixNormal.of(part) if "rows" in part else Moments.of(part)
