"""The table of launches; each candidate has the bits of the default by Triton's interpreter, and spills in no loop."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import tune
from benchmarks.gpu.contest import Machine
from tests.ops.lookup.assembly import Assembly, assemble
from tests.ops.triton_runs import run_python
from ziggurat.errors import DataError
from ziggurat.ops.interactions.cross_triton import CROSS_KERNELS
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two
from ziggurat.ops.lookup.triton.kernel import LOOKUP_KERNELS
from ziggurat.ops.lookup.triton.runs import LONG_RUN, UPDATE_KERNELS
from ziggurat.ops.machine import launches
from ziggurat.ops.machine.launches import CANDIDATES, DEFAULT, FamilyLaunches, Launch, LaunchPart, tile_rows
from ziggurat.ops.wire.triton import WIRE_KERNELS

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_compiler = pytest.mark.skipif(
    not HAS_TRITON or is_interpreted(), reason="no package triton, or it is interpreted"
)
ROWS = CANDIDATES[LaunchPart.LOOKUP]
FLAT = CANDIDATES[LaunchPart.MESSAGES]


FACTS = {"gpu": "NVIDIA H200", "date": "2027-01-02", "torch": "2", "triton": "3"}


def test_the_table_of_the_package_says_of_every_family_on_what_it_was_measured() -> None:
    for name, entry in launches.stored_launches().items():
        assert name.startswith("sm_")
        assert set(entry.launches) == set(LaunchPart)
        assert set(FACTS) <= set(entry.measured), name


def test_the_default_is_a_candidate_and_no_candidate_stands_twice() -> None:
    for part, found in CANDIDATES.items():
        assert DEFAULT[part] == found[0]
        assert len(set(found)) == len(found)


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    other = dict(DEFAULT) | {LaunchPart.UPDATE: Launch(numbers=1024, warps=4, reads_ahead=8)}
    table = {
        "sm_80": FamilyLaunches(launches=DEFAULT, measured=FACTS),
        "sm_90": FamilyLaunches(launches=other, measured=FACTS),
    }
    assert launches.read_launches(launches.write_launches(tmp_path / "a.json", table)) == table


@pytest.mark.parametrize("numbers", [4096, 3000, "many"])
def test_a_launch_that_nobody_proved_is_refused_and_named(tmp_path: Path, numbers: Any) -> None:
    path = launches.write_launches(tmp_path / "a.json", {"sm_90": FamilyLaunches(launches=DEFAULT, measured=FACTS)})
    content = json.loads(path.read_text())
    del content["sha256"]
    content["families"]["sm_90"]["lookup"]["numbers"] = numbers
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"sm_90") as error:
        launches.read_launches(path)
    assert str(numbers) in str(error.value)


@pytest.mark.parametrize(
    ("capability", "family"), [((9, 0), "sm_90"), ((8, 6), "sm_80"), ((10, 3), "sm_100"), ((12, 0), "sm_120")]
)
def test_a_family_that_the_table_does_not_have_takes_the_default_under_its_own_name(
    capability: tuple[int, int], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(launches, "stored_launches", dict)
    launches.launches_on.cache_clear()
    device = torch.device("cuda", 0)
    assert launches.family_of(device) == family
    assert launches.launches_on(device) == DEFAULT
    assert launches.launch_line(device).startswith(f"{family}: nobody measured this family")
    launches.launches_on.cache_clear()


def test_a_new_family_leaves_the_launches_of_all_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = dict(DEFAULT) | {LaunchPart.LOOKUP: Launch(numbers=1024, warps=4, reads_ahead=8)}
    found = FamilyLaunches(launches=fast, measured=FACTS)
    monkeypatch.setattr(tune, "tuned", lambda machine: found)
    monkeypatch.setattr(tune, "family_of", lambda device: "sm_120")
    path = launches.write_launches(tmp_path / "a.json", {"sm_90": FamilyLaunches(launches=DEFAULT, measured=FACTS)})
    assert "sm_120" in tune.write_tuned(Machine(device=torch.device("cpu"), quick=True), path)
    table = launches.read_launches(path)
    assert table == {"sm_90": FamilyLaunches(launches=DEFAULT, measured=FACTS), "sm_120": found}
    monkeypatch.setattr(launches, "stored_launches", lambda: table)
    monkeypatch.setattr(launches, "family_of", lambda device: "sm_80")
    line = launches.launch_line(torch.device("cuda", 0))
    assert line.startswith("sm_80: nobody measured this family")
    assert "2,048 numbers, 4 warps, 4 reads ahead" in line
    monkeypatch.setattr(launches, "family_of", lambda device: "sm_120")
    assert "measured on NVIDIA H200, 2027-01-02" in launches.launch_line(torch.device("cuda", 0))


def test_a_tile_has_a_row_at_least_and_256_at_most() -> None:
    assert [tile_rows(dim, numbers=2048) for dim in (1, 8, 100, 4000)] == [256, 256, 16, 1]


@pytest.mark.skipif(not HAS_TRITON, reason="no package triton: the kernels cannot be interpreted")
@pytest.mark.slow
def test_every_candidate_has_the_bits_of_the_default_under_the_interpreter() -> None:
    done = run_python("-m", "tests.ops.machine.launch_cases", "cpu", interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="no CUDA device, or no package triton")
def test_every_candidate_has_the_bits_of_the_default_on_a_gpu() -> None:
    done = run_python("-m", "tests.ops.machine.launch_cases", "cuda", interpreted=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Of `lookup_kernel` (sm_100) and `apply_kernel`: ptxas gives threads as many registers as let one more program run on a
# multiprocessor (80, 72, 56), and for that puts one to three numbers aside while rows or gradients are summed: stored
# once, read once behind the loop. Limits of registers do not change it (`--maxrregcount`, 96 to 255), and which
# launches have it changes with every edit of the kernel and version of ptxas.
PUT_ASIDE_BYTES = 32  # of a thread, stored and read


def is_sound(found: Assembly, *, put_aside_bytes: int = 0) -> bool:
    """Whether nothing spills, no sum is left to the order of threads, and something moves 16 bytes at a time.

    Args:
        found: assembly of a kernel.
        put_aside_bytes: of a thread that may be stored and read once, outside of loops.
    """
    # "LU", last use: what is read in a loop is read again, and is no last use.
    repeated = [name for name in found.accesses if name.split(".")[0] == "LDL" and "LU" not in name.split(".")]
    is_whole = found.spilled_bytes <= put_aside_bytes and not repeated
    return is_whole and found.shared_sums == 0 and found.wide("LDG") > 0


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dim"), [(90, 64), (90, 128), (90, 256), (80, 128), (100, 128)])
@pytest.mark.parametrize("launch", ROWS, ids=str)
def test_lookups_and_updates(launch: Launch, architecture: int, dim: int, tmp_path: Path) -> None:
    sizes = {"dim": dim, "padded_dim": power_of_two(dim, least=1), "align": 16, "unroll": launch.reads_ahead}
    rows, options = tile_rows(dim, numbers=launch.numbers), {"architecture": architecture, "num_warps": launch.warps}
    types: dict[str, str] = dict.fromkeys(("slots", "single", "values", "offsets"), "*i64")
    types |= {"weight": "*fp32", "out": "*bf16", "flag": "*i32", "width": "i32:16"}
    types |= dict.fromkeys(("batch_size", "num_offsets", "num_values", "least_values"), "i32")
    constants: dict[str, Any] = {"samples": rows, "has_lists": True, "row_format": "numbers", "row_bytes": 4 * dim}
    lookup = kernels_of(LOOKUP_KERNELS).lookup_kernel
    found = assemble(lookup, tmp_path, types=types, constants=sizes | constants, **options)
    assert is_sound(found, put_aside_bytes=PUT_ASIDE_BYTES), found
    for rule, rounding in (("adagrad", "none"), ("adam", "stochastic")):
        types = dict.fromkeys(("learning_rate", "scale", "eps", "weight_decay", "rest1", "rest2"), "fp32")
        types |= dict.fromkeys(("rows", "sources", "starts", "num_runs", "first_chunks"), "*i32")
        types |= dict.fromkeys(("first_state", "second_state", "partials", "sums"), "*fp32")
        types |= {"weight": "*fp32" if rounding == "none" else "*i16", "vectors": "*bf16", "applies": "*i1"}
        types |= {"summed_rows": "*i64", "origins": "*i64"} | dict.fromkeys(("num_origins", "most_runs"), "i32")
        types |= {"step_number": "i32"}
        constants = dict.fromkeys(("size_there", "scale_there", "applies_there", "number_there", "is_summed"), False)
        constants |= {"rule": rule, "rounding": rounding, "has_decay": True, "has_long": True, "long_run": LONG_RUN}
        constants |= {"tile": rows}
        update, options["enable_fp_fusion"] = kernels_of(UPDATE_KERNELS).apply_kernel, False
        found = assemble(update, tmp_path, types=types, constants=sizes | constants, **options)
        assert is_sound(found, put_aside_bytes=PUT_ASIDE_BYTES), f"{rule}: {found}"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("architecture", [90, 80, 100])
@pytest.mark.parametrize("launch", FLAT, ids=str)
def test_messages_and_cross_layers(launch: Launch, architecture: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"architecture": architecture, "num_warps": launch.warps}
    types = dict.fromkeys(("crossed", "inputs", "out"), "*fp32") | dict.fromkeys(("factor", "cast"), "*bf16")
    constants: dict[str, Any] = {"has_cast": True, "interpreted": False, "tile": launch.numbers}
    crossed = kernels_of(CROSS_KERNELS).add_crossed_kernel
    assert is_sound(assemble(crossed, tmp_path, types=types | {"count": "i32:16"}, constants=constants, **options))
    types = {"matrix": "*fp32", "fields": "*i64", "scales": "*i16", "matrix_pitch": "i32:16"}
    kernels, options["enable_fp_fusion"] = kernels_of(WIRE_KERNELS), False
    for code, item, width in (("int8", "*i8", 64), ("fp8", "*u8", 128)):
        rows = tile_rows(width, numbers=launch.numbers)
        constants = {"code": code, "align": 16, "rows": rows, "padded": width}
        for kernel in (kernels.pack_kernel, kernels.unpack_kernel):
            found = assemble(kernel, tmp_path, types=types | {"numbers": item}, constants=constants, **options)
            assert found.spilled_bytes == 0
            assert found.shared_sums == 0
            assert found.wide("LDG") + found.wide("STG") > 0
