"""``POST /live/what-if``: two futures of the recorded run, computed in a child process with limits.

The API server sends the child a `Question`: the recording, the token ids, and the other options. The child repeats the
run, and answers with a report and the steps of both futures. It never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from minisgl.config import ConfigError
from minisgl.core import InvalidRequestError
from minisgl.plugins.live.view.kept import Held, Tokens, fill_in, without_waits
from minisgl.server.errors import ApiError
from minisgl.trace import events as ev
from minisgl.trace.history import Turn, turns
from minisgl.trace.read import Trace, TraceError

SECONDS = 120
"""The longest time of a child, in seconds of its processor and of the clock."""
MAX_BYTES = 3 << 30
"""The memory that a child may allocate after its start, on Linux."""
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
LEAD, SHOWN = 6, 400
"""Steps before the change that are shown, and all shown steps of a future."""
_PACE, _HELD = b'{"event":"pace"', b'{"event":"held"'  # the only events of a recording that a trace does not have
_NAME = re.compile(r"[a-z0-9_]{1,40}")
_LIMITS = {
    "page_size": 4096,
    "num_pages": 1 << 20,
    "max_prefill_tokens": 1 << 20,
    "max_running_requests": 4096,
    "starvation_steps": 1 << 20,
}


class WhatIfBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /live/what-if``: from step ``at`` on, the run has the other options that are not None."""

    at: int
    scheduler: str | None = None
    cache: str | None = None
    page_size: int | None = None
    num_pages: int | None = None
    max_prefill_tokens: int | None = None
    max_running_requests: int | None = None
    starvation_steps: int | None = None
    overlap: bool | None = None
    BOUNDS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **{name: {"minimum": 1, "maximum": most} for name, most in _LIMITS.items()},
        **{key: {"pattern": f"^{_NAME.pattern}$"} for key in ("scheduler", "cache")},
    }

    def overrides(self) -> list[str]:
        """Return the options as on the command line. Raise `ApiError` for a wrong one."""
        words = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name == "at" or value is None:
                continue
            if isinstance(value, str) and not _NAME.fullmatch(value):
                raise ApiError(400, f"{name} must be the name of a part, such as radix.", name)
            if name in _LIMITS and not 1 <= value <= _LIMITS[name]:
                raise ApiError(400, f"{name} must be from 1 to {_LIMITS[name]:,}.", name)
            words.append(f"{name}={str(value).lower()}")
        return words


class Question(msgspec.Struct):
    """What the child is asked: events as JSON lines, `Tokens` as bytes, and what is to change at which step."""

    lines: bytes
    tokens: bytes
    at: int
    overrides: list[str]
    is_full: bool = False
    """Whether the recording ended before the newest step, because it had no more room."""


