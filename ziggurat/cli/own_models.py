"""`--model my_package.my_module:MyConfig`: config classes of the user's own, loaded because the user names them.

A run folder names the class of its model too, but only for people: nothing is imported for it. The module is looked for
as `python -m` does: in the present folder, then among what is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ziggurat.cli.named_modules import import_named
from ziggurat.errors import ConfigError

if TYPE_CHECKING:  # torch comes with it, for which no command line waits
    from ziggurat.models.build import ModelConfig

_EXPECTED = "a module that can be imported, and a class in it: my_package.my_module:MyConfig"
_WAYS_OUT = ("start where the module is, or install its package",)
ABOUT = "config class of a model of your own; its module is imported"


def add_model_argument(parser: argparse.ArgumentParser, *, about: str = ABOUT) -> None:
    """`--model MODULE:CLASS`, once or several times."""
    parser.add_argument("--model", metavar="MODULE:CLASS", action="append", default=[], dest="own_models", help=about)


def own_models(options: argparse.Namespace) -> tuple[type[ModelConfig], ...]:
    """The classes that `--model` names, in that order.

    Raises:
        ConfigError: no such module or class, or it is no config of a model.
    """
    return tuple(_load(name) for name in options.own_models)


def model_words(options: argparse.Namespace) -> Sequence[str]:
    """Return the words that repeat `--model` in a command for people."""
    return [word for name in options.own_models for word in ("--model", name)]


def _load(name: str) -> type[ModelConfig]:
    from ziggurat.models.build import check_config_class

    module_name, _, class_name = name.partition(":")
    if not module_name or not class_name:
        raise _no_such(name, "no colon between module and class" if ":" not in name else "an empty name")
    found: Any = import_named(
        module_name, where=f"command line, --model {name}", expected=_EXPECTED, ways_out=_WAYS_OUT
    )
    for part in class_name.split("."):
        if not hasattr(found, part):
            raise _no_such(name, f"no {class_name!r} in {getattr(found, '__file__', module_name)}")
        found = getattr(found, part)
    check_config_class(found)
    return found


def _no_such(name: str, found: str) -> ConfigError:
    return ConfigError(
        expected=_EXPECTED,
        found=found,
        where=f"command line, --model {name}",
        ways_out=("correct the name", *_WAYS_OUT),
    )
