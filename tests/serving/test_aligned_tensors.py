"""Tensors of a file lie where kernels take them, in the file itself; files of other writers are read as well."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ziggurat.serving.export.aligned_tensors import load_aligned, save_aligned

TENSORS = {
    "codes": torch.arange(-3, 4, dtype=torch.int8),
    "kept": torch.randn(5, 3, dtype=torch.float32).T,
    "half": torch.randn(3).bfloat16(),
    "none": torch.zeros(0, 7),
    "flag": torch.tensor([True, False, True]),
    "one": torch.tensor(9, dtype=torch.int64),
    "planes": torch.arange(11, dtype=torch.int32),
}


def mapped_from(path: Path) -> list[range]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [re.match(r"(\w+)-(\w+)", line) for line in lines if line.endswith(str(path))]
    return [range(int(each[1], 16), int(each[2], 16)) for each in bounds if each]


def test_tensors_are_used_where_the_file_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_aligned(TENSORS, path)
    loaded = load_aligned(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, TENSORS[name])
        assert (tensor.dtype, tensor.shape) == (TENSORS[name].dtype, TENSORS[name].shape)
        if tensor.numel():
            assert tensor.data_ptr() % 64 == 0
            assert any(tensor.data_ptr() in each for each in mapped_from(path)), f"{name} is a copy"
    assert torch.equal(load_file(path)["one"], TENSORS["one"]), "any reader reads it"


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, str(path))
    for name, tensor in load_aligned(path).items():
        assert torch.equal(tensor, TENSORS[name])
        assert tensor.data_ptr() % 64 == 0


def test_one_number_of_any_stride_is_written(tmp_path: Path) -> None:
    one = torch.tensor([7, 8])[:1].expand(1).as_strided((1,), (0,))
    save_aligned(
        {
            "one": one,
            "none": torch.empty(0, dtype=torch.int64).as_strided((0,), (0,)),
            "more": torch.arange(6).reshape(2, 3).T,
        },
        tmp_path / "file",
    )
    found = load_aligned(tmp_path / "file")
    assert found["one"].tolist() == [7]
    assert found["none"].shape == (0,)
    assert found["more"].tolist() == [[0, 3], [1, 4], [2, 5]]
