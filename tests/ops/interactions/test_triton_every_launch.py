"""Compile dots, Wukong's norm and search for every launch that is timed on a GPU: a compiler fails on single ones."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

from tests.ops.lookup.assembly import compiled
from ziggurat.ops.interactions import fm_norm
from ziggurat.ops.interactions.dot_triton import DOT_KERNELS, DotLaunch, candidates_of
from ziggurat.ops.kernel_choice import is_interpreted, kernels_of, power_of_two
from ziggurat.ops.scan.triton import TRITON_KERNELS as SCAN_KERNELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or is_interpreted(), reason="no package triton, or it is interpreted"
    ),
]

KINDS = {("*bf16", "*bf16"): torch.bfloat16, ("*bf16", "*fp32"): torch.bfloat16, ("*fp32", "*fp32"): torch.float32}


def compile_dots(kinds: tuple[str, str], launch: DotLaunch, *, num_fields: int, dim: int, architecture: int) -> None:
    dtype = KINDS[kinds]
    result = "*bf16" if dtype is torch.bfloat16 else "*fp32"
    types: dict[str, str] = dict.fromkeys(("first_pitch", "second_pitch", "batch_size"), "i32")
    types |= {"row": result, "gradient": result, "first": kinds[0], "second": kinds[1]}
    types |= {"first_gradient": kinds[0], "second_gradient": kinds[1]}
    constants: dict[str, Any] = {
        "num_first": 1,
        "num_fields": num_fields,
        "dim": dim,
        "passed": dim,
        "padding": 1,
        "in_bf16": dtype is torch.bfloat16,
        "interpreted": False,
        "padded_fields": power_of_two(num_fields),
        "padded_passed": power_of_two(dim, least=1),
        "padded_padding": 1,
        "chunk": launch.chunk,
        "samples": launch.samples,
        "stages": launch.stages,
        "precision": launch.precision,
    }
    kernels = kernels_of(DOT_KERNELS)
    for kernel in (kernels.interaction_kernel, kernels.interaction_backward_kernel):
        compiled(
            kernel,
            types=types,
            constants=constants,
            architecture=architecture,
            num_warps=launch.warps,
            num_stages=1,
        )


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize(("num_fields", "dim"), [(4, 10), (27, 16), (27, 128)])
def test_dots(kinds: tuple[str, str], num_fields: int, dim: int) -> None:
    for launch in candidates_of(num_fields, dim, dtype=KINDS[kinds]).values():
        compile_dots(kinds, launch, num_fields=num_fields, dim=dim, architecture=90)


@pytest.mark.parametrize("architecture", [80, 100])
def test_dots_of_other_families(architecture: int) -> None:
    for kinds, dtype in KINDS.items():
        for launch in candidates_of(27, 128, dtype=dtype).values():
            compile_dots(kinds, launch, num_fields=27, dim=128, architecture=architecture)


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("stored", ["*bf16", "*fp16"])
def test_fm_norm(stored: str, architecture: int) -> None:
    for (num_fields, dim, rank), launch in itertools.product(((40, 128, 8), (20, 24, 24)), fm_norm._LAUNCHES.values()):
        types = dict.fromkeys(("fields", "weight", "scale", "shift", "out"), stored)
        constants = {
            "num_fields": num_fields,
            "dim": dim,
            "rank": rank,
            "padded_num_fields": power_of_two(num_fields),
            "padded_dim": power_of_two(dim),
            "padded_rank": power_of_two(rank),
            "samples": launch.samples,
            "stages": launch.stages,
            "interpreted": False,
        }
        compiled(
            kernels_of("ziggurat.ops.interactions.fm_norm_triton").fm_norm_kernel,
            types=types | {"eps": "fp32", "batch_size": "i32"},
            constants=constants,
            architecture=architecture,
            num_warps=launch.warps,
        )


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_search(architecture: int) -> None:
    """Every pass of a search: over centroids, clusters with and without masks, one block or several, candidates."""
    kernels, longs = kernels_of(SCAN_KERNELS), ("rows", "row_starts", "totals", "order", "ends", "chosen", "offsets")
    types: dict[str, str] = dict.fromkeys((*longs, "masks", "mask_rows", "found"), "*i64")
    types |= {"upper": "*u8", "lower": "*u8", "scales": "*fp32", "codes": "*i32", "code_sums": "*i32"}
    types |= {"reach": "*fp32", "lengths": "*fp32", "words": "i32", "num_clusters": "i32"}
    plain: dict[str, Any] = dict.fromkeys(("has_reach", "has_rows", "has_clusters", "has_masks", "has_more"), False)
    plain |= {"plane_bytes": 32, "columns": 16, "steps": 12, "block": 1024, "keep": 512, "by_upper": True}
    plain |= {"is_sorted": False}
    for changes in (
        {"has_reach": True, "keep": 1024},
        {"has_reach": True, "block": 256, "keep": 128, "is_sorted": True},
        {"has_clusters": True, "block": 256, "keep": 256, "is_sorted": True, "steps": 7},
        {"has_clusters": True, "has_masks": True, "has_more": True, "block": 512, "is_sorted": True},
        {"has_clusters": True},
        {"has_clusters": True, "has_masks": True},
        {"has_clusters": True, "has_masks": True, "has_more": True},
        {"has_rows": True, "by_upper": False, "block": 512, "keep": 128},
    ):
        constants = plain | changes
        compiled(
            kernels.best_kernel, types=types, constants=constants, architecture=architecture, enable_fp_fusion=False
        )
    merging = {"lists": "*i64", "totals": "*i64", "merged": "*i64", "most": "i32"}
    for block, keep, others in ((256, 256, 32), (256, 128, 16), (512, 512, 32), (1024, 512, 32), (16, 16, 1)):
        constants = {"block": block, "keep": keep, "steps": keep.bit_length(), "members": 16, "others": others}
        compiled(kernels.merge_kernel, types=merging, constants=constants, architecture=architecture)
    scoring = {"upper": "*u8", "lower": "*u8", "row_scales": "*fp32", "codes": "*i32", "code_sums": "*i32"}
    scoring |= {"scales": "*fp32", "keys": "*i64", "scores": "*fp32", "positions": "*i64", "width": "i32", "k": "i32"}
    for block in (128, 512, 1024):
        constants = {"plane_bytes": 32, "columns": 16, "block": block}
        compiled(
            kernels.exact_kernel, types=scoring, constants=constants, architecture=architecture, enable_fp_fusion=False
        )
    rounding = {"queries": "*fp32", "codes": "*i32", "sums": "*i32", "scales": "*fp32", "lengths": "*fp32"}
    rounding |= {"are_finite": "*i1", "pitch": "i32"}
    for dim in (3, 64, 200):
        constants = {"dim": dim, "width": -(-dim // 16) * 16, "padded": power_of_two(-(-dim // 16) * 16)}
        compiled(kernels.round_kernel, types=rounding, constants=constants, architecture=architecture)
    counting = {"offsets": "*i64", "masks": "*i64", "words": "i32", "passing": "*i64", "num_clusters": "i32"}
    constants = {"members": 32, "block": 8}
    compiled(kernels.passing_kernel, types=counting, constants=constants, architecture=architecture)
    choosing = dict.fromkeys(("keys", "offsets", "passing", "mask_rows", "order", "ends", "chosen", "totals"), "*i64")
    choosing["num_clusters"] = "i32"
    for each, has_passing in itertools.product((False, True), (False, True)):
        counts = dict.fromkeys(("probes", "least"), "*i64" if each else "i32")
        constants = {"each_probes": each, "each_least": each, "has_passing": has_passing, "padded": 4096}
        compiled(
            kernels.choose_kernel,
            types=choosing | counts,
            constants=constants,
            architecture=architecture,
            num_warps=8,
        )
    listing = dict.fromkeys(("keys", "positions", "counts", "starts"), "*i64") | {"width": "i32"}
    compiled(kernels.list_kernel, types=listing, constants={"padded": 512}, architecture=architecture)
    finding = {"keys": "*i64", "scales": "*fp32", "scores": "*fp32", "positions": "*i64", "width": "i32", "k": "i32"}
    compiled(kernels.found_kernel, types=finding, constants={"padded": 128}, architecture=architecture)
