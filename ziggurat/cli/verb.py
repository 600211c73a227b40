"""Verb: one word after `ziggurat`, with all that the command line knows of it.

    GREET = Verb(
        name="greet", summary="say hello", epilog="example: ziggurat greet you",
        add_arguments=lambda parser: parser.add_argument("whom"),
        run=lambda options, rest: print(f"hello {options.whom}") or 0,
    )

Verbs of the package stand in the files of this folder, and once in the list of `main.py`. A package of the user's own
adds one by an entry point in the group `ziggurat.verbs` (`extensions.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Takes(StrEnum):
    """Words that a verb takes beside the arguments that it declares; any others are an error that names them."""

    NOTHING = "nothing"
    SETTINGS = "settings"  # --group.name VALUE
    WORDS = "words"  # settings, and what only its own code can read


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One word after `ziggurat`.

    Args:
        name: the word.
        summary: what it does, in one line without a capital letter; help lists it.
        epilog: what else help says; its examples are parsed by a test.
        add_arguments: declares its arguments, without heavy imports: all verbs do so at every start.
        run: does it, from the parsed arguments and what it takes beside them; returns the exit status.
        takes: what it takes beside its arguments.
    """

    name: str
    summary: str
    epilog: str
    add_arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace, list[str]], int]
    takes: Takes = Takes.NOTHING


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments of a verb that takes none."""
