"""Attack jobs of several ranks: one differs from the others, is killed, or stands still, at a random moment.

    python -m tests.attacks.ranks --count 30 --seed 0

    class              what is done to a random rank           what must follow
    ranks that differ  another setting, model, plan or data    all ranks name it before the first step; no file is made
    killed ranks       SIGKILL at a random moment of training  the others end with an error in four parts; the restarted
                                                               job ends with the bits of one that was left alone
    stopped ranks      SIGSTOP at a random moment              the others end with an error in four parts

Outcomes: found; same (the job was over before the moment came, with the right bits); silent (trained on, or other bits
after the restart); crashed (any other end); hung (no end within `LIMIT_S`). The last three are defects.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.files import DEFECTS, Case, run_attack
from tests.end_to_end import test_killed_ranks as killed
from tests.end_to_end import test_stopped_ranks as stopped
from tests.training.rank_runs import model_of, plan_of, training_config
from tests.training.test_ranks_that_differ import FLAT, SETTINGS, error_of
from tests.training.tiny import tiny_dataset
from ziggurat.models import build_model
from ziggurat.models.blocks.mlp import MLPConfig
from ziggurat.parallel.dense import DenseParallelism, Reduction
from ziggurat.parallel.exchange.wire import WireConfig, WireFormat
from ziggurat.parallel.parallelize import ParallelConfig, parallelize
from ziggurat.parallel.topology import Topology
from ziggurat.placements import Placement
from ziggurat.testing.ranks import RankFailure, run_ranks
from ziggurat.training.trainer import Trainer

LIMIT_S = 90.0  # on a machine that does something else, too
DIFFER, KILLED, STOPPED = "ranks that differ", "killed ranks", "stopped ranks"
_MODELS: dict[str, dict[str, Any]] = {
    "dropout": {"bottom": MLPConfig(hidden_dims=(9,), dropout=0.5)},
    "hidden-dims": {"top": MLPConfig(hidden_dims=(8,))},
    "embedding-dim": {"embedding_dim": 16},
}
_WAYS: dict[str, ParallelConfig] = {
    "parallel.dense": ParallelConfig(dense=DenseParallelism.FSDP),
    "parallel.wire": ParallelConfig(wire=WireConfig(between_towers=WireFormat.BF16)),
    "parallel.reduction": ParallelConfig(reduction=Reduction.BF16),
    "parallel.num-parts": ParallelConfig(num_parts=2),
}
WORDS = (*SETTINGS, *_MODELS, *_WAYS, "placement", "seed", "weight", "data train content", "folder")


def differing(rank: int, draws: list[tuple[str, int]], folder: str) -> list[str]:
    """What this rank says of each (word of WORDS, rank that differs)."""
    said = []
    for number, (word, odd) in enumerate(draws):
        said.append(error_of(_attempt(word, is_odd=rank == odd, folder=f"{folder}/{number}")))
    return said


def _attempt(word: str, *, is_odd: bool, folder: str) -> Callable[[], Any]:
    world_size = int(os.environ["WORLD_SIZE"])

    def attempt() -> None:
        mine = word if is_odd else ""
        case = dataclasses.replace(FLAT, placement=Placement.ROW_WISE) if mine == "placement" else FLAT
        model = model_of(FLAT)
        if mine in _MODELS:
            model = build_model(dataclasses.replace(model.config, **_MODELS[mine]), model.inputs, seed=3)
        if mine == "weight":
            next(model.parameters()).data.view(-1)[0] += 1
        plan, way = plan_of(case, world_size), _WAYS.get(mine, ParallelConfig())
        seed = 4 if mine == "seed" else 3
        parallel = parallelize(model, plan, Topology.create(), config=way, seed=seed)
        config = training_config(world_size, **SETTINGS.get(mine, {}))
        train = tiny_dataset(200, seed=7) if mine == "data train content" else tiny_dataset(200)
        where = f"{folder}-other" if mine == "folder" else folder
        valid = tiny_dataset(101, seed=1)
        Trainer(model, config=config, train=train, valid=valid, folder=where, parallel=parallel)

    return attempt


def attack_differing(draw: random.Random, *, count: int) -> list[tuple[str, str, str]]:
    """(what, outcome, detail) of `count` differences, in one start of ranks."""
    world_size = draw.choice([2, 3, 4])
    return try_differing([(draw.choice(WORDS), draw.randrange(world_size)) for _ in range(count)], world_size)


def try_differing(draws: list[tuple[str, int]], world_size: int) -> list[tuple[str, str, str]]:
    """(what, outcome, detail) of each (word of WORDS, rank that differs); one by one where all together fail."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            answers = run_ranks(differing, world_size, draws, folder, timeout_s=LIMIT_S)
        except RankFailure as failure:
            if len(draws) > 1:
                return [each for one in draws for each in try_differing([one], world_size)]
            outcome = "hung" if "did not return in time" in str(failure) else "crashed"
            return [(f"{draws[0]} of {world_size}", outcome, str(failure)[-1500:])]
        written = any(Path(folder).iterdir())
    found = []
    for (word, odd), said in zip(draws, zip(*answers, strict=True), strict=True):
        whole = all("expected:" in text and "ways out:" in text and word.partition(":")[0] in text for text in said)
        silent = any(text == "no error" for text in said)
        outcome = "silent" if silent or written else "found" if whole and len(set(said)) == 1 else "crashed"
        found.append((f"{word}, rank {odd} of {world_size}", outcome, "\n".join(said)))
    return found


