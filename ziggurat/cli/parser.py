"""The parser of every verb: argparse, whose complaints are errors in four parts that name an example."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ziggurat.errors import ConfigError, nearest_names
from ziggurat.files.streams import say

_NUMBERS = {"int": "a whole number", "float": "a number"}


def say_given_again(flag: str, values: Sequence[str]) -> None:
    """Say on stderr which of the values of a flag counts, where it was given several and not all are equal.

    Args:
        flag: with its dashes.
        values: what stood after it, in order.
    """
    if len(set(values)) < 2:
        return
    times, every = ("twice", "both") if len(values) == 2 else (f"{len(values)} times", "all")
    last = values[-1]
    text = f"notice: {flag} is given {times}, {', '.join(values[:-1])} and {last}: the last counts, {last}"
    if flag in ("--data.train", "--data.valid", "--data.test"):
        text += f"; {flag} {','.join(values)} takes {every}"
    say(f"{text}\n")


def is_flag(word: str) -> bool:
    """Return whether a word of a command line is the name of a flag or a setting, which no value begins like."""
    return re.match(r"--[A-Za-z]", word) is not None


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Declare `--verbose` for a verb that works at length."""
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="say everything: the start-up report, each evaluation, each phase (a run keeps it in run.log anyway)",
    )


def add_bad_rows(parser: argparse.ArgumentParser) -> None:
    """Declare `--bad-rows` for a verb that reads raw files by a trained run."""
    parser.add_argument(
        "--bad-rows",
        choices=("error", "quarantine"),
        default="error",
        help="stop at a bad row, or put it aside with the reason and count it (default: %(default)s)",
    )


def add_hook(parser: argparse.ArgumentParser) -> None:
    """Declare `--hook` for a verb that trains."""
    parser.add_argument(
        "--hook",
        metavar="NAME",
        action="append",
        default=[],
        help="a training hook that an --extension lists takes part; may be repeated",
    )


class _Store(argparse.Action):
    """Stores values as argparse's "store" does, remembering all values of a flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """Keep a value; the last one counts."""
        setattr(namespace, self.dest, values)
        if option_string and isinstance(parser, VerbParser):
            text = " ".join(map(str, values)) if isinstance(values, list) else str(values)
            parser.given.setdefault(self.option_strings[-1], []).append(text)


class VerbParser(argparse.ArgumentParser):
    """A parser that keeps the lines of its texts, and whose errors are `ConfigError`s."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        # No flag is taken for a longer one that begins like it: --k would become --keep.
        super().__init__(
            *arguments,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **{"allow_abbrev": False} | settings,
        )
        self.set_defaults(parser=self)
        self.given: dict[str, list[str]] = {}
        self._words: tuple[str, ...] = ()
        for name in (None, "store"):
            self.register("action", name, _Store)

    def parse_known_args(self, *arguments: Any, **settings: Any) -> Any:
        """Parse as argparse does, with a notice for each flag that is given again with another value."""
        self.given.clear()
        self._words = tuple(arguments[0]) if arguments and arguments[0] is not None else ()
        parsed = super().parse_known_args(*arguments, **settings)
        for flag, values in self.given.items():
            say_given_again(flag, values)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise the error that argparse complains of, in four parts."""
        raise self._explained(message)

    @property
    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]

    def refuse_shortened(self, words: Sequence[str]) -> None:
        """Refuse a word that is the beginning of a flag: where settings are taken, it would be one of these.

        Raises:
            ConfigError: there is one; names the flag.
        """
        # Short forms of settings are named by whoever reads settings, with the full name beside them.
        flags = [
            flag for action in self._actions if not action.dest.startswith("short_") for flag in action.option_strings
        ]
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and len(name) > 2 and any(flag.startswith(name) for flag in flags):
                raise self.unknown([word])

    def refuse_misspelt(self, words: Sequence[str]) -> None:
        """Refuse a word without a value that is spelt like a flag: a setting would take the next word for its value.

        Args:
            words: those that the verb has no flag for, without settings of several parts.

        Raises:
            ConfigError: there is one; names the flag.
        """
        for place, word in enumerate(words):
            has_value = "=" in word or (place + 1 < len(words) and not is_flag(words[place + 1]))
            if is_flag(word) and not has_value and self._near(word):
                raise self.unknown([word])

    def unknown(self, words: Sequence[str]) -> ConfigError:
        """The error for words that this verb does not take."""
        near = self._near(words[0])
        return self._error(f"arguments of `{self.prog}`", " ".join(words), *(f"did you mean {each}?" for each in near))

    def _near(self, word: str) -> list[str]:
        """Return the flag that a word was meant to be: the one that begins with it, or is spelt like it."""
        name = word.partition("=")[0]
        begun = [flag for flag in self._flags if flag.startswith(name)]
        return begun if len(begun) == 1 else nearest_names(name, self._flags, most=1)

    def _explained(self, message: str) -> ConfigError:
        if found := re.match(r"the following arguments are required: (.*)", message):
            flags = set(self._flags)
            words = [word for word in self._words if word.startswith("--") and "." not in word]
            unknown = [word for word in words if word.partition("=")[0] not in flags]
            near = [f"did you mean {each}? ({word} is no flag)" for word in unknown for each in self._near(word)]
            return self._error(f"{found[1]} after `{self.prog}`", "nothing in that place", *near)
        if found := re.match(r"argument (\S+): invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            choices = [name.strip(" '") for name in found[3].split(",")]
            near = nearest_names(found[2], choices, most=1)
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
