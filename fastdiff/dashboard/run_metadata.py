"""Everything that the page shows of a run, read from its folder, and only what has changed since it was last asked."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdiff import sanitize
from fastdiff.dashboard.pictures import FOLDER as SAMPLES
from fastdiff.dashboard.pictures import Picture, pictures_of
from fastdiff.dashboard.series import Series, finite, plain
from fastdiff.dashboard.status import pulse, status_of
from fastdiff.dashboard.tail import Sink, Tail
from fastdiff.dashboard.timeline import time_of
from fastdiff.diffusion.snr_bins import SNR_EDGES
from fastdiff.errors import ConfigError
from fastdiff.evaluation.validation_files import LINES as VALIDATION
from fastdiff.json_lines import MALFORMED, Record, open_lines, parsed, record_of
from fastdiff.ledger.reader import Sums, read_ledger
from fastdiff.ledger.records import FILE as LEDGER
from fastdiff.run_files import read_inside

METRICS = "metrics.jsonl"
_EVENTS = {"spikes": "spikes.jsonl", "skipped": "skipped.jsonl", "damaged": "damaged.jsonl"}
_FILES = ("run.json", METRICS, VALIDATION, LEDGER, *_EVENTS.values(), SAMPLES, ".lock")
_MOST_RECORD, _TAIL = 2**23, 2**16
_MOST_COUNT = 10**15
"""Of steps or samples that are believed: a page counts no further."""
_POINTS = 1200
"""Buckets of a curve: more than a screen can show apart."""
_MOST_NEW = 300
"""New records that are sent one by one; a page that lacks more gets all anew."""
_MOST_EVENTS, _MOST_VALIDATIONS, _MOST_LINES = 500, 2000, 20

Have = dict[str, str]
"""What a page has: a tag by section."""


def signature(run: Path) -> str:
    """Return a short text that changes with the files of a run, and with the end of its process."""
    seen: list[object] = [pulse(run)]
    for path in (run, *(run / name for name in _FILES)):
        with suppress(OSError):
            status = path.stat(follow_symlinks=path == run)
            seen.append((path.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return _tag(seen)


def glance(run: Path) -> dict[str, Any]:
    """Return the state of a run in a line: of a few fields, without its curves."""
    about, last = _read_about(run).data, _last_record(run / METRICS)
    config, batch = _inner(about, "config"), _inner(about, "config", "batch")
    every, samples, batch_samples = (
        found if isinstance(found, int) and 0 < found < _MOST_COUNT else None
        for found in (_inner(config, "output").get("log_every"), config.get("samples"), batch.get("samples"))
    )
    steps = samples // batch_samples if samples and batch_samples else None
    first = min(every, steps) if every and steps else every  # the last step has a line, too
    status = status_of(run, _read_ledger(run), bool(last), first)
    return {
        "kind": status.kind,
        "text": status.text,
        "message": sanitize.message(status.message),
        "samples": samples,
        "steps": steps,
        "network": _text(_inner(config, "model").get("kind")),
        "objective": _text(_inner(config, "objective").get("process")),
        "last": {name: finite(last.get(name)) for name in ("step", "samples", "loss", "samples_per_s")},
    }


def unreadable(error: Exception) -> dict[str, Any]:
    """Return the state of a run whose files break the page in a way that nobody has thought of."""
    last = dict.fromkeys(("step", "samples", "loss", "samples_per_s"))
    text = f"its files cannot be read: {type(error).__name__}: {error}"
    nothing = dict.fromkeys(("samples", "steps", "network", "objective"))
    return {"kind": "unreadable", "text": text, "message": "", **nothing, "last": last}


class RunMetadata:
    """What is known of one run folder; it may be called by several threads.

    Its sections are ``about`` (``run.json``), ``metrics``, ``validation``, ``events`` (spikes, skipped steps
    and damaged samples), ``time`` (the ledger), ``pictures``, and ``left_out`` (what could not be read, by file, and
    why). Each has a tag that changes with its content; tags of
    another process, or of a file that has begun anew, are never equal.

    Args:
        folder: of the run. Once it is deleted, what was read of it stays.
        slice_s: seconds after which ``sections`` returns before it has read all of a long log.
    """

    def __init__(self, folder: Path, slice_s: float = math.inf) -> None:
        self.folder = folder
        self._slice_s = slice_s
        self._lock = threading.Lock()
        self._series = Series()
        self._validation, self._events = _Last(_MOST_VALIDATIONS), {name: _Last(_MOST_EVENTS) for name in _EVENTS}
        sinks: dict[str, Sink] = {METRICS: self._series, VALIDATION: self._validation}
        sinks |= {file: self._events[name] for name, file in _EVENTS.items()}
        self._logs = {file: Tail(folder / file, sink) for file, sink in sinks.items()}
        self._files: dict[str, tuple[object, _Read]] = {}
        """By name of a file that is read as a whole: its state and what was read."""
        self._pictures: dict[int, Picture] = {}
        """By step."""
        self._not_shown: list[str] = []
        """Pictures that are left out, and why."""

    def sections(self, have: Have) -> dict[str, Any]:
        """Read what is new; return ``{"tag": ..., "data": ...}`` by section, for those whose tag is not in ``have``.

        If a log is too long for one slice, there is only ``reading``, in bytes, until further calls have read it.
        """
        with self._lock:
            until = time.monotonic() + self._slice_s
            are_read = [log.read(until) for log in self._logs.values()]
            if not all(are_read):
                progress = {name: sum(getattr(log, name) for log in self._logs.values()) for name in ("offset", "size")}
                return {"reading": {"tag": "", "data": progress}}
            about = self._when_changed("run.json", lambda: _read_about(self.folder))
            spent = self._when_changed(LEDGER, lambda: _read_time(self.folder))
            self._list_pictures()
            found: dict[str, Any] = {"about": about.data, "time": spent.data}
            found["left_out"] = self._left_out(about, spent)
            found["validation"] = list(self._validation.records)
            found["events"] = {
                name: {"count": kept.count, "last": list(kept.records)} for name, kept in self._events.items()
            }
            found["pictures"] = [picture.as_json() for picture in self.pictures]
            tagged = {name: {"tag": _tag(data), "data": data} for name, data in found.items()}
            tagged["metrics"] = self._metrics(have.get("metrics", ""))
            return {name: section for name, section in tagged.items() if have.get(name) != section["tag"]}

    @property
    def pictures(self) -> list[Picture]:
        """The pictures as of the last reading."""
        return list(self._pictures.values())

    def picture(self, step: int) -> Picture | None:
        """Return the picture of a step, as of the last reading if it was there."""
        if step not in self._pictures:
            self._list_pictures()
        return self._pictures.get(step)

    def _list_pictures(self) -> None:
        if os.path.isdir(self.folder):
            pictures, self._not_shown = pictures_of(self.folder)
            self._pictures = {picture.step: picture for picture in pictures}

    def _left_out(self, about: _Read, spent: _Read) -> dict[str, list[str]]:
        """Return what could not be read and why, by file; files without are left out."""
        found = [("run.json", about.left_out), (LEDGER, spent.left_out), (SAMPLES, self._not_shown)]
        found += [(name, log.left_out) for name, log in self._logs.items()]
        return {name: list(lines) for name, lines in found if lines}

    def _metrics(self, have: str) -> dict[str, Any]:
        """Return all records, thinned, or those that a page lacks, if they are few."""
        series = self._series
        generation, _, told = have.partition(":")
        first = int(told) if generation == series.generation and told.isdecimal() and len(told) < 16 else -1
        data: dict[str, Any] = {"count": series.count, "snr_edges": SNR_EDGES}
        if 0 < first <= series.count and series.count - first <= _MOST_NEW:
            data |= {"first": first, "columns": series.since(first) if first < series.count else {}}
        else:
            data |= {"first": 0, "columns": series.thinned(_POINTS)}
        return {"tag": f"{series.generation}:{series.count}", "data": data}

    def _when_changed(self, name: str, read: Callable[[], _Read]) -> _Read:
        try:
            status = os.stat(self.folder / name, follow_symlinks=False)
            state: object = (status.st_ino, status.st_size, status.st_mtime_ns)
        except FileNotFoundError:
            if name in self._files and not os.path.isdir(self.folder):
                return self._files[name][1]
            state = None
        except OSError as error:
            return self._files[name][1] if name in self._files else _Read(None, [error.strerror or "it cannot be read"])
        if name not in self._files or self._files[name][0] != state:
            self._files[name] = (state, _Read(None, []) if state is None else read())
        return self._files[name][1]


@dataclass(frozen=True, slots=True)
class _Read:
    """What a file told."""

    data: Any
    """None: nothing."""
    left_out: Sequence[str]
    """What of it could not be read, and why."""


class _Last:
    """The newest records of a file, and the number of all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.clear()

    def clear(self) -> None:
        """Forget all records."""
        self.records: deque[Record] = deque(maxlen=self._most)
        self.count = 0

    def add(self, record: Record) -> None:
        """Take the next record."""
        self.records.append(_shown(record))
        self.count += 1


