"""Write docs/files.md: every file of the package with the first sentence of its docstring. `make index` runs this.

The sentences stand in the files alone, so the index cannot say anything else than they do; a test compares the page
with what this script would write.
"""

from __future__ import annotations

import ast
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "ziggurat"
TARGET = DOCS / "files.md"

HEAD = """# Index of files

Every file of the package, with the first paragraph of its docstring. `make index` writes this page from the files;
change a sentence there, not here. The [tour](tour.md) says in which order to read the nine that matter first.

"""


def first_paragraph(path: Path) -> str:
    """The first paragraph of a Python file's docstring, or of the comment at the top of a C++ file, in one line."""
    text = path.read_text()
    if path.suffix == ".py":
        paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        lines = [line.removeprefix("//").strip() for line in text.splitlines() if line.startswith(("//", "#"))]
        paragraph = lines[0] if lines else ""
    return " ".join(paragraph.split())


def index() -> str:
    """The whole page."""
    folders: dict[Path, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            folders.setdefault(path.parent, []).append(path)
    parts = [HEAD]
    for folder in sorted(folders, key=lambda folder: folder.relative_to(PACKAGE).parts):
        relative = folder.relative_to(PACKAGE)
        init = folder / "__init__.py"
        title = f"`{relative}/`" if relative.parts else "`ziggurat/`"
        about = f"{first_paragraph(init)}\n\n" if init in folders[folder] else ""
        files = [path for path in folders[folder] if path != init]
        entries = [f"- `{path.relative_to(PACKAGE)}`: {first_paragraph(path)}\n" for path in files]
        parts.append(f"## {title}\n\n{about}{''.join(entries)}\n")
    return "".join(parts).rstrip("\n") + "\n"


if __name__ == "__main__":
    TARGET.write_text(index())
