"""A backbone of a few weights, which needs no timm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ziggurat.models.images import Backbone, BackboneConfig


class TinyConfig(BackboneConfig):
    """Names no file."""

    def fingerprint(self) -> dict[str, str]:
        """Return a name."""
        return {"name": self.name, "weights": "tiny"}


class TinyNetwork(nn.Module):
    """Two convolutions in timm's two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1)

    def forward_features(self, pixels: Tensor) -> Tensor:
        """Return planes."""
        return self.second(self.first(pixels).relu()).relu()

    def forward_head(self, features: Tensor, *, pre_logits: bool) -> Tensor:
        """Return means over places."""
        assert pre_logits
        return features.mean(dim=(2, 3))


class TinyBackbone(Backbone):
    """The same interface, other weights."""

    def __init__(self, *, name: str = "tiny") -> None:
        nn.Module.__init__(self)
        self.config = TinyConfig(name=name, weights="")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.network = TinyNetwork().eval()
        self.mean = nn.Buffer(torch.full((1, 3, 1, 1), 0.5), persistent=False)
        self.std = nn.Buffer(torch.full((1, 3, 1, 1), 0.5), persistent=False)
        self.trained_resolution = 64
        self.fixed_resolution = 0
        self.dim = 16
        self.requires_grad_(False)
