"""Functions that torch.compile takes for constants, without its import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from ziggurat.cache import compiled_code_line, keep_compiled_code
from ziggurat.errors import MissingDependencyError
from ziggurat.ops.kernel_choice import constant_when_compiled, kernels_of


def test_a_function_is_marked_as_constant_as_torch_marks_it() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert constant_when_compiled(ours) is ours
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}


def test_compiled_code_lies_in_the_cache_folder_unless_it_is_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that the variable is put back afterwards
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/elsewhere"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "cache" / "triton")
    assert compiled_code_line() == f"torch.compile: /elsewhere, Triton: {tmp_path / 'cache' / 'triton'}"


def test_the_temporary_folder_that_torch_names_itself_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")


def test_a_cache_folder_that_cannot_be_made_leaves_compilers_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ZIGGURAT_CACHE", str(tmp_path / "file" / "cache"))
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")
    keep_compiled_code()
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_kernels_that_cannot_be_imported_are_refused_with_the_reason() -> None:
    with pytest.raises(MissingDependencyError, match="no package triton"):
        kernels_of("ziggurat.ops.no_such_kernels")
