"""Declarations of Triton's kernels: what its compiler refuses only when a kernel is launched on a GPU."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for path in (ROOT / "ziggurat").rglob("*.py")
    if re.search(r"^@triton\.jit", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", MODULES)
def test_no_constant_is_kept_from_specialisation(name: str) -> None:
    """A parameter that is `tl.constexpr` and named in `do_not_specialize` ends a launch with a CompilationError."""
    module = importlib.import_module(name)
    source = ast.parse(Path(str(module.__file__)).read_text())
    kernels = [node for node in source.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert kernels
    for node in kernels:
        constants = {
            argument.arg
            for argument in node.args.args
            if argument.annotation is not None and ast.unparse(argument.annotation) == "tl.constexpr"
        }
        for decorator in node.decorator_list:
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg in ("do_not_specialize", "do_not_specialize_on_alignment"):
                    kept = set(eval(ast.unparse(keyword.value), vars(module)))  # noqa: S307  # our own source
                    assert not constants & kept, f"{node.name}: {sorted(constants & kept)}"
