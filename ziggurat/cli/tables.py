"""Tables on a terminal, in a pipe and on a narrow screen: every cell is shown whole, whatever the width.

    pipe or file      one line a record, as wide as it needs: nothing is cut, and `awk` and `less -S` can read it
    wide terminal     the same
    a bit too narrow  prose columns (long text with few numbers) wrap at words; numbers stay on one line
    narrower          one record a block, `name: value` on lines of their own

All verbs print through `print_table` and `print_line`. A library that shortens cells to make a table fit shows `7.…`
where 7.41 was measured, or leaves out the last columns; both are wrong numbers to whoever reads them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.cells import cell_len

from ziggurat.commands import with_extensions
from ziggurat.files.streams import answering, folded

_GAP = "   "
_MIN_PROSE = 24
_LONG_CELL = 28


def print_line(line: str) -> None:
    """Print text on standard output, on a terminal folded between words; nothing is cut, and no number broken."""
    from rich.console import Console

    console = Console()
    line = with_extensions(line)
    text = folded(line, width=console.width) if console.is_terminal else line
    with answering():
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output, in the form that fits; nothing for no rows."""
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else None
    text = table_text(columns, rows, width=width)
    if text:
        with answering():
            console.print(text + "\n", soft_wrap=True, markup=False, highlight=False)


def table_text(columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None) -> str:
    """A table as text.

    Args:
        columns: headings.
        rows: cells, as many as headings.
        width: of the screen; None for a pipe, which has no width.
    """
    if not rows:
        return ""
    used = [index for index in range(len(columns)) if any(row[index] for row in rows)] or [0]
    heads = [columns[index] for index in used]
    cells = [[row[index] for index in used] for row in rows]
    widths = _widths(heads, cells, width)
    return _blocks(heads, cells, width or 80) if widths is None else _grid(heads, cells, widths)


def _widths(heads: list[str], cells: list[list[str]], width: int | None) -> list[int] | None:
    """The width of each column; None if the table does not fit."""
    columns = [[head, *(row[index] for row in cells)] for index, head in enumerate(heads)]
    widths = [max(cell_len(cell) for cell in column) for column in columns]
    if width is None:
        return widths
    missing = len(_GAP) * (len(widths) - 1) + sum(widths) - width
    for index in sorted(range(len(widths)), key=lambda each: -widths[each]):
        if missing <= 0:
            break
        if _is_prose(columns[index]):
            longest_word = max(cell_len(word) for cell in columns[index] for word in cell.split() or [""])
            least = max(_MIN_PROSE, longest_word)
            given = min(missing, max(0, widths[index] - least))
            widths[index] -= given
            missing -= given
    return widths if missing <= 0 else None


def _is_prose(column: list[str]) -> bool:
    """Long text, mostly without digits: it may wrap at words."""
    long = [cell for cell in column if cell_len(cell) > _LONG_CELL]
    return bool(long) and all(sum(mark.isdigit() for mark in cell) < 0.3 * len(cell) for cell in long)


def _grid(heads: list[str], cells: list[list[str]], widths: list[int]) -> str:
    right = [all(_is_number(row[index]) for row in cells) for index in range(len(heads))]
    lines = _record(heads, widths, right)
    lines.append("─" * (sum(widths) + len(_GAP) * (len(widths) - 1)))
    for row in cells:
        lines += _record(row, widths, right)
    return "\n".join(lines)


def _record(row: list[str], widths: list[int], right: list[bool]) -> list[str]:
    folded = [_fold(cell, width) for cell, width in zip(row, widths, strict=True)]
    lines = []
    for number in range(max(map(len, folded))):
        parts = [lines_of[number] if number < len(lines_of) else "" for lines_of in folded]
        padded = []
        for part, width, is_right in zip(parts, widths, right, strict=True):
            space = " " * max(0, width - cell_len(part))
            padded.append(space + part if is_right else part + space)
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _fold(text: str, width: int) -> list[str]:
    if cell_len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _blocks(heads: list[str], cells: list[list[str]], width: int) -> str:
    """One record a block: its first cell, and the others below it, each with its heading."""
    label = max((cell_len(head) for head in heads[1:]), default=0)
    beside = label + 4 <= width // 2
    blocks = []
    for row in cells:
        lines = _fold(row[0] if not heads[0] else f"{heads[0]}: {row[0]}", width)
        for head, cell in zip(heads[1:], row[1:], strict=True):
            if not cell:
                continue
            start = f"  {head or 'note'}: "
            if beside:
                start += " " * (label - cell_len(head or "note"))
            first, *more = textwrap.wrap(
                cell,
                width,
                initial_indent=start,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += [first, *more]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _is_number(cell: str) -> bool:
    """Return whether a cell holds a number, a mean with its deviation, or nothing."""
    bare = cell.translate(str.maketrans("", "", ",.+−-×±%xkMG –"))
    return not bare or bare.isdigit()
