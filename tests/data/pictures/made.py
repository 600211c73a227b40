"""Pictures that tests make: usable ones in every form, and one for each reason to refuse."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image


def photo(width: int = 120, height: int = 160, *, seed: int = 0) -> Image.Image:
    """A smooth picture with a few edges, which JPEG compresses as it does photographs."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    picture = coarse.resize((width, height), Image.Resampling.BICUBIC)
    picture.paste((200, 30, 60), (width // 4, height // 4, width // 2, height // 2))
    return picture


def encoded(picture: Image.Image, kind: str, **settings: object) -> bytes:
    """The bytes of a picture in a format."""
    content = io.BytesIO()
    picture.save(content, kind, **settings)  # type: ignore[arg-type]
    return content.getvalue()


def png_header(width: int, height: int, *, bits: int = 8) -> bytes:
    """A PNG that says it has so many pixels, and holds none of them."""
    body = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    chunks = [(b"IHDR", body), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    written = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def png_of_16_bits() -> bytes:
    """A PNG in colours with 16 bits a sample, of which Pillow makes 8 without a word."""
    rows = b"".join(b"\0" + bytes(6 * 8) for _ in range(8))
    header = png_header(8, 8, bits=16)
    return header.replace(_chunk(b"IDAT", zlib.compress(b"")), _chunk(b"IDAT", zlib.compress(rows)))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def jpeg_with(at_frame: Callable[[bytearray, int], None]) -> bytes:
    """A JPEG whose frame header was changed: the function gets all bytes and where the header begins."""
    content = bytearray(encoded(photo(), "JPEG"))
    at_frame(content, content.index(b"\xff\xc0"))
    return bytes(content)


def animated(kind: str) -> bytes:
    """Two frames."""
    frames = [photo(16, 16, seed=seed) for seed in (1, 2)]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=100)
