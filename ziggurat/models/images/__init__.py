"""Images: pretrained backbones that turn pictures into vectors, and the scale model that picks their resolution."""

from ziggurat.models.images.backbone import Backbone, BackboneConfig
from ziggurat.models.images.scale_choice import OneResolution, ScaleChoice
from ziggurat.models.images.scale_model import ScaleModel

__all__ = ["Backbone", "BackboneConfig", "OneResolution", "ScaleChoice", "ScaleModel"]
