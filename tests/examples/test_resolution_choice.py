"""A choice of resolutions from outside the package: vectors at what it says, and operations counted."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tests.data.pictures.made import encoded, photo
from tests.models.images.tiny import TinyBackbone
from ziggurat.data.pictures.found import find_pictures
from ziggurat.data.pictures.picture_file import PictureFile
from ziggurat.errors import ConfigError
from ziggurat.models.images import ScaleChoice
from ziggurat.runs.images.embed import EmbedConfig, embed_pictures

extension: Any = importlib.import_module("examples.extensions.resolution_by_bytes")
SMALL = EmbedConfig(batch_size=4, part_pictures=6)
LIMIT = 2_000


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Plain pictures of few bytes, and others of many, by turns."""
    folder = tmp_path / "shop"
    folder.mkdir()
    for number in range(10):
        image = photo(seed=number)
        if number % 2:
            image = image.resize((1, 1)).resize(image.size)  # one colour: 947 bytes instead of 2,800
        (folder / f"{number}.jpg").write_bytes(encoded(image, "JPEG"))
    return folder


def test_each_picture_is_embedded_at_the_resolution_of_its_bytes(shop: Path, tmp_path: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in shop.iterdir()}
    assert sorted(size < LIMIT for size in sizes.values()) == [False] * 5 + [True] * 5
    backbone = TinyBackbone()
    choice = extension.ResolutionByBytes((32, 64), limits=(LIMIT,))
    out = tmp_path / "vectors.parquet"
    done = embed_pictures(find_pictures([shop]), backbone=backbone, out=out, scale=choice, config=SMALL)
    for name, vector, resolution in pl.read_parquet(out).select("picture", "vector", "resolution").iter_rows():
        assert resolution == (32 if sizes[name] < LIMIT else 64)
        pixels = torch.from_numpy(PictureFile(shop / name).pixels(resolution))
        torch.testing.assert_close(torch.tensor(vector), backbone(pixels[None])[0], rtol=1e-5, atol=1e-6)
    # No thumbnail is computed of those that are large.
    assert done.flops == 5 * backbone.flops(32) + 5 * backbone.flops(64)
    assert dict(done.resolutions) == {32: 5, 64: 5}


class _Larger(ScaleChoice):
    """Takes large files at once, and looks at the others: those whose first number is above a half go on."""

    looks = True
    resolutions = (32, 48, 64)
    num_scans = (0, 0, 0)

    def place_of(self, *, num_bytes: int) -> int:
        return 0 if num_bytes < LIMIT else 2

    def choose(self, vectors: torch.Tensor) -> torch.Tensor:
        return (vectors[:, 0] > vectors[:, 0].median()).long()

    def to_json(self) -> dict[str, object]:
        return {}


def test_a_choice_may_look_at_some_pictures_alone(shop: Path, tmp_path: Path) -> None:
    backbone = TinyBackbone()
    out = tmp_path / "vectors.parquet"
    done = embed_pictures(find_pictures([shop]), backbone=backbone, out=out, scale=_Larger(), config=SMALL)
    assert done.resolutions[64] == 5
    looked_at = done.resolutions[32] + done.resolutions[48]
    assert looked_at == 5
    assert done.resolutions[48] > 0
    flops = {each: backbone.flops(each) for each in (32, 48, 64)}
    assert done.flops == 5 * flops[64] + looked_at * flops[32] + done.resolutions[48] * flops[48]
    vectors = np.array(pl.read_parquet(out)["vector"].to_list())
    assert np.isfinite(vectors).all()
    assert (np.abs(vectors).sum(axis=1) > 0).all()


class _OutOfOrder(_Larger):
    """Names its resolutions from the largest down."""

    resolutions = (64, 48, 32)


def test_resolutions_out_of_order_are_refused(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ascending order") as refused:
        embed_pictures(
            find_pictures([shop]), backbone=TinyBackbone(), out=tmp_path / "vectors.parquet", scale=_OutOfOrder()
        )
    assert "_OutOfOrder" in refused.value.where
    with pytest.raises(ConfigError, match="one fewer than resolutions"):
        extension.ResolutionByBytes((32, 64), limits=(1, 2))
