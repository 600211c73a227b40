"""Count what makes the package hard to read: `python -m benchmarks.house [FOLDER]`.

    packed          tuple assignments of unrelated values, as a share of all assignments
    questions       docstrings whose first sentence opens with a question word, as a share of all docstrings
    comments        lines that are comments, as a share of all lines
    Any             annotations by `Any`
    type: ignore    comments that silence the type checker
    asserts         `assert isinstance(…)` and `assert … is not None`
    members         files outside of its own folder that name a member of a kind: `RowFormat.INT8`
    told apart      files outside of its folder that ask which kind of feature one is: `isinstance(feature, Dense)`,
                    `feature.kind == "dense"`, a `match` on them
    metrics as text files outside of its folder that write the name of a metric: `"auc"`
    made            files outside of its folder and of data sets that make features of a kind

The numbers are no gate: they show where a reader trips, and which way the package goes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
QUESTION_WORDS = ("What", "Where", "Which", "Who", "Whose", "Whether", "How", "When", "Why")
# A kind, and the files that may name its members: its own.
KINDS = {
    "Placement": "placements/",
    "RowFormat": "ops/row_formats/",
    "TableOptimizerKind": "ops/table_optimizers/",
    "WireFormat": "parallel/exchange/wire_formats/",
    "Precision": "precision/",
    "Metric": "training/metrics/",
    "Task": "features/tasks/",
    "NumericTransform": "features/transforms/",
}
FEATURE_KINDS = ("Dense", "Categorical", "MultiHot", "Sequence", "Vector", "Moments")
FEATURE_NAMES = ("dense", "categorical", "multi_hot", "sequence", "vector", "moments")
FEATURE_HOME = "features/kinds/"
# Data sets are written in features: they say what a column means.
FEATURE_MAKERS = (FEATURE_HOME, "data/datasets/", "data/synthetic/")
METRIC_HOME = "training/metrics/"
# But those that are English words, as "recall" and "calibration" are.
METRIC_NAMES = ("auc", "log_loss", "gauc", "rmse", "mae", "ndcg", "full_recall", "full_ndcg", "full_mrr")


def main(arguments: list[str]) -> int:
    """Print the counts of a folder; of the package unless one is given."""
    folder = Path(arguments[0]) if arguments else ROOT / "ziggurat"
    files = sorted(folder.rglob("*.py"))
    counts = Counter[str]()
    for path in files:
        counts += counted(path.read_text())
    print(f"{len(files)} files, {counts['lines']:,} lines of Python")
    for name, part, whole in (
        ("packed assignments", "packed", "assignments"),
        ("question words", "questions", "docstrings"),
        ("comment lines", "comments", "lines"),
    ):
        print(f"{name:20} {counts[part]:6,} of {counts[whole]:,}  {counts[part] / max(counts[whole], 1):.1%}")
    for name, part in (("Any", "Any"), ("type: ignore", "ignored"), ("asserts for types", "asserts")):
        print(f"{name:20} {counts[part]:6,}")
    for kind, home in KINDS.items():
        named = [path for path in files if home not in str(path) and re.search(rf"\b{kind}\.[A-Z]", path.read_text())]
        print(f"{kind + '.…':20} {len(named):6,} files")
    others = [path.read_text() for path in files if METRIC_HOME not in path.as_posix()]
    print(f"{'metrics as text':20} {sum(map(writes_metrics, others)):6,} files")
    others = [path.read_text() for path in files if FEATURE_HOME not in path.as_posix()]
    print(f"{'features told apart':20} {sum(map(tells_features_apart, others)):6,} files")
    others = [path.read_text() for path in files if not any(home in path.as_posix() for home in FEATURE_MAKERS)]
    print(f"{'features made':20} {sum(map(makes_features, others)):6,} files")
    return 0


def tells_features_apart(source: str) -> bool:
    """Return whether a file asks which kind of feature one is, by its class or by its name."""
    classes = kind_classes(source)
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            asked = node.args[1:]
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        if any(isinstance(each, ast.Name) and each.id in classes for part in asked for each in ast.walk(part)):
            return True
        if isinstance(node, ast.Compare):
            sides = [each for side in (node.left, *node.comparators) for each in ast.walk(side)]
            is_kind = any(isinstance(each, ast.Attribute) and each.attr == "kind" for each in sides)
            if is_kind and any(isinstance(each, ast.Constant) and each.value in FEATURE_NAMES for each in sides):
                return True
    return False


def writes_metrics(source: str) -> bool:
    """Return whether a file writes the name of a metric as text, with or without `@k`."""
    constants = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return any(isinstance(each, str) and each.partition("@")[0] in METRIC_NAMES for each in constants)


def makes_features(source: str) -> bool:
    """Return whether a file makes features of kinds that it names."""
    classes = kind_classes(source)
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return any(isinstance(each, ast.Name) and each.id in classes for each in calls)


def kind_classes(source: str) -> set[str]:
    """Return what a file calls the kinds of feature that it imports."""
    imports = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    of_features = (each for each in imports if (each.module or "").startswith("ziggurat.features"))
    names = (name for each in of_features for name in each.names)
    return {name.asname or name.name for name in names if name.name in FEATURE_KINDS}


def counted(source: str) -> Counter[str]:
    """Count one file."""
    lines = source.splitlines()
    found = Counter(
        lines=len(lines),
        comments=sum(line.lstrip().startswith("#") for line in lines),
        ignored=sum("# type: ignore" in line for line in lines),
    )
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            found["assignments"] += 1
            found["packed"] += isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        elif isinstance(node, ast.AnnAssign):
            found["assignments"] += 1
        elif isinstance(node, ast.Name) and node.id == "Any":
            found["Any"] += 1
        elif isinstance(node, ast.Assert):
            found["asserts"] += is_for_types(node.test)
    for docstring in docstrings(source):
        found["docstrings"] += 1
        found["questions"] += docstring.lstrip().startswith(QUESTION_WORDS)
    return found


def is_for_types(test: ast.expr) -> bool:
    """Return whether an assertion tells the type checker what a reader knows."""
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and any(isinstance(each, ast.IsNot) for each in test.ops)


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
