"""CUDA graphs of the dense network: asked for, taken on a GPU alone, and the report says which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.training.test_late_steps import MODEL, settings
from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.models import build_model
from ziggurat.training.config import Compile
from ziggurat.training.report.progress import NoProgress
from ziggurat.training.report.startup import _compile_line
from ziggurat.training.step.compiled import compiled_dense
from ziggurat.training.trainer import Trainer


@pytest.mark.parametrize(
    ("mode", "device", "wanted"),
    [
        (Compile.DEFAULT, "cuda", None),
        (Compile.MAX_AUTOTUNE, "cuda", "max-autotune-no-cudagraphs"),
        (Compile.CUDA_GRAPHS, "cuda", "reduce-overhead"),
        (Compile.CUDA_GRAPHS, "cpu", None),
    ],
)
def test_graphs_are_for_gpus(mode: Compile, device: str, wanted: str | None) -> None:
    begun = mock.Mock()
    with (
        mock.patch("torch.compile", side_effect=lambda forward, **kwargs: forward) as compile_,
        mock.patch("torch.compiler.cudagraph_mark_step_begin", begun),
    ):
        forward = compiled_dense(mock.Mock(return_value="logits"), mode, device=torch.device(device))
        assert forward(mock.Mock()) == "logits"
    assert compile_.call_args.kwargs["mode"] == wanted
    assert begun.called is (wanted == "reduce-overhead")  # else a step would read what the next one has written


def test_the_report_says_whether_graphs_are_taken() -> None:
    step = mock.Mock()
    step.config.compile, step.model.towers, step.device = Compile.CUDA_GRAPHS, None, torch.device("cpu")
    assert _compile_line(step) == "cuda_graphs (without CUDA graphs: the run computes on cpu)"
    step.device = torch.device("cuda", 0)
    assert _compile_line(step) == "cuda_graphs (full batches as CUDA graphs, others eagerly)"
    step.config.compile = Compile.DEFAULT
    assert _compile_line(step) == "default"


SCRIPT = """
import sys
import torch
from tests.training.test_late_steps import MODEL, settings
from tests.training.tiny import tiny_dataset, tiny_inputs
from ziggurat.models import build_model
from ziggurat.training.trainer import Trainer
model = build_model(MODEL, tiny_inputs(), seed=0)
Trainer(model, config=settings(compile="default"), train=tiny_dataset(64), folder=sys.argv[1]).fit()
from torch._dynamo.utils import counters
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


@pytest.mark.slow
def test_a_second_start_takes_the_compiled_network_from_the_cache_folder(tmp_path: Path) -> None:
    own = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    given = {name: value for name, value in os.environ.items() if name not in own}
    given["ZIGGURAT_CACHE"] = str(tmp_path / "cache")
    found = []
    for number in range(2):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / f"run{number}")]
        root = Path(__file__).resolve().parents[2]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=given, check=False)
        assert done.returncode == 0, done.stderr
        found.append(sum(int(line.split()[0]) for line in done.stdout.splitlines()[-2:]))
        misses = sum(int(line.split()[1]) for line in done.stdout.splitlines()[-2:])
        assert bool(misses) is not bool(number), done.stdout
    assert found[0] == 0
    assert found[1] >= 1
    assert any(each.is_file() for each in (tmp_path / "cache" / "inductor").rglob("*"))


class Told(NoProgress):
    """Keeps what is said, and when steps are shown."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def update(self, done: int, *, note: str = "", total: int | None = None) -> None:
        del note, total
        self.lines.append(f"{done} rows")


@pytest.mark.parametrize("mode", [Compile.DEFAULT, Compile.OFF])
def test_a_run_says_before_its_first_step_that_it_compiles(mode: Compile, tmp_path: Path) -> None:
    model = build_model(MODEL, tiny_inputs(), seed=0)
    told = Told()
    with mock.patch("torch.compile", side_effect=lambda forward, **kwargs: forward):
        config = settings(compile=mode)
        Trainer(model, config=config, train=tiny_dataset(64), folder=tmp_path / "run", progress=told).fit()
    said = ["the first step compiles the dense network: 10 to 110 s, 2 to 5 s from the cache"]
    assert told.lines == [*(said if mode is Compile.DEFAULT else []), "32 rows", "64 rows"]