def _read_about(run: Path) -> _Read:
    """Read ``run.json``, which is replaced as a whole; one of an older version or of a stranger may hold secrets."""
    try:
        found = parsed(read_inside(run, "run.json", _MOST_RECORD))
    except FileNotFoundError:
        return _Read(None, [])
    except OSError as error:
        return _Read(None, [error.strerror or "it cannot be read"])
    except MALFORMED as error:
        return _Read(None, [f"no JSON that can be read: {error}"])
    return _Read(sanitize.tree(_shown(found)), []) if isinstance(found, dict) else _Read(None, ["no JSON object"])


def _read_time(run: Path) -> _Read:
    try:
        sums = read_ledger(run)
        lines = [*sums.left_out[:_MOST_LINES], *_more(len(sums.left_out) - _MOST_LINES)]
        return _Read(_shown(time_of(run, sums)), lines)
    except ConfigError:  # without a start
        return _Read(None, [])
    except OSError as error:
        return _Read(None, [error.strerror or "it cannot be read"])
    except ArithmeticError as error:
        return _Read(None, [f"its numbers have no sum: {error}"])


def _more(count: int) -> list[str]:
    return [f"{count:,} further lines"] if count > 0 else []


def _last_record(path: Path) -> Record:
    """Return the last whole record of a file; empty: there is none."""
    try:
        with open_lines(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
            lines = file.read(_TAIL).split(b"\n")[:-1]
    except OSError:
        return {}
    return next((plain(record) for line in reversed(lines) if (record := record_of(line)) is not None), {})


def _read_ledger(run: Path) -> Sums | None:
    try:
        return read_ledger(run)
    except (ConfigError, OSError):
        return None  # as `sections` tells


def _shown(found: Any) -> Any:
    """Return JSON values as a page can show them: finite, and without the credentials of addresses."""
    if isinstance(found, dict):
        return {str(name): _shown(inner) for name, inner in found.items()}
    if isinstance(found, list | tuple):
        return [_shown(inner) for inner in found]
    return sanitize.argument(found) if isinstance(found, str) else plain(found)


def _inner(found: Any, *names: str) -> dict[str, Any]:
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else {}


def _text(found: Any) -> str | None:
    return found if isinstance(found, str) else None


def _tag(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
