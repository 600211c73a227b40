"""Every public class and function says what it is or does in its first sentence: `help(DLRM)` must tell something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "ziggurat"
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MIN_WORDS = 4


def first_sentence(docstring: str) -> str:
    """Up to the first full stop, or the end of the first paragraph."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    found = re.match(r"(.*?[.!?])(\s|$)", paragraph)
    return found[1] if found else paragraph


def problem_of(docstring: str | None) -> str:
    """What is wrong with the docstring of a class or function; "" if nothing."""
    if docstring is None:
        return "no docstring"
    sentence = first_sentence(docstring)
    if sentence.lower().startswith("see the module"):
        return "points at its module instead of saying something"
    return "" if len(sentence.split()) >= MIN_WORDS else f"says no more than {sentence!r}"


def public(body: list[ast.stmt]) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node


def problems(path: Path) -> Iterator[str]:
    for node in public(ast.parse(path.read_text()).body):
        if problem := problem_of(ast.get_docstring(node)):
            yield f"{path.relative_to(PACKAGE)}:{node.lineno} {node.name}: {problem}"
        for method in public(node.body if isinstance(node, ast.ClassDef) else []):
            docstring = ast.get_docstring(method)
            if docstring and first_sentence(docstring).lower().startswith("see the module"):
                yield f"{path.relative_to(PACKAGE)}:{method.lineno} {node.name}.{method.name}: points at its module"


def test_every_public_class_and_function_has_a_first_sentence() -> None:
    found = [problem for path in sorted(PACKAGE.rglob("*.py")) for problem in problems(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("docstring", [None, "T.", "See the module's docstring. It says more than four words."])
def test_what_says_nothing_is_found(docstring: str | None) -> None:
    assert problem_of(docstring)


def test_a_first_sentence_passes() -> None:
    assert not problem_of("Dot products between all\n    pairs of fields.\n\n    More.")
