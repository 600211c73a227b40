"""Import a module that the command line names, and say in four parts why one cannot be imported.

Modules are looked for as `python -m` does: in the present folder, then among what is installed. The code of a user's
module may fail in any way while it is imported: the error names the file and the line that failed, not the importer's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from ziggurat.errors import ConfigError, ZigguratError


def import_named(name: str, *, where: str, expected: str, ways_out: Sequence[str]) -> ModuleType:
    """Return a module, imported.

    Args:
        name: of the module, with dots.
        where: the words of the command line that name it.
        expected: what stands there, for a name that leads to no module.
        ways_out: for such a name, beside that of a path.

    Raises:
        ConfigError: there is no such module, it fails, or it ends the process.
        ZigguratError: what the module raises of this kind.
    """
    if not name or name.startswith(".") or os.sep in name:
        raise ConfigError(expected=expected, found=repr(name), where=where, ways_out=[_by_name(name), *ways_out])
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            expected=expected,
            found=f"{type(error).__name__}: {error}",
            where=where,
            ways_out=[_by_name(name), *ways_out],
        ) from error
    except ZigguratError:
        raise
    except SystemExit as error:
        raise ConfigError(
            expected="a module that can be imported, and does not end the program",
            found=f"SystemExit: {error}",
            where=f"{where}, at {_place(error, name=name)}",
            ways_out=(
                'put what it does as a script below the line: if __name__ == "__main__":',
                "raise an error that says what is wrong, instead of ending the program",
            ),
        ) from error
    except Exception as error:  # code of a user's may fail in any way
        raise ConfigError(
            expected="a module that can be imported",
            found=f"{type(error).__name__}: {error}",
            where=f"{where}, at {_place(error, name=name)}",
            ways_out="correct it; docs/guides/extending.md has an example of each kind",
        ) from error


def _by_name(name: str) -> str:
    """Return the way out of a path or a file's name where a module's is wanted."""
    return "correct the name: no path, and no .py" + (f" ({Path(name).stem})" if os.sep in name else "")


def _place(error: BaseException, *, name: str) -> str:
    """Return the file and the line where an import failed; the file alone where nothing knows the line."""
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith("<"):
        return f"{error.filename}:{error.lineno}" if error.lineno else error.filename
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and not _is_importers(frame.filename)]
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}"
    try:
        spec = importlib.util.find_spec(name)
    except Exception:  # a broken package above the module; its name is known at least
        spec = None
    return name if spec is None or spec.origin is None else spec.origin


def _is_importers(filename: str) -> bool:
    """Return whether a frame of a traceback belongs to Python's import."""
    return filename.startswith("<frozen importlib") or filename == importlib.__file__
