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
METHODS |= {"new_tensor", "synchronize", "argwhere", "equal", "allclose", "histc"}
FUNCTIONS = {"int", "float", "bool"}  # of a tensor; of something else where it is known below
SIZED = {"repeat_interleave"}  # without `output_size` the host asks how long the result is

CLICK_MODELS = ("autoint", "dcn_v2", "deepfm", "dhen", "dlrm", "dnn", "finalmlp", "finalnet", "logistic_regression")
RANKERS = ("bst", "dien", "history", "onetrans", "rankmixer", "transact")
HOT = (
    *(f"models/{name}.py" for name in (*CLICK_MODELS, "masknet", "wukong", "xdeepfm", "din")),
    *(f"models/blocks/{name}.py" for name in ("mlp", "cross", "dense_inputs", "fields")),
    *(f"models/contract/{name}.py" for name in ("losses", "model", "ranking_model")),
    *(f"models/sequence/rankers/{name}.py" for name in RANKERS),
    *(f"models/sequence/{name}.py" for name in ("next_item", "next_item_inputs", "next_item_loss")),
    *(f"models/sequence/{name}.py" for name in ("ranker", "ranker_inputs")),
    *(f"models/sequence/layers/{name}.py" for name in ("hstu", "places", "softmax_block", "stack")),
    *(f"training/step/{name}.py" for name in ("late", "results", "weight_average")),
    "training/upload.py",
    *(f"features/{name}.py" for name in ("batch", "batches/packed", "jagged")),
    *(f"embeddings/{name}.py" for name in ("faults", "optimizer", "repeated", "sorted_ahead", "tables")),
    *(f"embeddings/storage/{name}.py" for name in ("low_precision", "memory", "table_storage")),
    *(f"ops/lookup/{name}.py" for name in ("gradient", "layout", "reference", "sorted_reads")),
    *(f"ops/attention/{name}.py" for name in ("choose", "padded", "problem", "reference", "time_buckets")),
    *(f"ops/row_formats/{name}.py" for name in ("noise", "bf16", "split_bf16", "codes", "int8", "int4")),
    *(f"ops/{name}.py" for name in ("mixed_bits", "pad_lists", "recurrent/jagged_gru", "repeat", "to_device")),
)

