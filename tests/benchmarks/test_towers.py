"""The towers benchmark: its options, its arithmetic, and tiny models on plain local ranks. Nothing is timed."""

import signal
import sys

import pytest

from benchmarks import main, towers
from benchmarks.datacentre.network import NetworkConfig, PlainNetwork
from benchmarks.harness import PEERS, ROOT
from benchmarks.limits import Bf16Probe
from benchmarks.our_ranks import split_features
from benchmarks.rank_batches import rank_batches
from benchmarks.towers_plot import cases_table, profile_table
from benchmarks.towers_rounds import RoundsConfig, Timed, counted_bytes, measure_side_by_side
from benchmarks.workload import ModelKind, Workload, make_batches

TWO = NetworkConfig(hosts=2, ranks_per_host=2, rate_mbit=100.0)


def tiny(**settings: object) -> Workload:
    return Workload(**{"dim": 16, "batch_size": 6, "num_rows": 40, "num_batches": 2, **settings})  # type: ignore[arg-type]


def timed(name: str, step_ms: list[float], *, cross_host: int = 0, dense: int = 0, **more: object) -> Timed:
    rows = [
        {"purpose": "inter-group all-to-all forward", "link": "cross_host", "bytes": cross_host},
        {"purpose": "dense gradients", "link": "reduced", "bytes": dense},
    ]
    return Timed(
        name=name,
        step_ms=step_ms,
        cpu_ms=[1.0],
        profile={"bytes_of_all_ranks": rows, "phases_ms_of_rank_0": {"lookup": 1.0}},
        **more,  # type: ignore[arg-type]
    )


def all_timed() -> dict[str, Timed]:
    found = {name: timed(name, [40.0, 44.0]) for name in ("flat_fp32", "flat_bf16")}
    for compression in (4, 16):
        for wire in ("fp32", "bf16"):
            name = f"compression{compression}_{wire}"
            found[name] = timed(name, [20.0, 22.0], cross_host=200_000, dense=400_000, free_ms=[15.0])
    found["table_wise"] = Timed(name="table_wise", step_ms=[60.0, 66.0], cpu_ms=[1.0])
    found["table_row_wise"] = Timed(name="table_row_wise", step_ms=[80.0, 60.0], cpu_ms=[1.0])
    return found


def test_options_reach_the_benchmark_and_others_have_none(monkeypatch):
    options = towers.parse_options(["--rate", "200", "--hosts", "4", "--plain", "--dims", "64"])
    assert (options.rate, options.hosts, options.plain, options.dims, options.batch) == (200.0, 4, True, "64", 1024)
    with pytest.raises(SystemExit):
        main.main(["train", "--rate", "5"])
    with pytest.raises(SystemExit):
        main.main(["towers", "--no-such-option"])


def test_a_wrong_name_gets_the_nearest_one(capsys):
    assert main.main(["towerz"]) == 1
    assert 'did you mean "towers"?' in capsys.readouterr().err


def test_a_tower_is_a_host_or_a_rack():
    by_host = towers.variants_for(NetworkConfig(hosts=4, ranks_per_host=1))
    assert {(each.towers, each.tower_size) for each in by_host if each.towers} == {(4, 1)}
    by_rack = towers.variants_for(NetworkConfig(hosts=4, ranks_per_host=1, racks=2))
    assert {(each.towers, each.tower_size) for each in by_rack if each.towers} == {(2, 2)}
    assert {each.name for each in by_host} >= {"flat_fp32", "flat_bf16", "compression4_fp32", "compression16_bf16"}


def test_features_are_split_evenly_and_all_are_there():
    found = split_features(tiny(), num_towers=4)
    assert [len(tower) for tower in found.towers] == [6, 7, 6, 7]
    assert set(found.features) == {f"c{index}" for index in range(26)}


def test_ranks_share_the_global_batch():
    workload = tiny()
    parts = [rank_batches(workload, rank=rank, world_size=3) for rank in range(3)]
    whole = make_batches(tiny(batch_size=18))
    for index, raw in enumerate(whole):
        for feature, ids in enumerate(raw.ids):
            assert [row for part in parts for row in part[index].ids[feature].tolist()] == ids.tolist()


def test_bytes_of_a_ring_over_two_hosts():
    found = counted_bytes(timed("x", [1.0], cross_host=1000, dense=4 * 800), TWO)
    assert found == {"exchanges": 1000, "dense_gradients": 2 * 2 * 800 * 3 / 4}


