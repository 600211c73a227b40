"""The errors of Ziggurat: every one says what was expected, what was found, where, and the ways out.

Each error is also the builtin exception that a caller would expect (`SchemaError` is a `ValueError`, `BoundsError`
an `IndexError`), so existing `except` clauses keep working. The four parts stay available as attributes.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ziggurat.plain import JSON, as_list, as_text

_PACKAGE = Path(__file__).parent


class ZigguratError(Exception):
    """An error in four parts.

    Args:
        expected: what the code needed, in the user's words.
        found: what it got instead; quote the value.
        where: file, row, column, feature, table, key or step: as exact as is known.
        ways_out: one sentence each, most likely first; shown numbered.

    Attributes:
        left_job: it ended this process's part in a job of many ranks; the process must end without waiting for them.

    Example:
        >>> try:
        ...     zg.inspect_file("nowhere.csv")
        ... except zg.ZigguratError as error:
        ...     print(type(error).__name__, error.where)
        MissingFileError nowhere.csv
    """

    left_job: bool = False

    def __init__(self, *, expected: str, found: str, where: str, ways_out: str | Sequence[str]) -> None:
        self.expected = expected
        self.found = found
        self.where = where
        self.ways_out = (ways_out,) if isinstance(ways_out, str) else tuple(ways_out)
        super().__init__(expected, found, where, self.ways_out)

    def __str__(self) -> str:
        ways = "\n".join(f"  {number}. {way}" for number, way in enumerate(self.ways_out, start=1))
        return f"expected: {self.expected}\nfound:    {self.found}\nwhere:    {self.where}\nways out:\n{ways}"

    def to_json(self) -> dict[str, JSON]:
        """Write the error as plain data, for another process; `error_from_json` reads it."""
        return {
            "kind": type(self).__name__,
            "expected": self.expected,
            "found": self.found,
            "where": self.where,
            "ways_out": list(self.ways_out),
        }

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not cross process borders without this.
        return _rebuild, (type(self), self.expected, self.found, self.where, self.ways_out)


def _rebuild(
    kind: type[ZigguratError], expected: str, found: str, where: str, ways_out: tuple[str, ...]
) -> ZigguratError:
    return kind(expected=expected, found=found, where=where, ways_out=ways_out)


class ConfigError(ZigguratError, ValueError):
    """A setting has an unknown name, a wrong type or an impossible value."""


class NoRoomError(ConfigError):
    """Settings ask for more memory than there is."""


class PlanError(ZigguratError, ValueError):
    """A plan contradicts itself, the model, the machines, or another rank's plan."""


class TopologyError(ZigguratError, RuntimeError):
    """The ranks of a job do not form what was asked for, or one of them is gone; names ranks."""


class SchemaError(ZigguratError, ValueError):
    """A schema contradicts itself, or the data does not have the columns and types that the schema names."""


class DataError(ZigguratError, ValueError):
    """A file or a row in it cannot be used; names file, row and column."""


class FilterError(ZigguratError, ValueError):
    """A filter of items cannot be read, or names what the items do not have; points at the column of its text."""


class BoundsError(ZigguratError, IndexError):
    """An id lies outside its embedding table; names feature and row."""


class RequestError(ZigguratError, ValueError):
    """A request to an export cannot be answered: an unknown item, a wrong field, a mistake in a filter."""


class UnavailableError(ZigguratError, RuntimeError):
    """Something that should answer is not there now; asking again later may help."""


class FileError(ZigguratError, OSError):
    """A file or folder could not be written: no room, no permission, or something else of that name."""


class MissingFileError(ZigguratError, FileNotFoundError):
    """A file or folder that was named does not exist."""


class MissingDependencyError(ZigguratError, ImportError):
    """An optional package is needed for what was asked."""


class CheckpointError(ZigguratError, OSError):
    """A checkpoint is damaged, incomplete, of another version, or could not be written."""


class ExportError(ZigguratError, OSError):
    """An export is damaged, incomplete, of another version, or does not answer as the run it was made from."""


class NumericsError(ZigguratError, ArithmeticError):
    """A loss, gradient or metric is NaN or infinite, or undefined for the data given."""


