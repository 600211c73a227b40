"""Golden requests: questions of an export with the answers that it gave when it was made.

Loading an export asks them again, so that another version of a library, a kernel or a processor that computes something
else is found before the first user asks, not after. Scores may differ by 1e-4 (other machines round in another order);
items may change places only where their scores are that close.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypedDict

from ziggurat.errors import ConfigError, ExportError, ZigguratError
from ziggurat.files import Format
from ziggurat.serving.answers import Ranked, RankRequest, Recommendations, RecommendRequest
from ziggurat.serving.export.export_folder import ExportFolder
from ziggurat.serving.value_model.formula import LOWEST

GOLDEN_FILE = "golden.json"
GOLDEN = Format(name="ziggurat.export_golden", what="the golden requests of an export", error=ExportError)
TOLERANCE = 1e-4


class _Golden(TypedDict):
    """A request that was asked when the export was made, and the ids and scores of its answer."""

    request: dict[str, object]
    items: list[tuple[str, float]]


class Asked(Protocol):
    """Answers requests one at a time or together."""

    def recommend_many(self, requests: Sequence[RecommendRequest]) -> list[Recommendations | ZigguratError]:
        """Answers, or errors in their places."""
        ...

    def rank_many(self, requests: Sequence[RankRequest]) -> list[Ranked | ZigguratError]:
        """Answers, or errors in their places."""
        ...


def write_golden(asked: Asked, requests: Sequence[dict[str, object]], path: Path) -> None:
    """Answer requests and keep both.

    Args:
        asked: the export.
        requests: {"recommend": …} or {"rank": …}, as plain data.
        path: the file to write.

    Raises:
        ZigguratError: a request cannot be answered, or no item of any answer has a finite value.
    """
    kept: list[_Golden] = []
    for request in requests:
        answer = _ask(asked, request)
        if isinstance(answer, ZigguratError):
            raise answer
        kept.append({"request": request, "items": [(item.id, item.score) for item in answer.items]})
    scores = [score for entry in kept for _, score in entry["items"]]
    if scores and max(scores) <= LOWEST:
        raise ConfigError(
            expected="a value formula that gives some item a finite number",
            found=f"none for the {len(scores):,} items of {len(kept):,} answers",
            where="value model, golden requests of the export",
            ways_out=("look for divisions by zero, and for log of what is not above it", "--value retrieval"),
        )
    GOLDEN.write(path, {"requests": kept})


def read_requests(export: ExportFolder) -> tuple[dict[str, object], ...]:
    """The golden requests without their answers; none where the export has none."""
    if not export.has(GOLDEN_FILE):
        return ()
    return tuple(entry["request"] for entry in export.read(GOLDEN_FILE, GOLDEN)["requests"])


def check_golden(asked: Asked, export: ExportFolder) -> int:
    """Ask all golden requests of an export again.

    Returns:
        Their number.

    Raises:
        ExportError: an answer differs by more than rounding.
    """
    if not export.has(GOLDEN_FILE):
        return 0
    entries: list[_Golden] = export.read(GOLDEN_FILE, GOLDEN)["requests"]
    for number, entry in enumerate(entries):
        answer = _ask(asked, entry["request"])
        wrong = str(answer) if isinstance(answer, ZigguratError) else _difference(entry["items"], answer)
        if wrong:
            raise ExportError(
                expected="the answer that the export gave when it was made",
                found=wrong,
                where=f"{export.path / GOLDEN_FILE}, request {number}: {str(entry['request'])[:200]}",
                ways_out=(
                    "`ziggurat doctor` says which kernels this machine uses",
                    "make the export again here, and compare",
                    "load without the check: Recommender.load(folder, check=False)",
                ),
            )
    return len(entries)


def _ask(asked: Asked, request: dict[str, object]) -> Recommendations | Ranked | ZigguratError:
    if "recommend" in request:
        return asked.recommend_many([RecommendRequest.from_json(request["recommend"])])[0]
    return asked.rank_many([RankRequest.from_json(request["rank"])])[0]


def _difference(kept: Sequence[tuple[str, float]], answer: Recommendations | Ranked) -> str:
    """Say what differs, or return "" if nothing does."""
    if len(kept) != len(answer.items):
        return f"{len(answer.items)} items instead of {len(kept)}"
    for place, ((_, score), item) in enumerate(zip(kept, answer.items, strict=True)):
        if abs(score - item.score) > _bound(score):
            return f"score {item.score:.7g} instead of {score:.7g} in place {place}"
    found = {item.id for item in answer.items}
    lowest = kept[-1][1] if kept else 0.0
    for name, score in kept:
        # Either of the two scores may be off by the bound.
        if name not in found and score > lowest + 2 * _bound(score):
            return f"item {name!r} with score {score:.7g} is gone"
    return ""


def _bound(score: float) -> float:
    return TOLERANCE * max(1.0, abs(score))
