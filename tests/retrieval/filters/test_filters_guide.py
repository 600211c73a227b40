"""The guide about filters: examples let pass what it says, its Python runs, and messages are those that are printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ziggurat.errors import FilterError
from ziggurat.ops.bitmask import rows_of_mask

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "filters.md").read_text()
EXAMPLES = re.findall(r"^\| `(.+)` \| ([A-Z][a-z]+(?:, [A-Z][a-z]+)*) \|$", GUIDE, re.MULTILINE)


@pytest.fixture(scope="module")
def names() -> dict:
    found: dict = {}
    for code in re.findall(r"^```python\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE):
        exec(code, found)
    return found


def test_every_example_lets_pass_what_the_guide_says(names: dict) -> None:
    assert len(EXAMPLES) > 20
    for text, titles in EXAMPLES:
        rows = rows_of_mask(names["index"].masks([text])[0]).tolist()
        assert ", ".join(names["films"]["title"][row] for row in rows) == titles, text


def test_messages_are_those_that_are_printed(names: dict, capsys: pytest.CaptureFixture[str]) -> None:
    error, explained = re.findall(r"^```text\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)
    with pytest.raises(FilterError) as caught:
        names["index"].parse("genres:Drama AND yaer:1995")
    assert str(caught.value) == error.rstrip()
    assert names["index"].explain("genres:Drama AND NOT year:1995..1999", 6) == explained.rstrip()
    assert rows_of_mask(names["masks"][1]).tolist() == [1, 2, 4, 5, 6]
