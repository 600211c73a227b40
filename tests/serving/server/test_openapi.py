"""openapi.json says what the server does: its answers fit their schemas, and schemathesis finds nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.server.fake import FakeAnswerer
from tests.serving.server.test_app import ADMIN, USER, get, post, swapped
from tests.serving.server.test_shard_processes import QUICK, start
from tests.serving.shop import Shop
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig

NOT_CHECKED = (
    "positive_data_acceptance",  # whether an id or a filter is one, the data say, and no schema
    "not_a_server_error",  # 503 for a deadline of a millisecond
    "ensure_resource_availability",  # POST /items asks for items and makes none
)


def described(**more: Any) -> dict[str, Any]:
    def change(changes: object) -> Any:
        raise AssertionError(changes)

    app = ServerApp(answerer=FakeAnswerer(), config=ServerConfig(), swap=swapped, change=change, **more)
    return json.loads(app._openapi)


def operations(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{method} {path}": each for path, its in data["paths"].items() for method, each in its.items()}


def test_every_answer_has_a_schema_and_every_operation_a_name_of_its_own() -> None:
    found = operations(described())
    for name, operation in found.items():
        for status, response in operation["responses"].items():
            for content in response["content"].values():
                assert content["schema"], (name, status)
        assert "default" in operation["responses"], name
        if "requestBody" in operation:
            assert {"400", "413", "415"} <= set(operation["responses"]), name
    names = [operation["operationId"] for operation in found.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def test_the_key_stands_where_it_is_asked_for() -> None:
    for name, operation in operations(described(api_key="secret")).items():
        path = name.split()[1]
        is_open = get(path.replace("{id}", "3"), api_key="secret").status_code != 401
        assert ("401" in operation["responses"]) == (not is_open), name
        assert (operation.get("security") == []) == is_open, name


def test_what_the_page_reads_is_within_the_bounds_of_every_request() -> None:
    def explained(**fields: Any) -> httpx.Response:
        return post("/explain", {"request": USER | fields, "item": "3"})

    assert [explained(k=k).status_code for k in (1000, 1001, 0)] == [200, 400, 400]
    assert explained(exclude=["3"] * 5001).status_code == 400
    assert post("/history", {"user": {"age": 3}}).status_code == 400
    bounds = operations(described())["post /recommend"]["parameters"][0]["schema"]
    assert (bounds["exclusiveMinimum"], bounds["maximum"]) == (0, 10_000)
    for deadline, status in (("0", 400), ("", 400), ("10000", 200), ("10001", 400)):
        assert post("/recommend", USER, headers=ADMIN | {"X-Deadline-Ms": deadline}).status_code == status


def test_another_method_is_told_which_one_there_is() -> None:
    for path, allowed in (("/recommend", "POST"), ("/history", "POST"), ("/items", "POST")):
        refused = get(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    refused = post("/info", {})
    assert (refused.status_code, set(refused.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


@pytest.mark.slow
def test_schemathesis_finds_nothing(shop: Shop, tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("schemathesis is not installed")
    export = shutil.copytree(shop.export, tmp_path / "films")
    server = start(tmp_path, str(export), *QUICK)
    try:
        command = [program, "run", f"http://127.0.0.1:{server.port}/openapi.json", "--exclude-path-regex", "^/admin"]
        command += ["--exclude-checks", ",".join(NOT_CHECKED)]
        command += ["--max-examples", "60", "--seed", "1", "--request-timeout", "20"]
        found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    finally:
        server.process.terminate()
        server.process.wait(timeout=60)
    assert found.returncode == 0, found.stdout[-8000:]
    assert "a request failed" not in server.log.read_text(), "503 is no failure, 500 is"
