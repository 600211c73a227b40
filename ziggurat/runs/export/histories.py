"""Write the table from users to their last vectors into an export, and say how old it is."""

from __future__ import annotations

from pathlib import Path

from ziggurat.data.streams.windows import Clock
from ziggurat.data.teachers.join import TeacherJoin
from ziggurat.features.kinds import TeacherHistory
from ziggurat.features.schema import Schema, column_of
from ziggurat.serving.answering.histories import SnapshotFacts, write_snapshot


def names_users(feature: TeacherHistory, schema: Schema) -> bool:
    """Return whether requests name the users of a history: another feature reads their column."""
    return feature.key in {each.about for each in schema.features if each is not feature}


def missing_histories(join: TeacherJoin | None, schema: Schema) -> list[str]:
    """Return a line for each history of which an export has no table, and why."""
    lines: list[str] = []
    for history in () if join is None else join.histories:
        feature = history.feature
        brings = (
            f"{column_of(feature)!r} themselves, a list of at most {feature.length} vectors of {feature.dim} numbers, "
            "the latest first, or are scored without one"
        )
        if not names_users(feature, schema):
            lines.append(
                f"no histories: no feature reads {feature.key!r}, so requests do not say whose history is wanted; they "
                f"bring {brings}"
            )
        elif not len(history.keys()):
            lines.append(f"no histories: no vectors by {feature.key!r} are logged yet; requests bring {brings}")
    return lines


def age_of_histories(join: TeacherJoin | None, schema: Schema) -> list[str]:
    """Return a line for each table of histories of an export: of how many users, and up to when."""
    lines: list[str] = []
    for history in () if join is None else join.histories:
        feature = history.feature
        num_users = len(history.keys())
        if not num_users or not names_users(feature, schema):
            continue
        clock = Clock(per_second=1 if all(each.is_calendar for each in history.facts) else 0)
        lines.append(
            f"histories of {num_users:,} of {feature.key!r} up to {clock.shown(history.newest)}: later vectors are not "
            f"known to this export until it is made again, or a request brings {column_of(feature)!r}"
        )
    return lines


def write_histories(join: TeacherJoin | None, folder: Path, *, schema: Schema) -> dict[str, object]:
    """Write what the side table knows of each user now; return facts for the manifest, none without histories.

    Args:
        join: gives rows of a run the histories of their users; None: its model reads none.
        folder: of its part of the export.
        schema: of the run.
    """
    said: dict[str, object] = {}
    for history in () if join is None else join.histories:
        feature = history.feature
        keys = history.keys()
        if not len(keys) or not names_users(feature, schema):
            continue
        newest = max(history.facts, key=lambda each: each.watermark)
        facts = SnapshotFacts(
            key=feature.key,
            users=len(keys),
            newest=history.newest,
            watermark=newest.watermark,
            is_calendar=newest.is_calendar,
        )
        said[feature.name] = write_snapshot(folder, feature, facts=facts, keys=keys, words=history.latest_words(keys))
    return {"histories": said} if said else {}
