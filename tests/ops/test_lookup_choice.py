"""The choice of a kernel: measured, kept, explained; and the build of the C++ one."""

from __future__ import annotations

import dataclasses
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.lookup_problems import kernel_or_skip, make_layout
from ziggurat.errors import ConfigError, MissingDependencyError
from ziggurat.ops import cpp_build
from ziggurat.ops.lookup import FieldKind, KernelChoice, KernelSetting, TableOptimizerKind, UpdateRule, cpp_library
from ziggurat.ops.lookup.choose import CHOICE, BatchShape, choose_kernel, kernel_diagnosis

LAYOUT = make_layout(
    dim=16, table_rows=[5000, 100, 40], fields=[(FieldKind.SINGLE, 0), (FieldKind.SINGLE, 1), (FieldKind.MEAN, 2)]
)
SETTING = KernelSetting(
    layouts=(LAYOUT,),
    rule=UpdateRule(kind=TableOptimizerKind.ROWWISE_ADAGRAD),
    dtype=torch.float32,
    device=torch.device("cpu"),
)
SHAPE = BatchShape(batch_size=1024, list_length=3.0)


def test_auto_measures_every_exact_kernel_and_takes_the_fastest(tmp_path: Path) -> None:
    chosen = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
    assert "measured just now" in chosen.reason
    assert set(chosen.times_s) | set(chosen.not_eligible) == {"torch", "cpp", "fbgemm"}
    assert chosen.times_s[chosen.kernel.choice.value] == min(chosen.times_s.values())


def test_the_answer_is_kept(tmp_path: Path) -> None:
    choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
    (kept,) = tmp_path.glob("choice-*.json")
    CHOICE.write(kept, CHOICE.read(kept) | {"kernel": "torch"})
    again = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
    assert again.kernel.choice is KernelChoice.TORCH
    assert "measured before" in again.reason
    kept.write_text("{ damaged")
    assert "just now" in choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path).reason


def test_another_shape_or_rule_is_measured_anew(tmp_path: Path) -> None:
    choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
    decayed = dataclasses.replace(SETTING, rule=dataclasses.replace(SETTING.rule, weight_decay=0.1))
    chosen = choose_kernel(KernelChoice.AUTO, setting=decayed, shape=SHAPE, folder=tmp_path)
    assert "just now" in chosen.reason
    assert chosen.not_eligible.keys() >= {"fbgemm"}, "inexact with weight decay, or not installed"


def test_small_batches_are_not_measured(tmp_path: Path) -> None:
    chosen = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=BatchShape(batch_size=4), folder=tmp_path)
    assert not chosen.times_s
    assert not list(tmp_path.glob("choice-*.json"))


def test_a_kernel_that_is_not_exact_is_refused() -> None:
    kernel_or_skip(KernelChoice.FBGEMM)
    decayed = dataclasses.replace(SETTING, rule=dataclasses.replace(SETTING.rule, weight_decay=0.1))
    with pytest.raises(ConfigError, match="ignores weight_decay"):
        choose_kernel(KernelChoice.FBGEMM, setting=decayed, shape=SHAPE)


def test_missing_kernels_are_reported_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setattr(cpp_build.shutil, "which", lambda name: None)
    cpp_library.load_library.cache_clear()
    try:
        chosen = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
        assert chosen.kernel.choice is KernelChoice.TORCH
        assert "g++" in chosen.not_eligible["cpp"]
        assert "fbgemm_gpu" in chosen.not_eligible["fbgemm"]
        assert kernel_diagnosis()["cpp"].startswith("not available")
        with pytest.raises(MissingDependencyError, match="g\\+\\+"):
            choose_kernel(KernelChoice.CPP, setting=SETTING, shape=SHAPE)
    finally:
        cpp_library.load_library.cache_clear()


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'lookup.cpp:1: error: no such luck' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    cpp_library.load_library.cache_clear()
    with pytest.raises(MissingDependencyError, match="no such luck"):
        cpp_library.load_library(tmp_path / "kernels")
    assert not list((tmp_path / "kernels").iterdir()), "nothing half-made is left"


def test_of_two_processes_that_measure_at_once_the_first_decides_for_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel_or_skip(KernelChoice.CPP)
    measured: list[str] = []

    def measure(kernels: list[Any], **_: Any) -> dict[str, float]:
        measured.append("")
        is_mine = len(measured) == 1
        if is_mine:  # another process begins later, and is done before
            choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
        return {each.choice.value: float((each.choice is KernelChoice.TORCH) is is_mine) for each in kernels}

    monkeypatch.setattr("ziggurat.ops.lookup.choose.measure", measure)
    chosen = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
    assert len(measured) == 2
    assert chosen.kernel.choice is KernelChoice.TORCH
    again = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path)
    assert again.kernel.choice is KernelChoice.TORCH
    assert len(measured) == 2


def test_an_unwritable_cache_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel_or_skip(KernelChoice.CPP)
    (tmp_path / "file").write_text("")
    cpp_library.load_library(tmp_path / "file" / "kernels")  # built all the same, for this process
    assert "cannot be kept" in caplog.text
    chosen = choose_kernel(KernelChoice.AUTO, setting=SETTING, shape=SHAPE, folder=tmp_path / "file")
    assert "could not be kept" in chosen.reason
