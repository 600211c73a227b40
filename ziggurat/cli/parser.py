"""The parser of every verb: argparse, whose complaints are errors in four parts that name an example."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ziggurat.errors import ConfigError

_NUMBERS = {"int": "a whole number", "float": "a number"}


class VerbParser(argparse.ArgumentParser):
    """A parser that keeps the lines of its texts, and whose errors are `ConfigError`s."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)
        self.set_defaults(parser=self)

    def error(self, message: str) -> NoReturn:
        """What argparse complains of, in four parts."""
        raise self._explained(message)

    def unknown(self, words: Sequence[str]) -> ConfigError:
        """The error for words that this verb does not take."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        near = difflib.get_close_matches(words[0].partition("=")[0], flags, n=1)
        return self._error(f"arguments of `{self.prog}`", " ".join(words), *(f"did you mean {each}?" for each in near))

    def _explained(self, message: str) -> ConfigError:
        if found := re.match(r"the following arguments are required: (.*)", message):
            return self._error(f"{found[1]} after `{self.prog}`", "nothing in that place")
        if found := re.match(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            choices = [name.strip(" '") for name in found[3].split(",")]
            near = difflib.get_close_matches(found[2], choices, n=1)
            expected = f"one of {', '.join(choices)}" + ("" if found[1] in ("verb", "action") else f" after {found[1]}")
            return self._error(expected, repr(found[2]), *(f"did you mean {each!r}?" for each in near))
        if found := re.match(r"argument (\S+): invalid (\w+) value: (.*)", message):
            return self._error(f"{_NUMBERS.get(found[2], found[2])} after {found[1]}", found[3])
        if found := re.match(r"argument (\S+): expected (one|at least one|\d+) arguments?", message):
            return self._error(f"a value after {found[1]}", "none")
        if found := re.match(r"argument (\S+): ignored explicit argument (.*)", message):
            return self._error(f"{found[1]} without a value", found[2])
        if found := re.match(r"ambiguous option: (\S+) could match (.*)", message):
            return self._error(f"one of {found[2]}", found[1])
        return self._error(f"arguments of `{self.prog}`", message)

    def _error(self, expected: str, found: str, *ways_out: str) -> ConfigError:
        example = re.search(rf"^ +({re.escape(self.prog)}\b.*?)(  |$)", self.epilog or "", flags=re.MULTILINE)
        ways = [*ways_out, *([f"for example: {example[1]}"] if example else []), f"see `{self.prog} --help`"]
        return ConfigError(expected=expected, found=found, where="command line", ways_out=ways)
