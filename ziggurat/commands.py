"""Commands that are printed for the reader to paste: each word reaches the program as it is meant.

A path may hold spaces, apostrophes, dollars, braces or a leading tilde, and a shell gives each of them a meaning of its
own. Whoever prints a command puts every value that is not written in our source through `pasted`:

    f"ziggurat train {pasted(folder)} --resume"        ziggurat train 'my runs/first' --resume

A run whose settings name what a module of the user's adds is read by commands that import the module, too: the command
line puts `--extension MODULE` into each command that it prints (`with_extensions`).
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Sequence

_extensions: list[str] = []
_verbs: list[str] = []


def take_extensions(modules: Sequence[str], *, verbs: Collection[str]) -> None:
    """Say which modules this process was told to import: commands that it prints name them, too.

    Args:
        modules: of `--extension`.
        verbs: what may follow `ziggurat` in a command.
    """
    _extensions[:] = modules
    _verbs[:] = verbs


def with_extensions(text: str) -> str:
    """Return text for people with `--extension MODULE` in each of its commands, where modules were given."""
    if not _extensions:
        return text
    words = "".join(f" --extension {pasted(module)}" for module in _extensions)
    verbs = "|".join(map(re.escape, _verbs))
    return re.sub(rf"(?<![\w./-])ziggurat(?= (?:{verbs})\b)", lambda found: found.group() + words, text)


def pasted(word: object) -> str:
    """Return a word of a command as a POSIX shell reads it back, in quotes only where it needs them."""
    return shlex.quote(str(word))


def python_line(code: str) -> str:
    """Return the line of a shell that runs code by the Python that runs now, whatever `python` is there."""
    return f"{pasted(sys.executable or 'python')} -c {pasted(code)}"
