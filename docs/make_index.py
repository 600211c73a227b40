"""Write the pages that are lists: docs/files.md (every file of the package), docs/cli.md and docs/experiments/list.md.

`make index` and `make docs` run this. The sentences stand in the files alone, and those of the command line in its
parser, so these pages are made when they are wanted and are not kept in the repository.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

from ziggurat.cli.main import build_parser

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "ziggurat"
FILES = DOCS / "files.md"
CLI = DOCS / "cli.md"
EXPERIMENTS = DOCS / "experiments"
EXPERIMENTS_LIST = EXPERIMENTS / "list.md"

FILES_HEAD = """# Index of files

Every file of the package, with the first paragraph of its docstring. The [tour](tour.md) says in which order to read
the nine that matter first.

"""
CLI_HEAD = """# Every verb and flag

Written from the parser: `ziggurat VERB --help` says the same. [Commands](commands.md) says which verb does what.
Settings of a run (`--group.name VALUE`) depend on its recipe: `ziggurat train RECIPE --settings` lists them.

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


def page_of_the_command_line() -> str:
    """Return the page of verbs: one section each, with its arguments, flags and examples."""
    sections = [_section(parser) for parser in every_parser(build_parser())]
    return CLI_HEAD + "\n".join(sections)


def every_parser(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and those of its verbs and actions, in the order in which help lists them."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from every_parser(child)


def _section(parser: argparse.ArgumentParser) -> str:
    """Return what one parser takes: a table a group of arguments, then what its help ends with."""
    parts = [f"## {parser.prog}\n\n{_escaped(parser.description or '')}\n"]
    for group in parser._action_groups:
        rows = [_row(parser, action) for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if rows:
            parts.append(f"| {_escaped(group.title or '')} | |\n|---|---|\n{''.join(rows)}")
    if parser.epilog:
        parts.append(f"```text\n{parser.epilog.strip()}\n```\n")
    return "\n".join(parts)


def _row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Return the line of one argument or flag, or one line a verb where the argument is a verb."""
    if isinstance(action, argparse._SubParsersAction):
        lines = []
        for each in action._choices_actions:
            child = action.choices[each.dest].prog
            lines.append(f"| [`{each.dest}`](#{child.replace(' ', '-')}) | {_escaped(each.help or '')} |\n")
        return "".join(lines)
    placeholder = action.metavar if isinstance(action.metavar, str) else action.dest
    if action.choices is not None and action.metavar is None:
        placeholder = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    if action.option_strings and action.metavar is None and action.choices is None:
        placeholder = placeholder.upper()
    value = {
        None: placeholder,
        0: "",
        "?": f"[{placeholder}]",
        "*": f"[{placeholder} ...]",
        "+": f"{placeholder} [{placeholder} ...]",
    }[action.nargs]
    spelling = " ".join([", ".join(action.option_strings), value]).strip()
    required = " (required)" if action.option_strings and action.required else ""
    about = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"| `{_escaped(spelling)}` | {_escaped(about)}{required} |\n"


def _escaped(text: str) -> str:
    """Return text that a cell of a table can hold."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def index_of_experiments() -> str:
    """Return the page of experiments: a line an entry, with its date and its question."""
    lines = []
    for path in sorted(EXPERIMENTS.glob("20*.md"), reverse=True):
        question = path.read_text().split("\n", 1)[0].removeprefix("# ")
        lines.append(f"- {path.name[:10]}: [{question}]({path.name})\n")
    return EXPERIMENTS_HEAD + "".join(lines)


if __name__ == "__main__":
    FILES.write_text(index_of_files())
    CLI.write_text(page_of_the_command_line())
    EXPERIMENTS_LIST.write_text(index_of_experiments())
