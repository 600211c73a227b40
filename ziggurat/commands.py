"""Commands that are printed for the reader to paste: each word reaches the program as it is meant.

A path may hold spaces, apostrophes, dollars, braces or a leading tilde, and a shell gives each of them a meaning of its
own. Whoever prints a command puts every value that is not written in our source through `pasted`:

    f"ziggurat train {pasted(folder)} --resume"        ziggurat train 'my runs/first' --resume
"""

from __future__ import annotations

import shlex


def pasted(word: object) -> str:
    """Return a word of a command as a POSIX shell reads it back, in quotes only where it needs them."""
    return shlex.quote(str(word))
