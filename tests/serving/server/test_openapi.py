"""openapi.json says what the server does: its answers fit their schemas, and schemathesis finds nothing."""

from __future__ import annotations

import copy
import json
import re
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

# These cannot hold for all that the description allows: whether a text is an id, a number or a filter of this export,
# its data say and no schema; a deadline of a millisecond is a right request and its answer 503; and POST /items asks
# for items and makes none. So they are held against the part of the description of which they are true: `promised`.
OF_PROMISES = ("positive_data_acceptance", "not_a_server_error", "ensure_resource_availability")


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


def promised(description: dict[str, Any], *, users: list[str], items: list[str], filters: list[str]) -> dict[str, Any]:
    """Return the part of a description whose requests are all answered with 200.

    Args:
        description: openapi.json of a server.
        users: ids of users.
        items: ids of items.
        filters: filters that the export understands.
    """
    data = copy.deepcopy(description)
    item = {"type": "string", "enum": items}
    schemas = data["components"]["schemas"]
    user = schemas["UserColumns"]["properties"]
    for name, schema in user.items():
        if schema["description"] == "dense":
            user[name] = {"type": ["number", "null"], "minimum": -1e30, "maximum": 1e30}
        elif "array" in schema.get("type", ()):  # text is a list where the run's schema has a separator, not here
            user[name] = {"type": ["array", "null"], "items": {"type": ["string", "boolean", "null"]}}
    user["user_id"] = {"type": "string", "enum": users}
    asked = schemas["RecommendRequest"]["properties"]
    asked["filter"] = {"type": "string", "enum": filters}
    asked["exclude"]["items"] = item
    schemas["RankRequest"]["properties"]["items"]["items"] = item
    data["paths"] = {path: each for path, each in data["paths"].items() if not path.startswith("/admin")}
    data["paths"]["/items/{id}"]["get"]["parameters"][0]["schema"] = item
    for path, name in (("/explain", "item"), ("/items", "ids")):
        body = data["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
        body[name] = item if name == "item" else {"type": "array", "items": item, "maxItems": 100}
    for path in ("/recommend", "/rank"):
        if path in data["paths"]:
            (deadline,) = data["paths"][path]["post"]["parameters"]
            deadline["schema"] = {"type": "number", "minimum": 9000, "maximum": 10_000}
            deadline["required"] = True
    return data


def test_what_is_promised_is_a_part_of_the_description() -> None:
    whole = described()
    part = promised(whole, users=["u1"], items=["3"], filters=["genres:Drama"])
    assert set(part["paths"]) == {path for path in whole["paths"] if not path.startswith("/admin")}
    assert part["components"]["schemas"]["RecommendRequest"]["properties"]["filter"]["enum"] == ["genres:Drama"]
    assert whole["components"]["schemas"]["RecommendRequest"]["properties"]["filter"]["default"] == ""


def test_each_answer_has_a_type_with_a_name_that_none_of_its_fields_has() -> None:
    """Generated clients name a variable after the type: a field of that name would be written over."""
    data = described()
    for name, operation in operations(data).items():
        for status, response in operation["responses"].items():
            schema = response["content"].get("application/json", {}).get("schema", {})
            if name != "get /openapi.json" or status != "200":
                assert "properties" not in schema, (name, status)
    columns = {"user", "item", "users", "items", "error", "example", "column"}  # as columns may be called
    for name, schema in data["components"]["schemas"].items():
        fields = set(schema.get("properties", ()))
        if name in ("UserColumns", "ItemColumns", "LabelScores"):
            fields |= columns
        assert re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() not in fields, name


@pytest.mark.slow
def test_a_generated_client_gets_typed_answers_everywhere(shop: Shop, tmp_path: Path) -> None:
    program = shutil.which("openapi-python-client")
    if program is None:
        pytest.skip("openapi-python-client is not installed")
    python = Path(program).with_name("python")
    export = shutil.copytree(shop.export, tmp_path / "films")
    driver = Path(__file__).with_name("generated_client.py")
    (tmp_path / "client").mkdir()
    (tmp_path / "config.yaml").write_text("package_name_override: shop_client\n")
    admin_socket = str(tmp_path / "admin.sock")
    server = start(tmp_path, str(export), "--server.admin-socket", admin_socket, *QUICK)
    try:
        (tmp_path / "openapi.json").write_text(server.get("/openapi.json")[1])
        command = [program, "generate", "--path", "openapi.json", "--meta", "none", "--config", "config.yaml"]
        command += ["--output-path", "client/shop_client"]
        made = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert made.returncode == 0, made.stdout
        assert "unsupported" not in made.stdout.lower(), made.stdout
        command = [str(python), str(driver), "client", str(server.port), admin_socket, str(export)]
        asked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    finally:
        server.process.terminate()
        server.process.wait(timeout=60)
    assert asked.returncode == 0, asked.stderr[-4000:]
    assert len(asked.stdout.splitlines()) > 30
    checker = shutil.which("mypy", path=str(python.parent))
    if checker is None:
        pytest.skip("the client's answers are right; mypy, which looks at its types, is not installed beside it")
    shutil.copy(driver, tmp_path / "client")
    command = [checker, "--strict", "shop_client", driver.name]
    typed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "client", check=False)
    wrong = [line for line in typed.stdout.splitlines() if ": error: " in line]
    assert not [line for line in wrong if not line.startswith("shop_client/client.py")], wrong  # that has no schema
    assert "checked" in typed.stdout or "no issues" in typed.stdout, typed.stdout


@pytest.mark.slow
def test_schemathesis_finds_nothing(shop: Shop, tmp_path: Path) -> None:
    program = shutil.which("schemathesis")
    if program is None:
        pytest.skip("schemathesis is not installed")
    export = shutil.copytree(shop.export, tmp_path / "films")
    server = start(tmp_path, str(export), *QUICK)
    try:
        command = [program, "run", f"http://127.0.0.1:{server.port}/openapi.json", "--exclude-path-regex", "^/admin"]
        command += ["--exclude-checks", ",".join(OF_PROMISES)]
        more = ["--max-examples", "60", "--seed", "1", "--request-timeout", "20"]
        found = subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path, check=False)
        users = json.loads(server.get("/users")[1])["users"][:5]
        items = server.post("/history", {"user": {"user_id": users[0]}})[1]["items"]
        part = promised(
            json.loads(server.get("/openapi.json")[1]),
            users=users,
            items=[each["id"] for each in items],
            filters=["", json.loads(server.get("/info")[1])["filter_example"]],
        )
        (tmp_path / "promised.json").write_text(json.dumps(part))
        command = [program, "run", "promised.json", "--url", f"http://127.0.0.1:{server.port}"]
        command += ["--checks", ",".join(OF_PROMISES)]
        kept = subprocess.run([*command, *more], capture_output=True, text=True, cwd=tmp_path, check=False)
    finally:
        server.process.terminate()
        server.process.wait(timeout=60)
    assert found.returncode == 0, found.stdout[-8000:]
    assert kept.returncode == 0, kept.stdout[-8000:]
    assert "a request failed" not in server.log.read_text(), "503 is no failure, 500 is"
