"""An export behind Ray Serve: the answers of `Recommender`, errors in four parts, no swap of one replica alone."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ziggurat as zg
from tests.serving.shop import Shop
from ziggurat.errors import ConfigError, MissingFileError

ray = pytest.importorskip("ray", reason="needs ray[serve]: make test-bridges")
serve = pytest.importorskip("ray.serve", reason="needs ray[serve]: make test-bridges")


@pytest.fixture(scope="module")
def address(shop: Shop) -> Iterator[str]:
    from ziggurat.bridges.ray_serve import application

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 << 20, runtime_env={"env_vars": places})
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(shop.export, replicas=2), name="shop")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_ray_answers_as_the_recommender_does(shop: Shop, address: str) -> None:
    loaded = zg.Recommender.load(shop.export)
    for user in ("3", "17", "nobody"):
        status, found = ask(f"{address}/recommend", {"user": {"user_id": user}, "k": 5, "filter": "price:>=2"})
        expected = loaded.recommend({"user_id": user}, k=5, filter="price:>=2")
        assert status == 200
        assert [item["id"] for item in found["items"]] == [item.id for item in expected.items]
        assert [item["score"] for item in found["items"]] == pytest.approx([item.score for item in expected.items])
        assert found["version"] == loaded.version


def test_a_mistake_is_an_error_in_four_parts(address: str) -> None:
    status, found = ask(f"{address}/recommend", {"user": {"user_id": "3"}, "filter": "colour:red"})
    assert status == 400
    assert set(found["error"]) == {"kind", "expected", "found", "where", "ways_out"}
    assert ask(f"{address}/admin/swap", {"export": "elsewhere"})[0] == 404


def test_mistakes_are_found_before_a_replica_starts(shop: Shop, tmp_path: Path) -> None:
    from ziggurat.bridges.ray_serve import application

    with pytest.raises(ConfigError, match="at least one replica"):
        application(shop.export, replicas=0)
    with pytest.raises(MissingFileError, match="the folder of an export"):
        application(tmp_path / "nowhere")