async def ask(question: Question) -> bytes:
    """Return the child's answer as JSON. Raise `ApiError` if there is none. The child ends with a cancelled task."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        env=os.environ | ONE_THREAD,
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(child.communicate(msgspec.msgpack.encode(question)), SECONDS)
    except TimeoutError:
        raise ApiError(503, f"The simulation took more than {SECONDS} s: the run is too long.", "at") from None
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    if child.returncode:
        raise ApiError(503, "The simulation failed: the run is too long, or it has an error (see the log).", "at")
    return out


def answer(question: Question) -> dict[str, Any]:
    """Return the report, or ``{"error": …}`` with what is missing or wrong."""
    try:
        trace, held = recording(question.lines, msgspec.msgpack.decode(question.tokens, type=Tokens))
        from minisgl.trace.what_if_report import report

        found = report(trace, question.at, question.overrides, held)
        future = found.future
        spec = {each.name: getattr(future.spec, each.name) for each in fields(future.spec)}
        header = msgspec.structs.replace(trace.header, spec=spec)
        base = question.at if future.restarted else 0
        was = steps(Trace("", trace.header, future.was), question.at - LEAD)
        would = steps(Trace("", header, future.events), question.at - LEAD, base)
        if future.restarted:  # its events begin at the change: the steps before are those of the record
            would = [step for step in was if step["s"] < question.at] + would
        first = first_difference(was, would)
        begin = (question.at if first is None else first) - LEAD
        retracted = found.would.first_retraction
        retraction = None if retracted is None else {"s": base + retracted[0], "uid": retracted[1]}
        if retraction is not None and retraction["s"] >= begin + SHOWN - LEAD:
            begin = retraction["s"] - SHOWN // 2
        return {
            "overrides": question.overrides,
            "at": question.at,
            "first": first,
            "misses": future.misses,
            "restarted": future.restarted,
            "retraction": retraction,
            "counts": {name: _counts(each) for name, each in (("was", found.was), ("would", found.would))},
            "rows": found.rows,
            "notes": found.notes,
            "was": [step for step in was if begin <= step["s"] < begin + SHOWN],
            "would": [step for step in would if begin <= step["s"] < begin + SHOWN],
        }
    except (TraceError, ConfigError, InvalidRequestError) as error:
        full = "The recording is full: close all pages for 10 s to begin a new one." if question.is_full else ""
        return {"error": f"{error} {full}".strip().replace("--at ", "Step ")}
    except MemoryError:
        return {"error": f"The simulation needs more than {MAX_BYTES >> 30} GiB: the run or the pool is too large."}


def recording(lines: bytes, tokens: Tokens) -> tuple[Trace, set[int]]:
    """Return the trace of what the API server recorded, with the token ids, and the steps that the pace held up.

    The times of the trace leave these waits out.
    """
    kept, waits = list[bytes](), list[Held]()
    for line in lines.splitlines():
        if line.startswith(_HELD):
            waits.append(msgspec.json.decode(line, type=Held))
        elif not line.startswith(_PACE):
            kept.append(line)
    events: list[Any] = [ev.decoder.decode(line) for line in kept]
    without_waits(events, waits)
    header = msgspec.structs.replace(events[0], hidden_tokens=False)
    if isinstance(events[1], ev.Now) and not events[1].step and not events[1].added:
        del events[1]  # a whole run
    fill_in(events, tokens)
    return Trace("This recording", header, events[1:]), {each.step for each in waits}


def steps(trace: Trace, first: int, base: int = 0) -> list[dict[str, Any]]:
    """Return the steps from ``first`` on, as the page draws them; ``base`` is added to the numbers of the trace."""
    retracted: dict[int, list[int]] = {}
    for event in trace:
        if isinstance(event, ev.Retract):
            retracted.setdefault(event.step, []).append(event.uid)
    return [
        {
            "s": base + turn.step,
            "rows": _rows(turn, retracted.get(turn.step + 1, [])),
            "waiting": turn.waiting,
            "retracted": retracted.get(turn.step, []),
        }
        for turn, _ in turns(trace)
        if base + turn.step >= first
    ]


def _counts(measures: Any) -> dict[str, int]:
    return {"computed": measures.computed_tokens, "cached": measures.cached_tokens, "retractions": measures.retractions}


def first_difference(was: list[dict[str, Any]], would: list[dict[str, Any]]) -> int | None:
    """Return the number of the first step that does not have the same rows in both futures, or None."""
    rows = [{step["s"]: [(row["uid"], row["start"], row["count"]) for row in step["rows"]] for step in each}
            for each in (was, would)]  # fmt: skip
    return next((s for s in sorted(rows[0].keys() | rows[1].keys()) if rows[0].get(s) != rows[1].get(s)), None)


def _rows(turn: Turn, retracted: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "uid": row.uid,
            "kind": "decode" if row.decode else "prefill",
            "start": row.start,
            "count": row.count,
            "cached": row.num_cached_tokens,
            "admitted": row.num_cached_tokens > 0,
            "drafts": row.num_drafts,
            "accepted": None,
            "lost": ("retracted" if row.uid in retracted else "ended") if row.discarded else "",
        }
        for row in turn.rows
    ]


def _limit() -> None:
    """Limit this process: a run that is too long for it must harm no server.

    On Linux, its data may grow by `MAX_BYTES`. What is mapped now does not count, nor do the files of libraries: both
    may be large, and use little memory. Elsewhere, the limit of the processor's time has to do.
    """
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a lower limit that the administrator has set
        pages = int(Path("/proc/self/statm").read_text().split()[5])
        most = pages * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    os.nice(5)


def main() -> None:
    """Answer the question on standard input, on standard output."""
    sys.modules["tvm_ffi"] = None  # type: ignore[assignment] # no C++ for the cache: loading it imports torch
    _limit()
    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    sys.stdout.buffer.write(msgspec.json.encode(answer(question)))


if __name__ == "__main__":
    main()
