"""No module imports itself through others, imports for type checkers and inside functions counted."""

from functools import cache
from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("ziggurat", cache_dir=None)


@pytest.mark.parametrize("package", ["embeddings", "files", "ops.row_cache", "parallel", "recipes"])
def test_modules_of_a_package_import_in_no_circle(package: str) -> None:
    graph = _graph()
    whole = f"ziggurat.{package}"
    inside = {whole, *graph.find_descendants(whole)}
    imports = {module: graph.find_modules_directly_imported_by(module) & inside for module in inside}
    assert len(inside) > 1
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))
