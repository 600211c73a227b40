"""Vectors of pictures: one row each, every refusal in a table, the same bits after a kill, as a feature of a model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch

import ziggurat as zg
from tests.data.pictures.made import animated, encoded, photo, png_header
from tests.models.images.tiny import TinyBackbone
from ziggurat.data.pictures.found import find_pictures
from ziggurat.data.pictures.picture_file import PictureFile
from ziggurat.errors import ConfigError, DataError, FileError
from ziggurat.files import FileLock
from ziggurat.models.images.scale_model import NearScale, ScaleModel
from ziggurat.runs.images import embed as module
from ziggurat.runs.images.embed import EmbedConfig, embed_pictures, refused_beside, written_with

SMALL = EmbedConfig(resolution=48, batch_size=4, part_pictures=6)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    folder = tmp_path / "shop"
    folder.mkdir()
    for number in range(14):
        (folder / f"{number:02}.jpg").write_bytes(encoded(photo(seed=number), "JPEG", progressive=number % 2 == 0))
    (folder / "03 bomb.png").write_bytes(png_header(100_000, 100_000))
    (folder / "05 moves.gif").write_bytes(animated("GIF"))
    (folder / "07 cut.jpg").write_bytes((folder / "07.jpg").read_bytes()[:-300])
    (folder / "notes.txt").write_text("no picture")
    return folder


def test_every_picture_has_its_vector_and_every_refusal_its_reason(shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.parquet"
    backbone = TinyBackbone()
    done = embed_pictures(find_pictures([shop]), backbone=backbone, out=out, config=SMALL)
    table = pl.read_parquet(out)
    assert table["picture"].to_list() == [f"{number:02}.jpg" for number in range(14)]
    for name, vector in table.select("picture", "vector").iter_rows():
        pixels = torch.from_numpy(PictureFile(shop / name).pixels(48))
        torch.testing.assert_close(torch.tensor(vector), backbone(pixels[None])[0], rtol=1e-5, atol=1e-6)
    refused = pl.read_csv(refused_beside(out))
    assert dict(refused.select("picture", "reason").iter_rows()) == {
        "03 bomb.png": "too many pixels",
        "05 moves.gif": "animated",
        "07 cut.jpg": "broken",
        "notes.txt": "no picture",
    }
    assert refused["found"].null_count() == 0
    assert (done.num_pictures, sum(done.refused.values()), dict(done.resolutions)) == (14, 4, {48: 14})
    assert done.bytes_there == sum((shop / f"{number:02}.jpg").stat().st_size for number in range(14))
    assert done.flops == 14 * backbone.flops(48)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["shop", "vectors.parquet", "vectors_refused.csv"]


class KilledError(Exception):
    pass


@pytest.mark.parametrize("when", [0, 1, 2])
def test_killed_it_goes_on_with_the_same_bits(
    when: int, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = find_pictures([shop])
    embed_pictures(pictures, backbone=TinyBackbone(), out=tmp_path / "whole.parquet", config=SMALL)
    out = tmp_path / "vectors.parquet"
    write = module.PartsFolder.write

    def dying(parts: module.PartsFolder, number: int, content: bytes) -> None:
        if number == when:
            raise KilledError
        write(parts, number, content)

    with monkeypatch.context() as patch:
        patch.setattr(module.PartsFolder, "write", dying)
        with pytest.raises(KilledError):
            embed_pictures(pictures, backbone=TinyBackbone(), out=out, config=SMALL)
    assert not out.exists()
    done = embed_pictures(pictures, backbone=TinyBackbone(), out=out, config=SMALL)
    assert done.num_resumed == when * SMALL.part_pictures
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert refused_beside(out).read_bytes() == (tmp_path / "whole_refused.csv").read_bytes()
    assert done.num_pictures == 14


def test_parts_of_other_weights_or_pictures_are_made_anew(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "vectors.parquet"
    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", lambda *_, **__: (_ for _ in ()).throw(KilledError))
        with pytest.raises(KilledError):
            embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=out, config=SMALL)
        with pytest.raises(KilledError):
            embed_pictures(find_pictures([shop]), backbone=TinyBackbone(name="other"), out=out, config=SMALL)
    (shop / "13.jpg").write_bytes(encoded(photo(seed=99), "JPEG"))
    done = embed_pictures(find_pictures([shop]), backbone=TinyBackbone(name="other"), out=out, config=SMALL)
    assert done.num_resumed == 0
    assert done.num_pictures == 14


def test_a_table_among_its_pictures_goes_on_too(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = shop / "vectors.parquet"
    found = [each.name for each in find_pictures([shop])]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_join", lambda *_, **__: (_ for _ in ()).throw(KilledError))
        pictures = find_pictures([shop], without=written_with(out))
        with pytest.raises(KilledError):
            embed_pictures(pictures, backbone=TinyBackbone(), out=out, config=SMALL)
    for num_resumed in (18, 0):
        pictures = find_pictures([shop], without=written_with(out))
        assert [each.name for each in pictures] == found
        assert embed_pictures(pictures, backbone=TinyBackbone(), out=out, config=SMALL).num_resumed == num_resumed


def test_a_name_that_is_no_text_costs_no_other_picture_its_vector(shop: Path, tmp_path: Path) -> None:
    (shop / "00.jpg").rename(os.fsdecode(os.fsencode(shop) + b"/\xe9t\xe9.jpg"))
    out = tmp_path / "vectors.parquet"
    done = embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=out, config=SMALL)
    assert done.num_pictures == 13
    refused = pl.read_csv(refused_beside(out))
    assert (r"\xe9t\xe9.jpg", "unreadable") in refused.select("picture", "reason").rows()


def test_one_process_at_a_time(shop: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vectors.parquet.parts"
    folder.mkdir()
    lock = FileLock(folder / ".lock")
    assert lock.take()
    with pytest.raises(FileError, match="one process at a time"):
        embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=tmp_path / "vectors.parquet")
    lock.release()


def test_nothing_but_refusals_is_an_error_with_its_table(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    out = tmp_path / "vectors.parquet"
    pictures = find_pictures([tmp_path / "notes.txt"])
    with pytest.raises(DataError, match="1 no picture"):
        embed_pictures(pictures, backbone=TinyBackbone(), out=out)
    assert not out.exists()
    assert pl.read_csv(refused_beside(out)).height == 1


def test_a_table_of_refusals_of_earlier_does_not_stay(shop: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors.parquet"
    embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=out, config=SMALL)
    embed_pictures(find_pictures([shop / "00.jpg"]), backbone=TinyBackbone(), out=out, config=SMALL)
    assert refused_beside(out).read_text() == "picture,reason,found\n"


def test_text_is_refused_before_any_work(shop: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vectors\.parquet"):
        embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=tmp_path / "vectors.csv")


def scale_model(backbone: TinyBackbone, thumbnails: torch.Tensor | None = None) -> ScaleModel:
    """Sends half of the pictures on: those on one side of the median along the direction in which they differ most."""
    scale = NearScale(
        resolutions=(32, 64),
        num_scans=(1, 5),
        dim=backbone.dim,
        num_outputs=1,
        thresholds=(0.5,),
        backbone=backbone.config.fingerprint(),
    )
    if thumbnails is not None:
        unit = torch.nn.functional.normalize(thumbnails, dim=1) * backbone.dim**0.5
        direction = torch.linalg.svd(unit - unit.mean(0)).Vh[0]
        with torch.no_grad():
            scale.linear.weight[0] = 10 * direction
            scale.linear.bias[0] = -10 * (unit @ direction).median() - 1e-3
    return scale


def test_a_scale_model_picks_each_pictures_resolution_and_bytes(shop: Path, tmp_path: Path) -> None:
    backbone = TinyBackbone()
    names = [f"{number:02}.jpg" for number in range(14)]
    looks = [backbone(torch.from_numpy(PictureFile(shop / name).pixels(32, num_scans=1))[None]) for name in names]
    scale = scale_model(backbone, torch.cat(looks))
    out = tmp_path / "vectors.parquet"
    done = embed_pictures(find_pictures([shop]), backbone=backbone, out=out, scale=scale, config=SMALL)
    table = pl.read_parquet(out)
    assert set(table["resolution"]) == {32, 64}
    for name, vector, resolution, read in table.iter_rows():
        file = PictureFile(shop / name)
        thumbnail = backbone(torch.from_numpy(file.pixels(32, num_scans=1))[None])
        choice = int(scale.choose(thumbnail))
        assert resolution == (32, 64)[choice]
        wanted = thumbnail if choice == 0 else backbone(torch.from_numpy(file.pixels(64, num_scans=5))[None])
        torch.testing.assert_close(torch.tensor(vector), wanted[0], rtol=1e-5, atol=1e-6)
        assert read == file.bytes_read
    small = done.resolutions[32]
    large = done.resolutions[64]
    assert done.flops == (small + large) * backbone.flops(32) + large * backbone.flops(64)
    assert done.bytes_read - sum(refused_bytes(shop)) == table["bytes_read"].sum() < done.bytes_there


def refused_bytes(shop: Path) -> list[int]:
    """Bytes read of files that the thumbnails refuse: all of them, for none is a progressive JPEG."""
    return [(shop / name).stat().st_size for name in ("03 bomb.png", "05 moves.gif", "07 cut.jpg", "notes.txt")]


def test_a_scale_model_of_another_backbone_is_refused(shop: Path, tmp_path: Path) -> None:
    scale = scale_model(TinyBackbone(name="other"))
    with pytest.raises(ConfigError, match="fitted with: other"):
        embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=tmp_path / "vectors.parquet", scale=scale)


def test_vectors_are_a_feature_of_any_model(shop: Path, tmp_path: Path) -> None:
    """A click depends on the colour of the item's picture alone; ids of items in the test were never trained."""
    backbone = TinyBackbone()
    for number in range(120):
        level = 20 + 200 * (number % 2)
        picture = photo(24, 24, seed=number).point(lambda value, level=level: (value + 3 * level) // 4)
        (shop / f"item{number:03}.png").write_bytes(encoded(picture, "PNG"))
    out = tmp_path / "vectors.parquet"
    embed_pictures(find_pictures([f"{shop}/item*.png"]), backbone=backbone, out=out, config=EmbedConfig(resolution=32))
    draw = np.random.default_rng(0)
    items = draw.integers(0, 120, 3000)
    items[:2000] %= 80
    items[2000:] = 80 + items[2000:] % 40
    log = pl.DataFrame(
        {
            "user": draw.integers(0, 50, 3000),
            "picture": [f"item{item:03}.png" for item in items],
            "click": (items % 2 == 1).astype(int),
            "time": np.arange(3000),
        }
    )
    log.join(pl.read_parquet(out).select("picture", "vector"), on="picture").sort("time").write_parquet(
        tmp_path / "log.parquet"
    )
    schema = zg.Schema(
        features=(zg.Categorical(name="user"), zg.Vector(name="vector", dim=backbone.dim)),
        labels=(zg.Label(name="click"),),
        time="time",
    )
    split = zg.SplitConfig(by=zg.SplitBy.TIME, valid_fraction=0.1, test_fraction=0.2)
    config = zg.RunConfig(
        data=zg.DataConfig(train=(str(tmp_path / "log.parquet"),), split=split),
        table_schema=schema,
        model=zg.DCNv2Config(embedding_dim=8),
        training=zg.TrainingConfig(epochs=8, learning_rate=3e-3, loader=zg.LoaderConfig(batch_size=64)),
    )
    result = zg.train_run(config, folder=tmp_path / "run")
    assert result.evaluations["test"].metrics["auc"] > 0.95


def test_the_lines_of_the_guide_find_the_picture_itself_first(
    shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=tmp_path / "vectors.parquet", config=SMALL)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs/guides/pictures.md").read_text()
    lines = page.split("## Items that look alike")[1].split("```py\n")[1].split("```")[0]
    # A later row than the first, which any order might begin with.
    exec(lines.replace("unit[:1]", "unit[9:10]"), {"pl": pl})
    said = capsys.readouterr().out
    assert next(name for name in said.split(chr(34)) if name.endswith(".jpg")) == "09.jpg"
