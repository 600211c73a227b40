"""Commands that are printed for the reader to paste: each word reaches the program as it is meant.

A path may hold spaces, apostrophes, dollars, braces or a leading tilde, and a shell gives each of them a meaning of its
own. Whoever prints a command puts every value that is not written in our source through `pasted`:

    f"ziggurat train {pasted(folder)} --resume"        ziggurat train 'my runs/first' --resume

A run whose settings name what a module of the user's adds is read by commands that import the module, too: the command
line puts `--extension MODULE` into each command that it prints (`with_extensions`).
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Collection, Sequence

_FLAG = r"--[a-z][\w.-]*"
_SETTING = r"--[a-z][\w-]*\.[\w.-]*\w"
_PLAIN_SETTINGS = ("device",)  # that have no dot in their names
# A word that a shell reads as one: bare, in quotes, or both in a row.
_VALUE = r"""(?:'[^']*'|"[^"]*"|[^\s;,:()?'"]|[;,:](?=\S))+"""
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


def in_python(text: str, *, arguments: Collection[str], settings: str = "") -> str:
    """Return the text of an error that was written for a command line, in the words of a function of Python.

    `--label clicked` becomes `label="clicked"`, and `--data.thousands comma`, of a function that takes settings,
    `settings={"data.thousands": "comma"}`. Whole commands stay as they are.

    Args:
        text: that may name flags.
        arguments: of the function that are called as the flags.
        settings: the argument that takes settings by their dotted names; "" if there is none.
    """
    if re.search(r"(?<![\w./-])(?:ziggurat|torchrun) ", text):
        return text
    text = re.sub(rf"\bleave ({_FLAG}(?: and {_FLAG})*) out\b", lambda found: found[0].replace("--", ""), text)
    if settings:
        name = rf"(?:{_SETTING}|--(?:{'|'.join(_PLAIN_SETTINGS)}))"
        given = rf"{name}[ =]{_VALUE}(?: {name}[ =]{_VALUE})*"
        text = re.sub(given, lambda found: _as_settings(found[0], argument=settings), text)
        text = re.sub(rf"--({_SETTING[2:]})", r"\1", text)
    named = "|".join(arguments)
    text = re.sub(rf"--({named})[ =](?!and --)({_VALUE})", _as_argument, text)
    return re.sub(rf"--({named})\b(?!-)", r"\1", text)


def _as_settings(words: str, *, argument: str) -> str:
    found = re.findall(rf"--([a-z][\w.-]*)[ =]({_VALUE})", words)
    pairs = {name: shlex.split(value)[0] for name, value in found}
    return f"{argument}={json.dumps(pairs, ensure_ascii=False)}"


def _as_argument(found: re.Match[str]) -> str:
    return f"{found[1]}={json.dumps(shlex.split(found[2])[0], ensure_ascii=False)}"