def test_cases_compare_with_the_best_peer_round_by_round():
    cases = {case["name"]: case for case in towers.cases_of(TWO, tiny(dim=64), all_timed(), tag="", goals=True)}
    case = cases["dlrm_d64_torchrec_compression4_bf16"]
    assert (case["flat_torchrec"], case["flat_torchrec_ms"], case["towers_ms"]) == ("table_wise", 63.0, 21.0)
    assert case["ratio"] == pytest.approx(3.0)
    assert (case["goal"], case["verdict"]) == (2.5, "met")
    assert (case["goal_flat"], case["verdict_flat"]) == (1.5, "met")
    # Exchanges 0.2 MB of both hosts, dense gradients 0.1 MB by 1.5 of each: 0.25 MB a link at 100 Mbit/s.
    assert case["bytes_ms"] == pytest.approx(20.0)
    assert (case["compute_ms"], case["limit_ms"]) == (15.0, pytest.approx(20.0))
    assert case["limit_factor"] == pytest.approx(21.0 / 20.0)
    assert "**3.00**" in cases_table(list(cases.values()))
    assert cases["dlrm_d64_torchrec_compression16_fp32"]["verdict"] == ""


def test_without_links_times_are_predicted_from_bytes():
    found = all_timed()
    towers._predict(found, TWO)
    assert found["compression4_bf16"].step_ms == pytest.approx([40.0, 42.0])  # 20 ms for 0.25 MB
    assert found["compression4_bf16"].compute_ms == 21.0
    assert found["table_wise"].step_ms == [60.0, 66.0]  # as our flat FP32 model, which sends nothing here


@pytest.mark.parametrize(
    "model", [ModelKind.DLRM, pytest.param(ModelKind.DCN_V2, marks=pytest.mark.slow)], ids=["dlrm", "dcn_v2"]
)
def test_tiny_models_on_plain_ranks(model):
    config = NetworkConfig(hosts=2, ranks_per_host=1, rate_mbit=100.0)
    variants = [each for each in towers.variants_for(config) if each.name in ("flat_fp32", "compression4_bf16")]
    found = measure_side_by_side(
        PlainNetwork(config=config, reason="a test"),
        tiny(model=model),
        variants=variants,
        rates_mbit=[100.0],
        config=RoundsConfig(rounds=2, turn_s=0.01, warmup_steps=1),
        peers=(),
        python=sys.executable,
    )[100.0]
    flat, compressed = found["flat_fp32"], found["compression4_bf16"]
    assert [len(each.step_ms) for each in (flat, compressed)] == [2, 2]
    flat_bytes, tower_bytes = (counted_bytes(each, config)["exchanges"] for each in (flat, compressed))
    # FP32 both ways for half of the features; ids and sizes besides. Towers: a quarter of the columns, half the width.
    assert 2 * 2 * 6 * 13 * 16 * 4 <= flat_bytes <= 1.2 * 2 * 2 * 6 * 13 * 16 * 4
    assert tower_bytes < flat_bytes / 4
    assert {"lookup", "dense forward", "table optimizer"} <= compressed.profile["phases_ms_of_rank_0"].keys()
    runs = [{"name": "tiny", "network": config.describe(), "variants": [each.to_json() for each in found.values()]}]
    assert "| lookup |" in profile_table(runs)


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / PEERS).is_dir(), reason="no environment of the peers: bash benchmarks/setup.sh")
def test_the_command_on_plain_ranks(tmp_path, capsys):
    words = ["towers", "--quick", "--plain", "--batch", "8", "--rows", "50", "--models", "dlrm", "--dims", "16"]
    assert main.main([*words, "--no-extras", "--json", str(tmp_path / "out.json")]) == 0
    assert "predicted" in capsys.readouterr().out
    assert '"dlrm_d16_torchrec_compression4_fp32"' in (tmp_path / "out.json").read_text()


def test_an_interrupted_run_reports_what_it_has(monkeypatch):
    def interrupted(self: towers.TowersBenchmark) -> None:
        self.cases += towers.cases_of(TWO, tiny(dim=64), all_timed(), tag="", goals=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(towers.TowersBenchmark, "measure", interrupted)
    monkeypatch.setattr(towers, "probe_bf16", lambda: Bf16Probe(fp32_gflop_per_s=2.0, bf16_gflop_per_s=1.0))
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        report = towers.run(quick=True)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    assert report.skipped == ["interrupted: what was measured until then"]
    assert "dlrm_d64_torchrec_compression4_bf16" in report.tables[0]
