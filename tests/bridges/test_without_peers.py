"""The bridge is optional, and says what it needs."""

from __future__ import annotations

import importlib
import sys

import pytest

from ziggurat.errors import MissingDependencyError


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ziggurat.bridges.ray_serve", raising=False)
    with pytest.raises(MissingDependencyError, match=r"ray\[serve\]==2.60.0"):
        importlib.import_module("ziggurat.bridges.ray_serve")


def test_without_ray_data_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "ziggurat.bridges.ray_data", raising=False)
    with pytest.raises(MissingDependencyError, match=r"ray\[data\]==2.60.0"):
        importlib.import_module("ziggurat.bridges.ray_data")


def test_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchrec"]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith("ziggurat.bridges.torchrec")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchrec", None)
    with pytest.raises(MissingDependencyError) as caught:
        importlib.import_module("ziggurat.bridges.torchrec")
    assert "pip install --no-deps torchrec==1.8.0" in str(caught.value)
    assert "torchrec" in caught.value.found
