"""Tell a Ctrl-C that an import has swallowed from an error of the program.

Python turns Ctrl-C into a KeyboardInterrupt wherever it is. In the seconds in which torch and what it needs are
imported, that may be inside of code that catches every exception and goes on, half imported: the program then ends with
an AttributeError of a module that the user never named. Whoever catches such an error asks here what came before it.
"""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Self

_SOON_S = 10.0


class Interrupts:
    """Remembers when Ctrl-C was pressed, inside of a `with` block on the main thread; it does what it always does."""

    def __init__(self) -> None:
        self._pressed_at = float("-inf")
        self._is_ours = False

    @property
    def was_just_pressed(self) -> bool:
        """True if Ctrl-C came in the last seconds."""
        return time.monotonic() - self._pressed_at < _SOON_S

    def __enter__(self) -> Self:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            try:
                signal.signal(signal.SIGINT, self._note)
            except ValueError:  # another thread than the main one gets no signals
                return self
            self._is_ours = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ours and signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed_at = time.monotonic()
        signal.default_int_handler(number, frame)