def error_from_json(data: Mapping[str, JSON], *, more: Sequence[type[ZigguratError]] = ()) -> ZigguratError:
    """Read what `ZigguratError.to_json` wrote: the error of another process, of its own kind where that is known.

    Args:
        data: kind, and four parts.
        more: kinds that are known beside those of this module.
    """
    kinds = {name: each for name, each in globals().items() if isinstance(each, type)}
    kinds |= {each.__name__: each for each in more}
    kind = kinds.get(as_text(data["kind"]), ZigguratError)
    if not issubclass(kind, ZigguratError):
        kind = ZigguratError
    return kind(
        expected=as_text(data["expected"]),
        found=as_text(data["found"]),
        where=as_text(data["where"]),
        ways_out=[as_text(way) for way in as_list(data["ways_out"])],
    )


@contextlib.contextmanager
def refusing_exits() -> Iterator[None]:
    """Turn a `SystemExit` or `GeneratorExit` that code of the user's raises inside into an error in four parts.

    A model, a loss or a metric that calls `sys.exit()` would else end a run without a word and with status 0, as if it
    were done. What the package itself raises passes, and so does what argparse or a handler of signals raises.

    Raises:
        ConfigError: code of the user's ended the program.
    """
    try:
        yield
    except (SystemExit, GeneratorExit) as error:
        frames = list(traceback.walk_tb(error.__traceback__))
        if _module_of(frames[-1][0]) == "argparse":  # it has said why, or what there is
            raise
        last, line = [frame for frame in frames if _module_of(frame[0]) != "_sitebuiltins"][-1]  # of `exit()`
        if is_of_package(last.f_code.co_filename) or comes_of_signal(error):
            raise
        refused = ConfigError(
            expected="code that does not end the program: of a model, a loss, a metric or an extension",
            found=f"{type(error).__name__}: {error}" if error.args else type(error).__name__,
            where=f"{last.f_code.co_filename}:{line}, in {last.f_code.co_name}",
            ways_out=(
                "raise an error that says what is wrong, instead of ending the program",
                'trainer.stop("a reason") in a hook ends training after the present step, and keeps its result',
            ),
        )
        refused.left_job = getattr(error, "left_job", False)
        raise refused from error


_SHOWN_FRAMES = 4
_OF_OTHERS = ("site-packages", "dist-packages")  # folders of installed packages


def frames_of_user(error: BaseException) -> list[str]:
    """Return the lines of code of a user's through which an exception passed after ours called it, the outermost first.

    Args:
        error: as it was raised.
    """
    installed = Path(sysconfig.get_path("stdlib"))
    found: list[str] = []
    is_called = False
    for frame, line in traceback.walk_tb(error.__traceback__):
        filename = frame.f_code.co_filename
        path = Path(filename)
        if is_of_package(filename):
            is_called = True
        elif is_called and not (
            filename.startswith("<") or path.is_relative_to(installed) or any(part in path.parts for part in _OF_OTHERS)
        ):
            found.append(f"{filename}:{line} in {frame.f_code.co_name}")
    return found


def of_user_code(error: Exception) -> ZigguratError | None:
    """Return an error that code of a user's has raised in four parts, with the lines of that code; None of ours.

    A model, a loss, a metric or an extension that fails would else be explained by a page of frames of the package,
    which say nothing to whoever wrote it.

    Args:
        error: that a verb ended with.
    """
    frames = frames_of_user(error)
    # Where memory is short, the line that asked for the last of it says little.
    if not frames or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return None
    return ConfigError(
        expected="code that comes back: of a model, a loss, a metric or an extension",
        found=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        # The innermost ones: there it failed.
        where=", ".join(frames[-_SHOWN_FRAMES:]),
        ways_out=(
            "correct it there",
            "try it on a few rows: ziggurat.testing.batches has random_batch and small_inputs",
            "see all frames, those of the package too: --verbose",
        ),
    )


def is_of_package(filename: str) -> bool:
    """Return whether a file of a traceback is one of the package's."""
    return Path(filename).is_relative_to(_PACKAGE)


def _module_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def comes_of_signal(error: BaseException) -> bool:
    """Return whether an exception passed through a function that this process has set for a signal."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = [getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def nearest_names(name: str, known: Iterable[str], *, most: int = 3, cutoff: float = 0.6) -> list[str]:
    """Return the known names that a wrong one is most like, the most alike first; capitals, - and _ make no difference.

    Args:
        name: that is not known; its first 100 characters count.
        known: the first 10,000 are looked at.
        most: how many to return.
        cutoff: share of the characters that must be alike.
    """
    by_plain: dict[str, str] = {}
    for each in itertools.islice(known, 10_000):
        by_plain.setdefault(_plain(each), each)
    return [by_plain[near] for near in difflib.get_close_matches(_plain(name[:100]), by_plain, n=most, cutoff=cutoff)]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
