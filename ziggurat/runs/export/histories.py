"""Write the table from users to their last vectors into an export, and say how old it is."""

from __future__ import annotations

from pathlib import Path

from ziggurat.data.streams.windows import Clock
from ziggurat.features.schema import column_of
from ziggurat.runs.export.data import RunData
from ziggurat.serving.answering.histories import SnapshotFacts, write_snapshot
from ziggurat.training.report.progress import Progress


def write_histories(data: RunData, folder: Path, *, progress: Progress) -> dict[str, object]:
    """Write what the side table knows of each user now; return facts for the manifest, none without histories.

    Args:
        data: of the run whose model reads them.
        folder: of its part of the export.
        progress: is told what was written, and what requests must bring themselves.
    """
    said: dict[str, object] = {}
    for join in () if data.join is None else data.join.histories:
        feature = join.feature
        name = column_of(feature)
        if feature.key not in {each.about for each in data.schema.features if each is not feature}:
            progress.say(
                f"no histories: no feature reads {feature.key!r}, so requests do not say whose history is wanted; they "
                f"bring {name!r} themselves, a list of at most {feature.length} vectors of {feature.dim} numbers, the "
                "latest first, or are scored without one"
            )
            continue
        progress.begin(f"histories by {feature.key}", total=None)
        keys = join.keys()
        newest = max(join.facts, key=lambda each: each.watermark)
        facts = SnapshotFacts(
            key=feature.key,
            users=len(keys),
            newest=join.newest,
            watermark=newest.watermark,
            is_calendar=newest.is_calendar,
        )
        said[feature.name] = write_snapshot(folder, feature, facts=facts, keys=keys, words=join.latest_words(keys))
        progress.end()
        clock = Clock(per_second=1 if facts.is_calendar else 0)
        progress.say(
            f"histories of {facts.users:,} of {feature.key!r} up to {clock.shown(facts.newest)}: later vectors are not "
            f"known to this export until it is made again, or a request brings {name!r}"
        )
    return {"histories": said} if said else {}
