"""Workers import nothing again that the process before them could have imported once."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.serving.shop import Shop

# prometheus_client reads at its import where the worker's figures are, so each worker imports it, and what it needs.
OF_WORKERS = {"http", "importlib", "prometheus_client", "resource", "wsgiref"}
LOAD = """
import gc, json, sys
from pathlib import Path
from ziggurat.serving.recommender import Recommender
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.processes.before_forks import prepare_forks
from ziggurat.serving.server.processes.supervisor import Supervisor
from ziggurat.serving.server.processes.worker import examples
prepare_forks()
num_objects = len(gc.get_objects())
before = set(sys.modules)
app = ServerApp(answerer=Recommender.load(Path(sys.argv[1])), config=ServerConfig(), swap=None, change=None)
app.engine.warm_up(examples(app.info))
print(json.dumps({"objects": num_objects, "modules": sorted(set(sys.modules) - before)}))
"""


def test_loading_and_warming_up_imports_nothing_after_the_fork(shop: Shop) -> None:
    command = [sys.executable, "-c", LOAD, str(shop.export)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name.partition(".")[0] for name in found["modules"]} <= OF_WORKERS
    assert found["objects"] < 1000, "a worker's garbage collection looks at what was there before the fork"
