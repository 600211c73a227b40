"""The files of the training log: metrics.jsonl, one JSON object a line, and the same numbers for TensorBoard.

A run that was killed has logged steps that its last checkpoint does not know. Resuming cuts the log back to that
checkpoint's step, trains those steps again, and the log ends as if nothing had happened. Wall-clock values stand under
`timing`, so that everything else is comparable between runs to the last bit. Where the package tensorboard is not
there, metrics.jsonl has every number, and the start-up report says so.

Both are written by hooks (`hooks/writers.py`) that see one stream of records; the HTML report is made of metrics.jsonl,
also of a run that ended long ago.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ziggurat.errors import ConfigError, FileError
from ziggurat.files import write_text, writing_to
from ziggurat.plain import JSON

_SHOWN_EVERY_S = 30.0
_OUR_KINDS = ("train", "valid", "skipped", "products")  # of lines whose numbers reports and studies rely on


# A line of the log: `kind`, `step`, and by name what its kind has, numbers most of the time.
LogRecord = dict[str, Any]


class MetricsFile:
    """Appends lines to metrics.jsonl, after cutting it back to the step where a run goes on.

    Args:
        path: the file.
        resume_step: keep what was logged up to this step and cut the rest; None starts a new log.
    """

    def __init__(self, path: Path, *, resume_step: int | None = None) -> None:
        self._path = path
        with writing_to(path, FileError):
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                path.write_text("", encoding="utf-8")
            else:
                _cut(path, last_step=resume_step)
            self._file = path.open("a", encoding="utf-8")

    def append(self, record: Mapping[str, object], *, timing: Mapping[str, object] | None = None) -> None:
        """Write one record; it must hold `kind` and `step`."""
        line = {**record, "timing": dict(timing)} if timing else dict(record)
        with writing_to(self._path, FileError):
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def flush(self) -> None:
        """Hand everything to the operating system, and wait for the disk."""
        with writing_to(self._path, FileError):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close."""
        with writing_to(self._path, FileError):
            self._file.close()  # flushes, and gives the file back even where that fails


class _Event(Protocol):
    """An event of TensorBoard, whose class a compiler of protocol buffers wrote without types."""

    wall_time: float

    def SerializeToString(self) -> bytes: ...  # noqa: N802  # their name


