"""Links: what a link really carries, measured with plain sockets before anything is timed on it.

    host a: sends for about half a second ──► host b: counts and clocks what arrives, after the first MiB

Run as `python -m benchmarks.datacentre.links receive|send …` inside the hosts; the standard library is all it needs.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.datacentre.network import Network, PlainNetwork
from ziggurat.errors import TopologyError

ROOT = Path(__file__).resolve().parents[2]
_CHUNK = bytes(1 << 20)
_TIMEOUT_S = 30.0


def measure_link(network: Network | PlainNetwork, *, source: int, target: int, rate_mbit: float) -> float:
    """Mbit/s that arrive on `target` when `source` sends.

    Args:
        network: where.
        source: sending host.
        target: receiving host.
        rate_mbit: about what to expect; decides how much is sent. 0: no limit.

    Raises:
        TopologyError: nothing arrives.
    """
    num_chunks = max(4, round((rate_mbit or 8000.0) * 1e6 / 8 * 0.5 / len(_CHUNK)))
    module = [sys.executable, "-m", "benchmarks.datacentre.links"]
    receiver = subprocess.Popen(
        network.command(target, [*module, "receive", network.address(target)]),
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        send = [*module, "send", network.address(target), port, str(num_chunks)]
        sender = subprocess.run(network.command(source, send), cwd=ROOT, timeout=_TIMEOUT_S, stderr=subprocess.PIPE)
        answer = receiver.communicate(timeout=_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired as error:
        raise _dead(source, target, str(error)) from error
    finally:
        receiver.kill()
        receiver.wait()
    if sender.returncode or not answer:
        raise _dead(source, target, sender.stderr.decode(errors="replace").strip().splitlines()[-1:] or "no answer")
    heard = json.loads(answer)
    return heard["bytes"] * 8 / 1e6 / heard["seconds"]


def _dead(source: int, target: int, found: object) -> TopologyError:
    return TopologyError(
        expected=f"bytes from host {source} on host {target}",
        found=str(found),
        where="self-check of the emulated links",
        ways_out=("run again", "--plain runs the ranks without emulated links"),
    )


def _receive(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(_TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    count, begin = 0, 0.0
    while chunk := connection.recv(len(_CHUNK)):
        count += len(chunk)
        if not begin and count >= len(_CHUNK):  # buckets that were full at the start are empty now
            count, begin = 0, time.perf_counter()
    print(json.dumps({"bytes": count, "seconds": time.perf_counter() - begin}), flush=True)


def _send(address: str, port: int, num_chunks: int) -> None:
    with socket.create_connection((address, port), timeout=_TIMEOUT_S) as connection:
        for _ in range(num_chunks):
            connection.sendall(_CHUNK)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2])
    else:
        _send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
