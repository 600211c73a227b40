"""Load what packages of the user's own add to the command line: verbs, and members of kinds that settings name.

    [project.entry-points."ziggurat.verbs"]             a `Verb`, listed by `ziggurat --help` like ours
    curve = "my_package.curve:CURVE"

    [project.entry-points."ziggurat.extensions"]        a module that lists placements, row formats, precisions, …
    formats = "my_package.formats"                      imported before a verb runs, so that settings know their names

A module that is not installed is imported by `ziggurat --extension MODULE verb …`. A package that cannot be imported is
named on stderr and left out: a broken one must not take every command with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable
from importlib.metadata import EntryPoint, entry_points

from ziggurat.cli.named_modules import import_named
from ziggurat.cli.verb import Verb
from ziggurat.files.streams import say

VERBS = "ziggurat.verbs"
EXTENSIONS = "ziggurat.extensions"


def installed_verbs(known: Collection[str]) -> list[Verb]:
    """Return the verbs of installed packages, by name.

    Args:
        known: names that are taken; a verb of such a name is left out, and that is said.
    """
    found: dict[str, Verb] = {}
    for point in _points(VERBS):
        verb = _loaded(point)
        if verb is None:
            continue
        if not isinstance(verb, Verb):
            _leave_out(point, f"it is {type(verb).__name__}, not a ziggurat.cli.verb.Verb")
        elif verb.name in known or verb.name in found:
            _leave_out(point, f"there is a verb {verb.name!r} already")
        elif problem := _problem_of(verb):
            _leave_out(point, problem)
        else:
            found[verb.name] = verb
    return list(found.values())


def _problem_of(verb: Verb) -> str:
    """Try to declare the arguments of a verb, and return what is wrong with it; "" if nothing is."""
    if not verb.name or verb.name.split() != [verb.name] or verb.name.startswith("-"):
        return f"its name {verb.name!r} is no word of a command line"
    if not callable(verb.run):
        return f"its run is {type(verb.run).__name__}, which cannot be called"
    try:
        verb.add_arguments(argparse.ArgumentParser(prog=verb.name))
    except (Exception, SystemExit) as error:  # code of a package may fail in any way
        return f"declaring its arguments: {type(error).__name__}: {error}"
    return ""


def load_extensions(modules: Iterable[str]) -> None:
    """Import what adds members to kinds: modules of installed packages, then those that were named.

    Args:
        modules: names, looked for as `python -m` does: in the present folder, then among what is installed.

    Raises:
        ConfigError: one that was named cannot be imported, or adds what breaks a promise.
    """
    for point in _points(EXTENSIONS):
        _loaded(point)
    for name in modules:
        import_named(
            name,
            where=f"command line, --extension {name}",
            expected="a module that can be imported: my_module, or my_package.my_module",
            ways_out=["start where the module is, or install its package"],
        )


def _points(group: str) -> list[EntryPoint]:
    return sorted(entry_points(group=group), key=lambda point: point.name)


def _loaded(point: EntryPoint) -> object:
    """Return what an entry point names; None, and a line on stderr, where it cannot be imported."""
    try:
        return point.load()
    except (Exception, SystemExit) as error:  # a module may fail in any way while it is imported
        _leave_out(point, f"{type(error).__name__}: {error}")
        return None


def _leave_out(point: EntryPoint, why: str) -> None:
    package = point.dist.name if point.dist is not None else "an installed package"
    say(f"warning: {point.value}, of {package}, is left out: {why}\n")
