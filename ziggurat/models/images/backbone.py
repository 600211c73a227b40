"""A backbone: a pretrained network of timm that turns pictures into vectors.

    (B, R, R, 3) bytes ─► (x / 255 − mean) / std ─► convolutions ─► mean over places ─► (B, D)

Which means and deviations the weights were trained with, timm knows by the network's name. Weights come from a file of
the user's; nothing is fetched. A convolutional network takes any resolution; its cost grows with R².

The network computes in channels-last order: on a CPU a batch at R = 224 of EfficientNet-Lite0 takes three quarters of
the time that it takes in torch's usual order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ziggurat.errors import ConfigError, DataError, MissingDependencyError, nearest_names
from ziggurat.files import sha256_of
from ziggurat.models.images.weights import read_weights, with_timm_names
from ziggurat.typed import checked

_STRIDE = 32  # that most backbones reduce a picture by; smaller pictures have no place left


@dataclass(frozen=True, kw_only=True)
@checked
class BackboneConfig:
    """A network of timm and its weights.

    Args:
        name: as timm calls it: "tf_efficientnet_lite0".
        weights: file of its weights.
    """

    name: str = "tf_efficientnet_lite0"
    weights: str

    def build(self) -> Backbone:
        """Return the network with its weights, ready to compute vectors."""
        return Backbone(self)

    def fingerprint(self) -> dict[str, str]:
        """Return what the vectors depend on: the name, and the digest of the weights."""
        return {"name": self.name, "weights": sha256_of(Path(self.weights))}


class Backbone(nn.Module):
    """Pictures to vectors, by pretrained weights that are not trained here.

    Args:
        config: network and weights.

    Raises:
        MissingDependencyError: timm is not installed.
        ConfigError: timm has no such network.
        MissingFileError: there is no file of weights.
        DataError: the weights are not those of the network.
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.config = config
        timm = _timm()
        if not timm.is_model(config.name):
            near = nearest_names(config.name, timm.list_models())
            raise ConfigError(
                expected="the name of a network that timm has",
                found=repr(config.name),
                where="the backbone",
                ways_out=[*(f"did you mean {each!r}?" for each in near), "see timm.list_models()"],
            )
        network = timm.create_model(config.name, pretrained=False)
        settings: dict[str, Any] = network.pretrained_cfg
        # Networks that were distilled have two last layers.
        last = settings["classifier"]
        self._load(network, heads=(last,) if isinstance(last, str) else tuple(last or ()))
        self.network = network.eval().to(memory_format=torch.channels_last)
        self.mean = nn.Buffer(torch.tensor(settings["mean"]).view(1, 3, 1, 1), persistent=False)
        self.std = nn.Buffer(torch.tensor(settings["std"]).view(1, 3, 1, 1), persistent=False)
        self.trained_resolution: int = settings["input_size"][1]
        self.fixed_resolution: int = self.trained_resolution if settings.get("fixed_input_size") else 0
        # Where a head widens what was averaged (MobileNetV3), `num_features` counts what goes into it.
        self.dim: int = getattr(network, "head_hidden_size", None) or network.num_features
        self.requires_grad_(False)

    @torch.inference_mode()
    def forward(self, pixels: UInt8[Tensor, "B R R 3"]) -> Float[Tensor, "B D"]:
        """Return the vectors of pictures of one resolution."""
        return self.vectors(pixels)

    def vectors(self, pixels: UInt8[Tensor, "B R R 3"]) -> Float[Tensor, "B D"]:
        """Compute what `forward` returns, in whatever mode the caller is: torch.compile does not look behind one."""
        # A view: bytes in the order of a picture are channels-last already.
        planes = pixels.permute(0, 3, 1, 2).float()
        features = self.network.forward_features((planes / 255 - self.mean) / self.std)
        vectors = self.network.forward_head(features, pre_logits=True)
        return vectors.float()

    @functools.lru_cache(maxsize=64)  # noqa: B019 # backbones are few, and live as long as their process
    def flops(self, resolution: int) -> int:
        """Return the floating-point operations of one picture; a multiplication and an addition are two."""
        counter = FlopCounterMode(display=False)
        with counter:
            self(torch.zeros(1, resolution, resolution, 3, dtype=torch.uint8))
        return counter.get_total_flops()

    def check_resolution(self, resolution: int, *, instead: Callable[[int], str] = "--resolution {}".format) -> None:
        """Refuse a resolution that the network cannot take.

        Args:
            resolution: asked for.
            instead: gives the way out, in the words of the command, for a resolution that it can take.

        Raises:
            ConfigError: it takes another one alone, or so small a picture has no place left behind its strides, or it
                fails over it.
        """
        if self.fixed_resolution and resolution != self.fixed_resolution:
            raise ConfigError(
                expected=f"resolution {self.fixed_resolution}, the only one that {self.config.name} takes",
                found=str(resolution),
                where="the resolution",
                ways_out=(instead(self.fixed_resolution), "take a convolutional network, which takes any"),
            )
        if resolution < _STRIDE:
            raise ConfigError(
                expected=f"a resolution of at least {_STRIDE}",
                found=str(resolution),
                where="the resolution",
                ways_out=instead(2 * _STRIDE),
            )
        try:
            self.flops(resolution)
        # What a network raises over a size that it cannot cut into its windows is its own affair.
        except Exception as error:
            raise ConfigError(
                expected=f"a resolution that {self.config.name} takes",
                found=f"{resolution}: {error}"[:300],
                where="the resolution",
                ways_out=f"{instead(self.trained_resolution)}, at which it was trained",
            ) from error

    def _load(self, network: nn.Module, *, heads: Sequence[str]) -> None:
        wanted = network.state_dict()
        given = with_timm_names(read_weights(self.config.weights), names=list(wanted))
        missing = [name for name in wanted if name not in given and not name.endswith("num_batches_tracked")]
        # A network that was trained for other classes has another last layer, which no vector passes through.
        classes = [name for name in wanted if name.startswith(tuple(f"{head}." for head in heads))]
        differing = [name for name in wanted if name in given and given[name].shape != wanted[name].shape]
        unknown = [name for name in given if name not in wanted]
        problems = [name for name in (*missing, *differing) if name not in classes]
        if problems or unknown:
            raise DataError(
                expected=f"the weights of {self.config.name}: {len(wanted)} tensors by the names of timm",
                found="; ".join(
                    f"{len(names)} {what}, the first {names[0]!r}"
                    for what, names in (
                        ("missing", [name for name in missing if name not in classes]),
                        ("of another shape", [name for name in differing if name not in classes]),
                        ("unknown", unknown),
                    )
                    if names
                ),
                where=self.config.weights,
                ways_out=("name the network that they belong to: --backbone NAME", "name its own file: --weights FILE"),
            )
        broken = [name for name, value in given.items() if value.is_floating_point() and not value.isfinite().all()]
        if broken:
            raise DataError(
                expected=f"finite weights of {self.config.name}",
                found=f"NaN or infinity in {len(broken)} tensors, the first {broken[0]!r}",
                where=self.config.weights,
                ways_out="name a file of another run, or of an earlier step: --weights FILE",
            )
        network.load_state_dict({name: value for name, value in given.items() if name not in differing}, strict=False)


def _timm() -> ModuleType:
    """Return timm, with what its import needs of torchvision.

    Raises:
        MissingDependencyError: one of them is not installed.
    """
    try:
        _declare_operators()
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise MissingDependencyError(
            expected="the packages timm and torchvision, which have the backbones",
            found=str(error),
            where="importing timm",
            ways_out=(
                "pip install 'ziggurat-rec[images]'",
                "pip install --no-deps timm torchvision==0.28.0 beside torch 2.13",
            ),
        ) from error
    return timm


def _declare_operators() -> None:
    """Declare the two operators without which torchvision cannot be imported.

    A torchvision that was built for CUDA cannot load its compiled part beside a CPU's torch, as pip installs them; its
    import then ends with "operator torchvision::nms does not exist". No backbone calls either of them.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise ImportError("No module named 'torchvision'")
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)  # dropped, it would take the operators with it


_KEPT: list[torch.library.Library] = []