# What these files do all the same, with the reason why no step on a GPU waits for it.
CPU = "of a step on the CPU"
HOST = "of the copy of the batch in host memory"
ONCE = "numbers that are made once"
NUMBER = "of a number that the host has"
UNTOLD = "where the host was not told: batches without a copy in its memory"
CHECK = "checks outside of training steps, or of a step that failed"
KNOWN: dict[str, dict[str, str]] = {
    "training/step/late.py": {"_bad_weight: bool": CHECK},
    "training/step/results.py": dict.fromkeys(
        ("read: synchronize", "read: tolist", "read: bool"), "a step late, of the host's memory"
    ),
    "training/step/weight_average.py": {"update: int": CPU},
    "embeddings/optimizer.py": {
        "all_finite: bool": CPU,
        "grad_norm_squared: float": CPU,
        "scale_grad: float": CPU,
        "_step: float": CPU,
        "state_dict: torch.tensor": "checkpoints",
        "load_state_dict: int": "checkpoints",
    },
    "embeddings/storage/table_storage.py": {"lookup: unique": CPU},
    "features/jagged.py": {
        "_of_samples: unique": "batches in parts that repeat, which the host cuts",
        "of: int": UNTOLD,
        "of: bincount": HOST,
        "of: tolist": HOST,
        "rows: int": "sequences that no model of the package reads",
        "rows: tolist": UNTOLD,
        "rows: unique": "batches in parts that repeat, which the host cuts",
        "stacked: tolist": "batches that the host puts together",
        "take: int": "samples that are picked: on the host, and where the host was not told",
    },
    "features/batches/packed.py": {"_fits: int": HOST},
    "models/contract/losses.py": {"numbers_of_labels: new_tensor": CPU, "numbers_of_labels: float": CPU},
    "models/sequence/next_item.py": {
        "has_observed: bool": "before the first step",
        "observe: bincount": "before the first step",
    },
    "models/sequence/next_item_inputs.py": {
        "check_one_history: equal": HOST,
        "check_one_history: int": HOST,
        "check_one_history: nonzero": HOST,
        "question_times: equal": HOST,
        "question_times: int": HOST,
    },
    "models/sequence/ranker.py": {"__init__: bool": NUMBER, "_placed: int": NUMBER},
    "models/sequence/ranker_inputs.py": {
        "longest_question: bincount": HOST,
        "longest_question: int": HOST,
        "questions_of: nonzero": HOST,
    },
    "models/sequence/rankers/dien.py": {"further: int": HOST},
    "models/sequence/rankers/history.py": {
        "__init__: bool": NUMBER,
        "_check: equal": HOST,
        "_check: int": HOST,
        "_check: nonzero": HOST,
    },
    "models/sequence/rankers/onetrans.py": {"further: int": HOST},
    "models/sequence/layers/hstu.py": {"attend: float": NUMBER},
    "models/sequence/layers/places.py": {"asked_times: int": CPU},
    "models/sequence/layers/softmax_block.py": {"attend: float": NUMBER},
    "models/sequence/layers/stack.py": dict.fromkeys(
        (
            *("_check: bool", "_check: int", "_check: tolist", "score: int", "score: repeat_interleave"),
            "score_samples: bincount",
        ),
        "remembered histories, in serving",
    ),
    "ops/lookup/reference.py": {
        "sum_gradients: unique_consecutive": CPU,
        "sum_gradients: bool": CPU,
        "apply: float": CPU,
        "jagged_rows: repeat_interleave": CPU,
        "_flatten: repeat_interleave": CPU,
    },
    "ops/lookup/gradient.py": {"every_sum_is_finite: bool": CPU, "every_sum_is_finite: tolist": CPU},
    "ops/lookup/layout.py": {
        "packed: torch.tensor": ONCE,
        "made: torch.tensor": ONCE,
        "of: torch.tensor": ONCE,
        "lists_on: torch.tensor": ONCE,
        "check_rows: bool": CHECK,
        "check_rows: int": CHECK,
        "check_rows: torch.tensor": CHECK,
        "raise_out_of_bounds: int": CHECK,
        "raise_out_of_bounds: nonzero": CHECK,
        "count: int": CHECK,
        "rows: int": CHECK,
    },
    "ops/attention/choose.py": {"jagged_attention: int": NUMBER},
    "ops/attention/problem.py": dict.fromkeys(
        (
            *("_check_spans: bool", "_check_spans: int", "_check_spans: nonzero", "_checked_offsets: bool"),
            *("_checked_offsets: int", "check_problem: bool", "check_problem: int"),
            *("parts_of: tolist", "visible: torch.tensor"),
        ),
        UNTOLD,
    ),
    "ops/attention/reference.py": {"part_scores: torch.tensor": UNTOLD},
    "ops/attention/time_buckets.py": {"bucket_begins: torch.tensor": ONCE, "bucket_cells: torch.tensor": ONCE},
    "ops/mixed_bits.py": {"mix: int": NUMBER},
    "ops/pad_lists.py": {"pad_lists: int": UNTOLD},
    "ops/recurrent/jagged_gru.py": {
        "jagged_gru_reference: tolist": CHECK,
        "_check_offsets: int": UNTOLD,
        "_check_offsets: bool": UNTOLD,
        "_check_offsets: tolist": UNTOLD,
        "_steps: int": UNTOLD,
        "_steps: tolist": UNTOLD,
    },
    "ops/repeat.py": {"_positions: int": UNTOLD},
    "ops/row_formats/codes.py": {"encode: float": NUMBER},
    "ops/row_formats/noise.py": {"words: cpu": CPU, "words: numpy": CPU},
}


def waits_in(path: Path) -> set[str]:
    """`function: call` of everything in a file that makes the host wait where it is given a tensor of a device."""
    found = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = call.func
            if isinstance(name, ast.Attribute) and name.attr in METHODS | SIZED:
                if name.attr in METHODS or all(given.arg != "output_size" for given in call.keywords):
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
    assert waits_in(PACKAGE / name) == set(KNOWN.get(name, {}))


def test_every_exception_is_of_a_file_that_is_read() -> None:
    assert set(KNOWN) <= set(HOT)
