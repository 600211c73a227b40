"""The Makefile's lists of tests are complete: those that need a GPU, Triton, or more than a bare machine has."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OURS = ("ziggurat", "tests", "benchmarks")
BARE = {"torch", "triton", "numpy", "pyarrow", "jaxtyping", "wadler_lindig", "safetensors", "pytest", "hypothesis"}
AT_TOP = re.compile(r"^(?:import ([^\n#]+)|from ([\w.]+) import (\([^)]*\)|[^\n#]+))", re.MULTILINE)


def listed(name: str) -> list[str]:
    """The words of a variable of the Makefile."""
    found = re.search(rf"^{name} := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, name
    return found[1].replace("\\\n", " ").split()


def files_of(words: list[str]) -> set[Path]:
    """Files of tests that these files and folders are, or have."""
    paths = [ROOT / word for word in words]
    assert all(path.exists() for path in paths), words
    return {file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))}


def named(files: set[Path]) -> list[str]:
    return sorted(str(file.relative_to(ROOT)) for file in files)


def files_with(text: str) -> set[Path]:
    """Files of tests that say something."""
    every = set((ROOT / "tests").rglob("test_*.py")) - {Path(__file__).resolve()}
    return {file for file in every if text in file.read_text()}


def test_every_test_that_asks_for_triton_is_among_its_tests() -> None:
    assert named(files_with('find_spec("triton")')) == named(files_of(listed("TRITON_TESTS")))


def test_every_test_that_needs_a_gpu_is_among_its_tests() -> None:
    assert named(files_with("mark.gpu") - files_of(listed("GPU_TESTS"))) == []


def test_every_test_that_needs_a_gpu_stands_where_its_twins_run_with_the_versions_of_gpu_machines() -> None:
    bare = files_of([*listed("BARE_TESTS"), *listed("TRITON_TESTS"), *listed("VIRTUAL_RANKS")])
    assert named(files_with("mark.gpu") - bare) == []


def test_tests_of_a_bare_machine_but_those_left_out_import_what_it_has() -> None:
    more = {file for file in files_of(listed("BARE_TESTS")) if packages_of(file) - BARE - set(OURS)}
    assert named(more) == sorted(listed("BARE_NEEDS_MORE"))


def test_files_that_a_machine_with_a_gpu_collects_import_what_it_has() -> None:
    more = {file for file in files_of(listed("GPU_TESTS")) if packages_of(file) - BARE - set(OURS)}
    assert set(named(more)) <= set(listed("BARE_NEEDS_MORE"))
    assert named(more & files_with("mark.gpu")) == [], "they would not run there"


def test_packages_are_found_through_modules_of_ours() -> None:
    assert {"polars", "pytest"} <= packages_of(Path(__file__).with_name("test_documentation.py"))
    assert "polars" in packages_of(ROOT / "tests" / "training" / "test_early_stop.py")
    assert "polars" not in AT_TOP.findall("    import polars\n")


def packages_of(file: Path) -> set[str]:
    """What is imported when a file is: packages that are not Python's, found through all modules of ours."""
    waiting, seen, found = [file], {file}, set[str]()
    while waiting:
        for name in imported_by(waiting.pop()):
            found.add(name.partition(".")[0])
            new = set(modules_of(name)) - seen
            seen |= new
            waiting += new
    return found - sys.stdlib_module_names


@functools.cache
def imported_by(file: Path) -> frozenset[str]:
    """Names that a file imports when it is imported itself: not in functions, nor for types alone."""
    found = set[str]()
    for plain, origin, names in AT_TOP.findall(file.read_text()):
        found |= {word.split()[0] for word in plain.split(",") if word.strip()}
        if origin:
            found.add(origin)
            if origin.partition(".")[0] in OURS:
                words = re.sub(r"#.*", "", names).strip("()").replace("\n", " ").split(",")
                found |= {f"{origin}.{word.split()[0]}" for word in words if word.strip()}
    return frozenset(found)


@functools.cache
def modules_of(name: str) -> tuple[Path, ...]:
    """Files of ours that an import of a name runs: packages above it, and the module; none for a class or function."""
    return tuple(_modules_of(name)) if name.partition(".")[0] in OURS else ()


def _modules_of(name: str) -> Iterator[Path]:
    place = ROOT
    for part in name.split("."):
        place /= part
        for path in (place / "__init__.py", place.with_suffix(".py")):
            if path.exists():
                yield path