def attack_killed(draw: random.Random, *, place: Path, alone: dict[int, tuple[Path, float]]) -> tuple[str, str, str]:
    """Kill one rank at a random moment, restart, and compare with the job that was left alone."""
    world_size = draw.choice([2, 2, 4])
    whole, seconds = alone[world_size]
    victim, moment = draw.randrange(world_size), draw.uniform(0.0, 0.9) * seconds
    what = f"rank {victim} of {world_size} killed after {moment:.1f} s"
    processes = killed.start(world_size, place, attempt=0)
    _training_begins(place)
    time.sleep(moment)
    processes[victim].kill()
    codes = killed.ends(processes, limit_s=LIMIT_S)
    if None in codes:
        return what, "hung", str(codes)
    errors = [path.read_text() for path in sorted(place.glob("error0_*"))]
    others = [code for rank, code in enumerate(codes) if rank != victim]
    if codes[victim] == -signal.SIGKILL and any(code not in (0, killed.SAW_IT) for code in others):
        return what, "crashed", f"{codes} {errors}"
    if not all("expected:" in text and "ways out:" in text for text in errors):
        return what, "crashed", f"{codes} {errors}"
    again = killed.ends(killed.start(world_size, place, attempt=1), limit_s=LIMIT_S)
    if again != [0] * world_size:
        return what, "hung" if None in again else "crashed", f"restarted: {again}"
    try:
        killed.same(whole, place)
    except AssertionError as error:
        return what, "silent", f"other bits after the restart: {error}"[:1500]
    return what, "found" if codes[victim] == -signal.SIGKILL and killed.SAW_IT in others else "same", ""


def _training_begins(place: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not (place / "run").exists() and time.monotonic() < end:
        time.sleep(0.01)


def attack_stopped(draw: random.Random, *, place: Path, seconds: float) -> tuple[str, str, str]:
    """Stop one of two ranks at a random moment; the other must end and say why."""
    victim, moment = draw.randrange(2), draw.uniform(0.05, 1.0) * seconds
    what = f"rank {victim} of 2 stopped after {moment:.1f} s"
    limits = [f"--parallel.{name}" for name in ("timeout-s", "prepare-timeout-s")]
    arguments = [*stopped.TRAIN, *(part for name in limits for part in (name, "5")), "--out", "runs/a"]
    job = stopped.start(place, ranks=(0, 1), stops=-1, arguments=[*arguments, "--training.checkpoint.timeout-s", "5"])
    try:
        time.sleep(moment)
        if job[victim].is_alive():
            os.kill(job[victim].pid or 0, signal.SIGSTOP)
        job[1 - victim].join(LIMIT_S)
        code = job[1 - victim].exitcode
    finally:
        for process in job:
            process.kill()
            process.join()
    log = place / f"rank{1 - victim}.log"
    text = log.read_text() if log.exists() else ""
    if code is None:
        return what, "hung", text[-1500:]
    if code == 0:  # the moment came when nothing was left to wait for
        return what, "same", ""
    whole = code == 2 and "expected: " in text and "ways out:" in text and "Traceback" not in text
    return what, "found" if whole else "crashed", text[-1500:]


def attack(*, count: int, seed: int, seconds: float) -> list[Case]:
    """Try `count` cases of the three classes in turn, or as many as fit in `seconds`."""
    end, cases = time.monotonic() + seconds, list[Case]()

    def keep(target: str, each: tuple[str, str, str]) -> None:
        what, outcome, detail = each
        cases.append(Case(len(cases), target, what, outcome, detail if outcome in DEFECTS else ""))

    run_ranks(killed.nothing, 2)  # starts the fork server with everything loaded
    with tempfile.TemporaryDirectory() as name:
        place, alone, number = Path(name), dict[int, tuple[Path, float]](), 0
        for world_size in (2, 4):
            processes = killed.start(world_size, place / f"alone{world_size}", attempt=0)
            _training_begins(place / f"alone{world_size}")
            begin = time.monotonic()
            ended = killed.ends(processes)
            assert ended == [0] * world_size, ended
            alone[world_size] = (place / f"alone{world_size}", time.monotonic() - begin)
        while len(cases) < count and time.monotonic() < end:
            draw, number = random.Random(f"{seed}/{number}"), number + 1
            for each in attack_differing(draw, count=min(6, count - len(cases))):
                keep(DIFFER, each)
            if len(cases) < count and time.monotonic() < end:
                keep(KILLED, attack_killed(draw, place=place / f"killed{number}", alone=alone))
            if len(cases) < count and time.monotonic() < end:
                keep(STOPPED, attack_stopped(draw, place=place / f"stopped{number}", seconds=3 + 1.5 * alone[2][1]))
    return cases


def main(arguments: list[str] | None = None) -> int:
    """Attack, print every defect and the table."""
    return run_attack(attack, arguments, doc=__doc__, count=30, shown=1500)


if __name__ == "__main__":
    # Under its own name, so that ranks see the same functions, and none of them runs this file again as its main one.
    from tests.attacks import ranks

    sys.modules["__main__"].__spec__, sys.modules["__main__"].__file__ = None, None

    sys.exit(ranks.main())
