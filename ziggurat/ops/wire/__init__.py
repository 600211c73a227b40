"""Messages of exchanged embeddings in one launch: columns find their places while numbers change their format."""

from ziggurat.ops.wire.places import FieldPlace, WirePlaces
from ziggurat.ops.wire.triton import WireCode, pack, unpack, why_not_places, why_not_triton

__all__ = ["FieldPlace", "WireCode", "WirePlaces", "pack", "unpack", "why_not_places", "why_not_triton"]
