"""The scans of a JPEG, found while its bytes arrive, so that reading can end behind any of them.

A progressive JPEG holds a picture several times over, each time finer: first the mean of every block of 8 × 8 pixels,
then low frequencies in few bits, then the rest. Whoever needs few pixels needs few scans:

    SOI │ tables │ SOF2: size, bits, components │ SOS scan 1 … │ SOS scan 2 … │ … │ EOI
                                                             └ ends[0]      └ ends[1]

The bytes up to the end of a scan, closed by EOI, are a whole JPEG to every decoder; coefficients that have not come are
zero. Where a scan ends is told by the marker behind it: inside a scan 0xFF is followed by 0x00 or a restart marker.

Reference: ITU-T T.81, annexes B (markers) and G (progression).
"""

from __future__ import annotations

from dataclasses import dataclass

START = b"\xff\xd8"
END = b"\xff\xd9"
_SOS = 0xDA
_EOI = 0xD9
# Start of frame: all of C0 to CF but DHT (C4), JPG (C8) and DAC (CC); C2, C6, CA and CE are progressive.
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_RESTARTS = frozenset(range(0xD0, 0xD8))
# Markers without a length: TEM, restarts, SOI.
_BARE = frozenset((0x01, 0xD8)) | _RESTARTS


@dataclass(frozen=True)
class Scan:
    """The coefficients that a scan refines.

    Args:
        components: places of the colours in the frame, from 1.
        first: coefficient in zigzag order; 0 is the mean of a block.
        last: coefficient, at most 63.
        high: bits that were left out before this scan; 0: it is the first of these coefficients.
        low: bits that are still left out behind it.
    """

    components: tuple[int, ...]
    first: int
    last: int
    high: int
    low: int


@dataclass(frozen=True)
class Frame:
    """The header of a picture.

    Args:
        width: pixels.
        height: pixels.
        bits: of a sample; 8 in nearly all files.
        components: colours; 4 are CMYK.
        is_progressive: it comes in scans that refine each other.
    """

    width: int
    height: int
    bits: int
    components: int
    is_progressive: bool


# What libjpeg and Pillow write for three colours.
USUAL_SCANS = (
    Scan((1, 2, 3), 0, 0, 0, 1),
    Scan((1,), 1, 5, 0, 2),
    Scan((3,), 1, 63, 0, 1),
    Scan((2,), 1, 63, 0, 1),
    Scan((1,), 6, 63, 0, 2),
    Scan((1,), 1, 63, 2, 1),
    Scan((1, 2, 3), 0, 0, 1, 0),
    Scan((3,), 1, 63, 1, 0),
    Scan((2,), 1, 63, 1, 0),
    Scan((1,), 1, 63, 1, 0),
)


class BrokenJpegError(Exception):
    """Bytes that no marker of a JPEG can begin with."""


class JpegScans:
    """Follows the markers of one JPEG; whoever reads it hands over its bytes in blocks.

    Attributes:
        content: all bytes so far.
        frame: its header, once that has come.
        scans: that have begun.
        ends: where each of them ends that is whole.
        is_whole: the end of the picture has come.
    """

    def __init__(self) -> None:
        self.content = bytearray()
        self.frame: Frame | None = None
        self.scans: list[Scan] = []
        self.ends: list[int] = []
        self.is_whole = False
        self._at = len(START)
        self._is_in_scan = False
        self._places: dict[int, int] = {}  # of colours, by the numbers that the file gives them

    def add(self, block: bytes) -> None:
        """Take the next bytes.

        Raises:
            BrokenJpegError: they cannot be of a JPEG.
        """
        self.content += block
        while not self.is_whole and self._advance():
            pass

    def up_to(self, num_scans: int) -> bytes:
        """Return a JPEG of the first scans, all of which have come."""
        return bytes(self.content[: self.ends[num_scans - 1]]) + END

    def _advance(self) -> bool:
        """Go to the next marker; False where its bytes have not come yet."""
        return self._leave_scan() if self._is_in_scan else self._pass_segment()

    def _leave_scan(self) -> bool:
        content = self.content
        while True:
            at = content.find(0xFF, self._at)
            if at < 0:
                self._at = len(content)
                return False
            if at + 1 >= len(content):
                self._at = at
                return False
            following = content[at + 1]
            if following == 0x00 or following in _RESTARTS:
                self._at = at + 2
            elif following == 0xFF:  # fill byte
                self._at = at + 1
            else:
                self._at = at
                self.ends.append(at)
                self._is_in_scan = False
                return True

    def _pass_segment(self) -> bool:
        content = self.content
        at = self._at
        if at + 2 > len(content):
            return False
        if content[at] != 0xFF:
            raise BrokenJpegError(f"byte {at:,} is {content[at]:#04x}, where a marker begins")
        marker = content[at + 1]
        if marker == 0xFF:  # fill byte
            self._at = at + 1
            return True
        if marker == _EOI:
            self.is_whole = True
            return False
        if marker in _BARE:
            self._at = at + 2
            return True
        if at + 4 > len(content):
            return False
        length = int.from_bytes(content[at + 2 : at + 4])
        end = at + 2 + length
        if length < 2:
            raise BrokenJpegError(f"a segment of {length} bytes at byte {at:,}")
        if end > len(content):
            return False
        body = bytes(content[at + 4 : end])
        try:
            if marker in _FRAMES:
                self.frame = _frame_of(body, is_progressive=marker in _PROGRESSIVE)
                self._places = {body[6 + 3 * index]: index + 1 for index in range(self.frame.components)}
            elif marker == _SOS:
                self.scans.append(_scan_of(body, self._places))
                self._is_in_scan = True
        except (IndexError, KeyError):
            raise BrokenJpegError(f"a header that contradicts itself at byte {at:,}") from None
        self._at = end
        return True


def _frame_of(body: bytes, *, is_progressive: bool) -> Frame:
    return Frame(
        width=int.from_bytes(body[3:5]),
        height=int.from_bytes(body[1:3]),
        bits=body[0],
        components=body[5],
        is_progressive=is_progressive,
    )


def _scan_of(body: bytes, places: dict[int, int]) -> Scan:
    num_components = body[0]
    components = tuple(places[body[1 + 2 * index]] for index in range(num_components))
    first, last, bits = (body[1 + 2 * num_components + place] for place in range(3))
    return Scan(components=components, first=first, last=last, high=bits >> 4, low=bits & 15)
