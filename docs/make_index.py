"""Write the pages that are lists: docs/files.md (every file of the package) and docs/experiments/list.md.

`make index` and `make docs` run this. The sentences stand in the files alone, so both pages are made when they are
wanted and are not kept in the repository.
"""

from __future__ import annotations

import ast
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "ziggurat"
FILES = DOCS / "files.md"
EXPERIMENTS = DOCS / "experiments"
EXPERIMENTS_LIST = EXPERIMENTS / "list.md"

FILES_HEAD = """# Index of files

Every file of the package, with the first paragraph of its docstring. The [tour](tour.md) says in which order to read
the nine that matter first.

"""
EXPERIMENTS_HEAD = """# All experiments

Newest first; [how an entry is written](README.md).

"""


def first_paragraph(path: Path) -> str:
    """Return the first paragraph of a Python docstring, or of the comment at the top of a C++ file, in one line."""
    text = path.read_text()
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        lines = [line.removeprefix("//").strip() for line in text.splitlines() if line.startswith(("//", "#"))]
        paragraph = lines[0] if lines else ""
    return " ".join(paragraph.split())


def index_of_files() -> str:
    """Return the page of files: one section a folder."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            folders.setdefault(path.parent, []).append(path)
    parts = [FILES_HEAD]
    for folder in sorted(folders, key=lambda folder: folder.relative_to(PACKAGE).parts):
        relative = folder.relative_to(PACKAGE)
        init = folder / "__init__.py"
        title = f"`{relative}/`" if relative.parts else "`ziggurat/`"
        about = f"{first_paragraph(init)}\n\n" if init in folders[folder] else ""
        files = [path for path in folders[folder] if path != init]
        entries = [f"- `{path.relative_to(PACKAGE)}`: {first_paragraph(path)}\n" for path in files]
        parts.append(f"## {title}\n\n{about}{''.join(entries)}\n")
    return "".join(parts).rstrip("\n") + "\n"


def index_of_experiments() -> str:
    """Return the page of experiments: a line an entry, with its date and its question."""
    lines = []
    for path in sorted(EXPERIMENTS.glob("20*.md"), reverse=True):
        question = path.read_text().split("\n", 1)[0].removeprefix("# ")
        lines.append(f"- {path.name[:10]}: [{question}]({path.name})\n")
    return EXPERIMENTS_HEAD + "".join(lines)


if __name__ == "__main__":
    FILES.write_text(index_of_files())
    EXPERIMENTS_LIST.write_text(index_of_experiments())
