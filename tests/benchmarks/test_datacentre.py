"""The emulated data centre: hosts appear, links are limited, ranks run in them, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.datacentre.jobs import Job, JobSpec
from benchmarks.datacentre.links import measure_link
from benchmarks.datacentre.network import Network, NetworkConfig, PlainNetwork, open_network
from ziggurat.errors import ConfigError, TopologyError

ROOT = Path(__file__).resolve().parents[2]


def toy(**settings: object) -> JobSpec:
    timeout_s = float(str(settings.pop("timeout_s", 60.0)))
    return JobSpec(
        name="toy", python=sys.executable, module="tests.benchmarks.toy_ranks", settings=settings, timeout_s=timeout_s
    )


def plain(hosts: int = 2, ranks_per_host: int = 1) -> PlainNetwork:
    config = NetworkConfig(hosts=hosts, ranks_per_host=ranks_per_host)
    return PlainNetwork(config=config, reason="a test")


@pytest.fixture
def namespaces():
    """Skip where the machine allows none."""
    with open_network(NetworkConfig(hosts=1)) as network:
        if not network.is_emulated:
            pytest.skip(f"no namespaces here: {network.reason}")


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"hosts": 3, "racks": 2}, {"rate_mbit": -1.0}, {"ranks_per_host": 0}])
def test_impossible_data_centres_are_refused(wrong):
    with pytest.raises(ConfigError, match="ways out"):
        NetworkConfig(**wrong)


def test_plain_ranks_where_nothing_else_was_asked_for_or_is_possible(monkeypatch):
    with open_network(NetworkConfig(), emulate=False) as network:
        assert not network.is_emulated
    monkeypatch.setattr("benchmarks.datacentre.network.shutil.which", lambda tool: None)
    with open_network(NetworkConfig()) as network:
        assert not network.is_emulated
        assert "iproute2" in network.reason
        assert network.command(1, ["ls"]) == ["ls"]
        assert network.sent_bytes() == []


def test_a_job_of_plain_ranks_answers_and_ends():
    with Job(toy(), plain(hosts=1, ranks_per_host=2)) as job:
        assert [info["rank"] for info in job.infos] == [0, 1]
        assert [info["LOCAL_WORLD_SIZE"] for info in job.infos] == ["2", "2"]
        answers = job.ask({"op": "run", "name": "add", "steps": 2})
        assert [answer["value"] for answer in answers] == [6.0, 6.0]
        assert all(answer["seconds"] > 0 for answer in answers)
        pids = [info["pid"] for info in job.infos]
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("how", ["raise", pytest.param("die", marks=pytest.mark.slow)])
def test_the_rank_that_fails_is_named_with_its_log(how):
    with Job(toy(bad_rank=1), plain()) as job:
        pids = [info["pid"] for info in job.infos]
        with pytest.raises(TopologyError) as caught:
            job.ask({"op": "run", "name": how, "steps": 1})
    error = caught.value
    assert error.found.startswith("rank 1: ")
    assert {"raise": "ValueError: a bad number", "die": "code 7"}[how] in error.found
    assert "the last words of this rank" in error.found
    assert error.where.startswith("host 1")
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_a_rank_that_hangs_is_reported_in_time():
    begin = time.monotonic()
    with Job(toy(bad_rank=0, timeout_s=20.0), plain()) as job, pytest.raises(TopologyError, match="no answer of ranks"):
        job.ask({"op": "run", "name": "hang", "steps": 1})
    assert time.monotonic() - begin < 45


def test_hosts_have_addresses_and_limits_and_vanish(namespaces):
    with open_network(NetworkConfig(hosts=2, rate_mbit=100.0)) as network:
        assert isinstance(network, Network)
        shown = run_in(network, 1, "ip", "-br", "addr", "show", "dev", "eth0")
        assert "10.77.0.2/16" in shown
        assert "rate 100Mbit" in run_in(network, 0, "tc", "qdisc", "show", "dev", "eth0")
        network.limit(20.0)
        assert "rate 20Mbit" in run_in(network, 1, "tc", "qdisc", "show", "dev", "eth0")
        network.limit(0.0)
        network.limit(0.0)
        assert "tbf" not in run_in(network, 1, "tc", "qdisc", "show", "dev", "eth0")
        holders = [holder.pid for holder in network._holders]
    assert len(holders) == 3
    assert not any(is_running(pid) for pid in holders)
    assert "10.77." not in subprocess.run(["ip", "addr"], capture_output=True, text=True).stdout


def test_nothing_is_left_when_the_benchmark_raises(namespaces):
    holders = []

    def interrupted() -> None:
        with open_network(NetworkConfig(hosts=1)) as network:
            holders.extend(holder.pid for holder in network._holders)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(holders) == 2
    assert not any(is_running(pid) for pid in holders)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_benchmark_is_killed(namespaces, how):
    script = (
        "import signal, time\n"
        "from benchmarks.datacentre.network import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background\n"
        "with open_network(NetworkConfig(hosts=1)) as network:\n"
        "    print(*(holder.pid for holder in network._holders), flush=True)\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    holders = [int(pid) for pid in process.stdout.readline().split()]
    assert len(holders) == 2
    process.send_signal(how)
    process.communicate(timeout=20)
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in holders) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in holders)


@pytest.mark.slow
@pytest.mark.parametrize("with_user_namespace", [False, True])
def test_links_carry_what_was_asked_for(namespaces, with_user_namespace):
    if not with_user_namespace and os.geteuid() != 0:
        pytest.skip("needs root")
    config = NetworkConfig(hosts=4, racks=2, rate_mbit=100.0, rack_rate_mbit=50.0)
    with Network(config, with_user_namespace=with_user_namespace) as network:
        before = network.sent_bytes()
        assert measure_link(network, source=0, target=1, rate_mbit=100.0) == pytest.approx(95.0, rel=0.15)
        sent = [after - first for after, first in zip(network.sent_bytes(), before, strict=True)]
        assert sent[0] > 4 << 20
        assert max(sent[1:]) < 1 << 20
        assert measure_link(network, source=0, target=3, rate_mbit=50.0) == pytest.approx(47.0, rel=0.15)
        network.limit(0.0)
        assert measure_link(network, source=0, target=3, rate_mbit=0.0) > 300.0


@pytest.mark.slow
def test_a_job_runs_inside_the_hosts(namespaces):
    with open_network(NetworkConfig(hosts=2, ranks_per_host=2)) as network, Job(toy(), network) as job:
        assert [info["GLOO_SOCKET_IFNAME"] for info in job.infos] == ["eth0"] * 4
        assert [info["LOCAL_RANK"] for info in job.infos] == ["0", "1", "0", "1"]
        before = network.sent_bytes()
        assert [a["value"] for a in job.ask({"op": "run", "name": "add", "steps": 1})] == [10.0] * 4
        assert min(after - first for after, first in zip(network.sent_bytes(), before, strict=True)) > 0


def run_in(network: Network, host: int, *words: str) -> str:
    return subprocess.run(network.command(host, list(words)), capture_output=True, text=True, check=True).stdout


def is_running(pid: int) -> bool:
    """True unless the process is gone, or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
