"""The text of a boot: one line that stays, nothing where the system does not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ziggurat.files import boot
from ziggurat.files.boot import boot_id


def test_it_is_what_the_system_says_without_the_end_of_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boot").write_text("3f0c\n")
    monkeypatch.setattr(boot, "_BOOT", tmp_path / "boot")
    assert boot_id() == "3f0c"


def test_a_system_that_does_not_say_has_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boot, "_BOOT", tmp_path / "absent")
    assert boot_id() == ""
