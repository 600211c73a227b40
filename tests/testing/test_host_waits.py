"""No new wait of the host for a device in the files that a training step on a GPU goes through.

`tests/training/test_late_steps.py` counts the waits of steps; this reads the source, and says which line brought one.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ziggurat

PACKAGE = Path(ziggurat.__file__).parent
METHODS = {"item", "tolist", "cpu", "numpy", "nonzero", "unique", "unique_consecutive", "masked_select", "bincount"}
METHODS |= {"new_tensor", "synchronize", "argwhere", "equal", "allclose"}
FUNCTIONS = {"int", "float", "bool"}  # of a tensor; of something else where it is known below
HOT = ("training/step/late.py", "training/step/results.py", "training/upload.py", "embeddings/faults.py")
HOT += ("embeddings/tables.py", "embeddings/optimizer.py", "ops/lookup/reference.py", "ops/lookup/gradient.py")
HOT += (
    "ops/lookup/layout.py",
    "features/batches/packed.py",
    "models/contract/losses.py",
    "models/contract/ranking_model.py",
)
HOT += tuple(
    f"models/{name}.py" for name in ("dlrm", "dcn_v2", "deepfm", "dnn", "wukong", "dhen", "autoint", "masknet")
)
HOT += tuple(f"models/{name}.py" for name in ("finalmlp", "finalnet", "xdeepfm", "logistic_regression"))
HOT += ("models/blocks/mlp.py", "models/blocks/cross.py", "models/blocks/dense_inputs.py", "models/blocks/fields.py")

KNOWN: dict[str, set[str]] = {
    "training/step/late.py": {"_bad_weight: bool"},  # of a step that failed
    "training/step/results.py": {
        "read: synchronize",
        "read: tolist",
        "read: bool",
    },  # a step late, of the host's memory
    "embeddings/tables.py": {"pad_lists: int"},  # lists that are not pooled
    "embeddings/optimizer.py": {  # the CPU's step, and checkpoints
        "all_finite: bool",
        "grad_norm_squared: float",
        "scale_grad: float",
        "_step: float",
        "state_dict: torch.tensor",
        "load_state_dict: int",
    },
    "ops/lookup/reference.py": {  # the CPU's step
        "sum_gradients: unique_consecutive",
        "sum_gradients: bool",
        "apply: float",
    },
    "ops/lookup/gradient.py": {"every_sum_is_finite: bool", "every_sum_is_finite: float"},  # the CPU's step
    "ops/lookup/layout.py": {  # numbers that are made once; checks outside of training steps
        "packed: torch.tensor",
        "made: torch.tensor",
        "of: torch.tensor",
        "lists_on: torch.tensor",
        "check_rows: bool",
        "check_rows: int",
        "check_rows: torch.tensor",
        "raise_out_of_bounds: int",
        "raise_out_of_bounds: nonzero",
        "count: int",
        "rows: int",
    },
    "features/batches/packed.py": {"_fits: int"},  # of a batch of the host
    "models/contract/losses.py": {"numbers_of_labels: new_tensor", "numbers_of_labels: float"},  # on the CPU
}


def waits_in(path: Path) -> set[str]:
    """`function: call` of everything in a file that makes the host wait where it is given a tensor of a device."""
    found = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = call.func
            if isinstance(name, ast.Attribute) and name.attr in METHODS:
                found.add(f"{function.name}: {name.attr}")
            elif isinstance(name, ast.Attribute) and ast.unparse(name) == "torch.tensor":
                found.add(f"{function.name}: torch.tensor")
            elif (
                isinstance(name, ast.Name)
                and name.id in FUNCTIONS
                and any(isinstance(each, ast.Call | ast.Subscript | ast.Name | ast.Attribute) for each in call.args)
            ):
                found.add(f"{function.name}: {name.id}")
    return found


@pytest.mark.parametrize("name", HOT)
def test_no_line_of_a_step_waits_for_the_device_but_those_that_are_known(name: str) -> None:
    assert waits_in(PACKAGE / name) == KNOWN.get(name, set())
