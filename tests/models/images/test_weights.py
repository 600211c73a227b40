"""Pretrained weights: tensors alone are read, and come to the names of timm."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ziggurat.errors import DataError, MissingFileError
from ziggurat.models.images.weights import read_weights, with_timm_names

TENSORS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.zeros(2)}


@pytest.mark.parametrize("name", ["plain.pth", "nested.pth", "model.pt", "weights.safetensors"])
def test_tensors_are_read_from_every_form(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        content = {"nested.pth": {"state_dict": TENSORS, "epoch": 3}, "model.pt": {"model": TENSORS}}
        torch.save(content.get(name, TENSORS), path)
    found = read_weights(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[key], value) for key, value in TENSORS.items())


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"weight": Code(marker)}, tmp_path / "bad.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps({"weight": Code(marker)}, protocol=2))
    with pytest.raises(DataError, match=r"calls \w+\.system"):
        read_weights(tmp_path / "bad.pth")
    with pytest.raises(DataError, match="pickle"):
        read_weights(tmp_path / "plain.pth")
    assert not marker.exists()


def test_what_is_no_dict_of_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("weights")
    (tmp_path / "empty.pth").write_bytes(b"")
    (tmp_path / "text.safetensors").write_text("weights")
    torch.save({"a": 1}, tmp_path / "numbers.pth")
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    for name in ("text.pth", "empty.pth", "text.safetensors", "numbers.pth", "list.pth"):
        with pytest.raises(DataError):
            read_weights(tmp_path / name)
    with pytest.raises(MissingFileError):
        read_weights(tmp_path / "absent.pth")


def test_the_first_names_of_efficientnet_lite_become_those_of_timm() -> None:
    names = ["conv_stem.weight", "bn1.weight", "conv_head.weight", "bn2.weight", "classifier.bias"]
    names += [f"blocks.0.0.{part}.weight" for part in ("conv_dw", "bn1", "conv_pw", "bn2")]
    expanding = ("conv_pw", "bn1", "conv_dw", "bn2", "conv_pwl", "bn3")
    names += [f"blocks.{block}.{part}.weight" for block in ("1.0", "1.1", "2.0") for part in expanding]
    given = {
        "_conv_stem.weight": "conv_stem.weight",
        "_bn0.weight": "bn1.weight",
        "_conv_head.weight": "conv_head.weight",
        "_bn1.weight": "bn2.weight",
        "_fc.bias": "classifier.bias",
        "_blocks.0._depthwise_conv.weight": "blocks.0.0.conv_dw.weight",
        "_blocks.0._bn1.weight": "blocks.0.0.bn1.weight",
        "_blocks.0._project_conv.weight": "blocks.0.0.conv_pw.weight",
        "_blocks.0._bn2.weight": "blocks.0.0.bn2.weight",
        "_blocks.2._expand_conv.weight": "blocks.1.1.conv_pw.weight",
        "_blocks.2._bn0.weight": "blocks.1.1.bn1.weight",
        "_blocks.3._depthwise_conv.weight": "blocks.2.0.conv_dw.weight",
        "_blocks.3._project_conv.weight": "blocks.2.0.conv_pwl.weight",
        "_blocks.3._bn2.weight": "blocks.2.0.bn3.weight",
        "conv_stem.weight": "conv_stem.weight",
        "other": "other",
    }
    for name, wanted in given.items():
        assert list(with_timm_names({name: torch.zeros(1)}, names=names)) == [wanted]
