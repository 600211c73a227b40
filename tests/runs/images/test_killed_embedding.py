"""A process that is killed by SIGKILL while it embeds pictures goes on, again and again, to the same files."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.pictures.made import encoded, photo
from tests.models.images.tiny import TinyBackbone
from ziggurat.data.pictures.found import find_pictures
from ziggurat.runs.images.embed import EmbedConfig, embed_pictures, refused_beside

PROGRAM = """
import sys, time
from tests.models.images.tiny import TinyBackbone
from ziggurat.data.pictures.found import find_pictures
from ziggurat.runs.images.embed import EmbedConfig, embed_pictures

class SlowBackbone(TinyBackbone):
    def forward(self, pixels):
        time.sleep(0.02)
        return super().forward(pixels)

config = EmbedConfig(resolution=48, batch_size=4, part_pictures=8)
print("begins", flush=True)
embed_pictures(find_pictures([sys.argv[1]]), backbone=SlowBackbone(), out=sys.argv[2], config=config)
"""


@pytest.mark.slow
def test_killed_at_any_instant_the_same_command_ends_with_the_same_bytes(tmp_path: Path) -> None:
    shop = tmp_path / "shop"
    shop.mkdir()
    for number in range(150):
        (shop / f"{number:03}.jpg").write_bytes(encoded(photo(60, 60, seed=number), "JPEG"))
    (shop / "notes.txt").write_text("no picture")
    config = EmbedConfig(resolution=48, batch_size=4, part_pictures=8)
    embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=tmp_path / "whole.parquet", config=config)
    out = tmp_path / "vectors.parquet"
    draw = random.Random(7)
    num_killed = 0
    for _ in range(40):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(shop), str(out)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begins\n"
        time.sleep(draw.uniform(0.02, 0.5))
        process.send_signal(signal.SIGKILL)
        num_killed += process.wait() == -signal.SIGKILL
        if out.exists() and not out.with_name("vectors.parquet.parts").exists():
            break
    else:
        embed_pictures(find_pictures([shop]), backbone=TinyBackbone(), out=out, config=config)
    assert num_killed >= 2
    assert out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    assert refused_beside(out).read_bytes() == (tmp_path / "whole_refused.csv").read_bytes()
