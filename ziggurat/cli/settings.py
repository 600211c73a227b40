"""Settings on the command line: what each means, short forms for the usual ones, and the nearest name for a wrong one.

    --epochs 3                     short for --training.epochs 3
    --training.epochs 3            any setting by its full name, as `--settings` lists them
    --epoch 3, --training.epoch 3  an error that names --epochs or --training.epochs

What a setting means is said once, under `Args:` in the docstring of its dataclass; `--settings` prints it from there,
and a test holds that no setting lacks a description.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ziggurat.cli.parser import is_flag, say_given_again
from ziggurat.cli.tables import print_line, print_table
from ziggurat.config import SHORT_NAMES, nearest_settings, override, settings
from ziggurat.errors import ConfigError, nearest_names
from ziggurat.files.streams import say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")

_SHORT_ABOUT = {
    "epochs": "passes over the training data",
    "lr": "learning rate of the dense network",
    "table-lr": "learning rate of the embedding tables",
    "batch-size": "samples a step, of each rank",
    "dim": "columns of the embedding tables",
    "seed": "of weights, dropout and the order of rows",
    "precision": "auto, fp32, bf16, or products in few bits: mx9, mxfp8, fp8_rowwise, …",
    "threads": "CPU threads; 0: torch's own choice",
    "patience": "evaluations without improvement before it stops; 0: never",
    "self-distil": "learn from the model's own weights of earlier steps too: smc2, smc3, smc4",
}
FLAGS = {
    "distil.head": "--distil",
    "parallel.dense": "--dense",
    "parallel.wire.between-towers": "--wire",
    "parallel.tower-size": "--tower-size",
    "parallel.exchange": "--exchange",
    "parallel.context": "--context",
    "parallel.rank-order": "--rank-order",
}
RENAMED = {"parallel.ranks-a-host": "parallel.ranks-per-host"}
_LISTED = "ziggurat train RECIPE --settings"
_HIDDEN = "table-schema"  # the schema's own file describes it


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of a run.

    Args:
        path: dotted, with dashes.
        kind: its type, or the values that it may have.
        default: its value in the recipe.
        value: its value with what the command line changes.
        about: what it means.
    """

    path: str
    kind: str
    default: str
    value: str
    about: str

    @property
    def group(self) -> str:
        """The path without its last part."""
        return self.path.rpartition(".")[0]


def add_short_forms(parser: argparse.ArgumentParser, *, leave_out: Sequence[str] = ()) -> None:
    """`--epochs`, `--lr` … as flags of a verb, each short for full names."""
    group = parser.add_argument_group("settings that everybody changes; `--settings` lists all")
    for name, paths in SHORT_NAMES.items():
        if name not in leave_out:
            about = _SHORT_ABOUT[name]
            group.add_argument(f"--{name}", metavar="X", dest=_dest(name), help=f"{about}; short for --{paths[0]}")


def settings_from(options: argparse.Namespace, rest: Sequence[str]) -> dict[str, str]:
    """Short forms, and `--a.b VALUE` or `--a.b=VALUE`, as dotted path to text.

    Raises:
        ConfigError: a word that is no flag, or a flag without a value.
    """
    given = {}
    by_full_name = settings_given(rest)
    dashed = {path.replace("_", "-"): value for path, value in by_full_name.items()}
    for name, paths in SHORT_NAMES.items():
        text = getattr(options, _dest(name), None)
        given |= dict.fromkeys(paths, text) if text is not None else {}
        full = dashed.get(paths[0])
        if text is not None and full is not None and text != full:
            say(f"notice: --{name} {text} and --{paths[0]} {full}: the full name counts, {full}\n")
    return given | by_full_name


def settings_given(rest: Sequence[str]) -> dict[str, str]:
    """`--a.b VALUE` and `--a.b=VALUE` to a dictionary; of one that is given again the last counts, with a notice."""
    changes: dict[str, list[str]] = {}  # by the name with dashes: all values
    written: dict[str, str] = {}
    position = 0
    while position < len(rest):
        name, equals, value = rest[position].partition("=")
        if not name.startswith("--") or len(name) < 3:
            raise _stray(rest[position])
        if not equals:
            position += 1
            if position >= len(rest) or is_flag(rest[position]):
                raise _malformed(name, f"a value after {name}")
            value = rest[position]
        path = _present_name(name[2:])
        dashed = path.replace("_", "-")
        written[dashed] = path
        changes.setdefault(dashed, []).append(value)
        position += 1
    for dashed, values in changes.items():
        say_given_again(f"--{dashed}", values)
    return {written[dashed]: values[-1] for dashed, values in changes.items()}