class EventsFile:
    """A file of TensorBoard's events, written where it is told to.

    TensorBoard's own writer has a thread, whose traceback is on the screen before anybody can say that a disk is full.

    Args:
        folder: of event files; this one gets a name of its own.
        purge_step: TensorBoard is to forget what other files say from this step on.
    """

    def __init__(self, folder: Path, *, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar

        self._make_event = Event
        self._make_scalar = scalar
        self._folder = folder
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{os.urandom(4).hex()}"
        self._flushed_at = time.time()
        with writing_to(folder, FileError):
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / name).open("wb")
            self._records = RecordWriter(self._file)
            self._add(Event(file_version="brain.Event:2"))
            if purge_step is not None:
                self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def append(self, record: Mapping[str, object], *, timing: Mapping[str, object] | None = None) -> None:
        """Write the numbers of one record, as `kind/name`."""
        with writing_to(self._folder, FileError):
            for name, value in {**record, **(timing or {})}.items():
                if isinstance(value, int | float) and name != "step":
                    event = self._make_event(
                        step=record["step"], summary=self._make_scalar(f"{record['kind']}/{name}", value)
                    )
                    self._add(event)

    def flush(self) -> None:
        """Hand everything to the operating system."""
        with writing_to(self._folder, FileError):
            self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        with writing_to(self._folder, FileError):
            self._file.close()

    def _add(self, event: _Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        if event.wall_time - self._flushed_at > _SHOWN_EVERY_S:  # for who watches a run
            self._flushed_at = event.wall_time
            self._file.flush()


def check_record(record: Mapping[str, object], *, timing: Mapping[str, object], present_step: int) -> None:
    """Refuse a line of the user's that could not be written, or that what reads the log could not read.

    Args:
        record: see `Trainer.record`.
        timing: see `Trainer.record`.
        present_step: of the run.

    Raises:
        ConfigError: it is such a line.
    """
    for argument, given in (("record", record), ("timing", timing)):
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise _no_record(
                expected="a mapping of names to plain data",
                found=repr(given),
                about=f"argument {argument!r}",
                present_step=present_step,
                ways_out='trainer.record({"kind": "mine", "value": 1.0})',
            )
        for name, value in given.items():
            if problem := _why_not_plain(value):
                raise _no_record(
                    expected="plain data: numbers, text, True, False, None, and lists and mappings of them",
                    found=f"{type(value).__name__}: {problem}",
                    about=f"argument {argument!r}, {name!r}",
                    present_step=present_step,
                    ways_out=(
                        f"float({name}) for one number, also one of a tensor or of NumPy",
                        f"{name}.tolist() for a tensor or an array",
                        f"str({name}) for anything else",
                    ),
                )
    kind = record.get("kind")
    if not isinstance(kind, str) or not kind or kind in _OUR_KINDS:
        raise _no_record(
            expected=f"a kind of your own, other than those that training writes: {', '.join(_OUR_KINDS)}",
            found=repr(kind) if "kind" in record else "no kind",
            about="'kind'",
            present_step=present_step,
            ways_out='"kind": "mine"',
        )
    step = record.get("step", present_step)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= present_step:
        raise _no_record(
            expected=f"a step that is made: a whole number from 0 to {present_step:,}",
            found=repr(step),
            about="'step'",
            present_step=present_step,
            ways_out=("leave it out: then it is the present step", f'"step": {present_step}'),
        )


def _why_not_plain(value: object) -> str:
    """Return why a value cannot stand in the log; "" if it can."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
        if isinstance(value, int):
            float(value)  # what TensorBoard and callbacks are told
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        return str(error)
    return ""


def _no_record(
    *, expected: str, found: str, about: str, present_step: int, ways_out: str | tuple[str, ...]
) -> ConfigError:
    return ConfigError(
        expected=expected,
        found=found[:200],
        where=f"Trainer.record, {about}, at step {present_step:,}",
        ways_out=ways_out,
    )


@functools.cache
def why_no_events() -> str:
    """The reason why no event files for TensorBoard are written here; "" if they are."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        return f"no package tensorboard ({error})"
    return ""


def read_records(path: Path) -> list[LogRecord]:
    """All complete records of a log, in order, up to the first that is damaged, or torn at the end (kill -9)."""
    return _records_and_rest(path)[0]


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file of JSON lines.

    Not by `splitlines`: text in a record may hold other ends of lines, such as U+2028, as they are.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    return text.removesuffix("\n").split("\n") if text else []


def num_lost_lines(path: Path) -> int:
    """Return how many lines `read_records` leaves out, but for one that was torn at the end (kill -9)."""
    num_left_out = _records_and_rest(path)[1]
    is_torn = num_left_out == 1 and not path.read_bytes().endswith(b"\n")
    return 0 if is_torn else num_left_out


def _records_and_rest(path: Path) -> tuple[list[LogRecord], int]:
    """Return the records before the first damaged line, and the number of lines from there on."""
    records: list[LogRecord] = []
    if not path.is_file():
        return records, 0
    lines = lines_of(path)
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not _is_readable(record):
            break
        records.append(record)
    return records, len(lines) - len(records)


def _is_readable(record: dict[str, JSON]) -> bool:
    """Return whether a line has what reports and studies read in lines of its kind without a further look."""
    kind = record.get("kind")
    if not _is_number(record.get("step")) or isinstance(record["step"], float) or not isinstance(kind, str):
        return False
    if not isinstance(record.get("timing", {}), dict):
        return False
    if kind == "products":
        return isinstance(record.get("sent_back"), str)
    if kind not in ("train", "valid"):
        return True
    # Earlier versions wrote null for a metric that is undefined.
    numbers = [value for name, value in record.items() if name not in ("kind", "timing")]
    return all(_is_number(value) or (value is None and kind == "valid") for value in numbers)


def _is_number(value: JSON) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cut(path: Path, *, last_step: int) -> None:
    kept = [record for record in read_records(path) if record["step"] <= last_step]
    content = path.read_bytes() if path.is_file() else b""
    if kept and content.endswith(b"\n") and content.count(b"\n") == len(kept):
        return  # nothing to cut; the file keeps its bytes
    write_text(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