def reading_settings(
    rest: Sequence[str], *, known: Mapping[str, str], where: str, instead: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return settings that say how files are read, by the name of a field, as texts.

    Args:
        rest: of the command line.
        known: the field that each dotted path sets.
        where: of the error.
        instead: by the path of a setting that is not among them, the way out.

    Raises:
        ConfigError: another setting.
    """
    changes = {path.replace("_", "-"): text for path, text in settings_given(rest).items()}
    for path in changes:
        if path not in known:
            near = nearest_settings(path, list(known), most=1)
            at_hand = [instead[path]] if instead and path in instead else []
            raise ConfigError(
                expected="a setting that says how files are read: " + ", ".join(f"--{each}" for each in known),
                found=f"--{path}",
                where=where,
                ways_out=[*at_hand, *(f"did you mean --{each}?" for each in near), "leave it out"],
            )
    return {known[path]: text for path, text in changes.items()}


def _present_name(path: str) -> str:
    """The name that a renamed setting has now, with a notice."""
    new = RENAMED.get(path.replace("_", "-"))
    if new:
        say(f"notice: --{path} is called --{new} now\n")
    return new or path


def apply_settings(config: D, changes: Mapping[str, str], *, listed: str = _LISTED) -> D:
    """`override`, with the nearest of all full names where a name is unknown.

    Args:
        config: any.
        changes: dotted path to text.
        listed: the command that lists them.

    Raises:
        ConfigError: an unknown name, or a value that the setting cannot have.
    """
    refuse_unknown(changes, known=[path for path, _, _ in settings(config)], listed=listed)
    short = {path: f"--{name}" for name, paths in SHORT_NAMES.items() for path in paths}
    return override(config, changes, also=short | FLAGS)


def refuse_unknown(changes: Iterable[str], *, known: Sequence[str], listed: str = _LISTED) -> None:
    """Names that are no setting, each with the nearest that are.

    Args:
        changes: dotted paths.
        known: those that exist.
        listed: the command that lists them.

    Raises:
        ConfigError: there is one.
    """
    groups = {path.rpartition(".")[0] for path in known}
    prefixes = {".".join(group.split(".")[:count]) for group in groups for count in range(1, 5)}
    for name in changes:
        path = name.replace("_", "-")
        # A name below a known one, or a group itself, is explained by `override`, which knows its type.
        if path in known or path in prefixes or any(path.startswith(f"{each}.") for each in known):
            continue
        near = [*(_short_flag(path) if listed == _LISTED else []), *nearest_settings(path, known)]
        raise ConfigError(
            expected="the name of a setting",
            found=f"--{name}",
            where="command line",
            ways_out=[
                *(f"did you mean --{each}?" for each in near),
                f"see all settings with what they mean: {listed}",
            ],
        )


def _short_flag(path: str) -> list[str]:
    """Return the short form that a name without a dot was meant to be, as it is typed."""
    return [] if "." in path else nearest_names(path, SHORT_NAMES, most=1, cutoff=0.7)


def described(config: DataclassInstance, *, changed: DataclassInstance | None = None) -> list[Setting]:
    """Every setting of a config with its type, default, value and meaning.

    Args:
        config: as the recipe has it.
        changed: with what the command line changes; None: nothing.
    """
    about = dict(_descriptions(config if changed is None else changed))
    defaults = {path: value for path, _, value in settings(config)}
    return [
        Setting(path=path, kind=kind, default=defaults.get(path, "–"), value=value, about=about.get(path, ""))
        for path, kind, value in settings(config if changed is None else changed)
        if not path.startswith(_HIDDEN)
    ]


def print_settings(stored: DataclassInstance, config: DataclassInstance) -> None:
    """All settings in groups: type, default and meaning, and the value where the command line gives another."""
    by_group: dict[str, list[Setting]] = {}
    for each in described(stored, changed=config):
        by_group.setdefault(each.group, []).append(each)
    for group, members in by_group.items():
        rows = [
            (f"--{each.path}", each.kind, each.default, "" if each.value == each.default else each.value, each.about)
            for each in members
        ]
        print_line(group or "run")
        print_table(("setting", "type", "default", "given", "what it means"), rows)


def arguments_of(cls: type) -> dict[str, str]:
    """Names and descriptions under `Args:` of a docstring, those of base classes included."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        found |= _parse_arguments(inspect.cleandoc(each.__doc__ or "")) if dataclasses.is_dataclass(each) else {}
    return found


def _parse_arguments(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    _, _, section = text.partition("\nArgs:\n")
    name = ""
    for line in section.splitlines():
        if line.strip() and not line.startswith("    "):
            break  # the next section
        entry = re.match(r"    (\w+)(?:, (\w+))?: (.*)", line)
        if entry:
            name = entry.group(1)
            found[name] = entry.group(3).strip()
        elif name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {name: about.rstrip(".") for name, about in found.items()}


def _descriptions(config: DataclassInstance, *, prefix: str = "") -> Iterator[tuple[str, str]]:
    about = arguments_of(type(config))
    for entry in dataclasses.fields(config):
        path = f"{prefix}{entry.name.replace('_', '-')}"
        value = getattr(config, entry.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _descriptions(value, prefix=f"{path}.")
        else:
            yield path, about.get(entry.name, "")


def _dest(name: str) -> str:
    return f"short_{name.replace('-', '_')}"


def _stray(word: str) -> ConfigError:
    """Return the error for a word that neither names a setting nor is the value of one."""
    ways_out = ["write settings as --training.epochs 2; `ziggurat train RECIPE --settings` lists them"]
    if os.path.exists(word):
        # Of a glob that the shell replaced by its files, the first is the value and the others are left over.
        suffix = os.path.splitext(word)[1]
        pattern = os.path.join(os.path.dirname(word), f"*{suffix}")
        ways_out = [
            f"quote the glob, which the shell has replaced by its files: --data.train {shlex.quote(pattern)}",
            "name several files with commas between them: --data.train FILE,FILE",
            *ways_out,
        ]
    return ConfigError(
        expected="an argument that begins with --, or one value behind it",
        found=repr(word),
        where="command line",
        ways_out=ways_out,
    )


def _malformed(found: str, expected: str) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=repr(found),
        where="command line",
        ways_out="write settings as --training.epochs 2; `ziggurat train RECIPE --settings` lists them",
    )
