"""`trace=run.jsonl` records every event, even of a run that fails, and costs little time."""

from __future__ import annotations

import errno
import gc
import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl import LLM, SamplingParams, hookimpl
from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.observer.trace import Recorder, _File, header
from minisgl.scheduler.observer import EVENTS
from minisgl.testing.drive import Drive, make_plugin
from minisgl.testing.small import SPEC, job, no_lookahead
from minisgl.trace import events as ev
from minisgl.trace.__main__ import main
from minisgl.trace.check import check
from minisgl.trace.history import turns
from minisgl.trace.read import read
from minisgl.trace.summary import summarize


def recorded(path: Path, spec: EngineSpec = SPEC, **options: Any) -> tuple[PluginManager, Drive]:
    manager = PluginManager.load(light=True)
    manager.observe(Config(trace=str(path)), spec)
    cache, policy = make_plugin("cache", "radix", page_size=spec.page_size), make_plugin("scheduler", "mixed")
    return manager, Drive(spec, cache, policy, observers=manager.hook, **options)


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_every_event_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    manager, drive = recorded(path, EngineSpec(4, 12, 3, 40, 50))
    drive.run([job(u, 14, 12, first=u % 2, arrive=u) for u in range(1, 7)] + [job(9, 8, 6, abort=4)])
    assert {"pool", "finish"} <= set(kinds(path))  # the recorder writes its buffer when the scheduler is idle
    assert "end" not in kinds(path)
    manager.close()
    found = kinds(path)
    events = [cls for cls in ev.Event.__subclasses__() if cls.__module__ == ev.__name__]  # plugins have others
    assert set(found) == {cls.__struct_config__.tag for cls in events} - {"plan", "unread", "now", "states"}
    assert (found[0], found[-1]) == ("header", "end")
    assert found.count("batch") == found.count("step") == drive.engine.counts.steps
    assert found.count("admit") == sum(drive.report.counts.admissions.values())
    assert found.count("retract") == drive.report.retractions > 0
    lines = [ev.decoder.decode(line) for line in path.read_bytes().splitlines()]
    computed = sum(sum(line.num_scheduled_tokens) for line in lines if isinstance(line, ev.Batch))
    assert computed == drive.engine.counts.tokens
    tokens: dict[int, list[int]] = {}
    batches = {line.step: line for line in lines if isinstance(line, ev.Batch)}
    for line in lines:
        if isinstance(line, ev.Done):
            uids, kept = batches[line.step].uids, line.kept or [1] * len(line.tokens)
            for uid, token, gained in zip(uids, line.tokens, kept, strict=True):
                if gained:
                    tokens.setdefault(uid, []).append(token)
    assert tokens == {uid: output for uid, output in drive.report.tokens.items() if output}


@pytest.mark.parametrize("stop", [(), (13, 21)], ids=["length", "stop"])
def test_summary_counts_all_rounds(stop: tuple[int, ...], tmp_path: Path) -> None:
    """The summary counts the drafts as the scheduler does, also if a request ends in an earlier round than the last."""
    path = tmp_path / "run.jsonl"
    spec = EngineSpec(page_size=4, num_pages=60, max_running_requests=2, max_seq_len=120, vocab_size=50)
    manager, drive = recorded(path, spec, drafts=(2, 70, 0), rounds=4, full_drafts=True)
    jobs = [job(uid, 9, 60, arrive=40 * (uid // 2)) for uid in range(8)]
    report = drive.run([replace(j, params=msgspec.structs.replace(j.params, stop_token_ids=stop)) for j in jobs])
    manager.close()
    trace, stats = read(path), drive.scheduler.stats()
    assert check(trace) is None
    summary = summarize(trace)
    assert summary.draft_tokens == stats["draft_tokens"]
    assert summary.accepted_draft_tokens == stats["accepted_draft_tokens"] > 20
    computed = sum(turn.num_tokens for turn, _ in turns(trace))
    if stop:
        assert stats["draft_tokens"] < report.counts.drafts
        assert computed < report.counts.tokens
    else:
        assert computed == report.counts.tokens
    assert report.counts.later_rounds > 10


def test_no_observer_without_trace_option() -> None:
    manager = PluginManager.load(light=True)
    manager.observe(Config(), SPEC)
    assert not manager._observers
    assert not manager.hook.minisgl_pages_evicted.get_hookimpls()


def test_trace_of_unfinished_run_is_complete(tmp_path: Path) -> None:
    """The file is complete after ``close``, and also if ``close`` is never called."""
    for closes in (True, False):
        path = tmp_path / f"{closes}.jsonl"
        manager, drive = recorded(path)
        drive.add(job(1, 9, 8))
        drive.step()
        assert kinds(path) == []  # buffered, but not written yet
        if closes:
            manager.close()
        else:
            del manager, drive
            gc.collect()
        assert kinds(path)[:4] == ["header", "add", "match", "allocate"]
        assert ("end" in kinds(path)) == closes


def test_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory\. Name a file"):
        recorded(tmp_path / "nowhere" / "run.jsonl")


def test_header_has_options_but_no_api_key() -> None:
    config = compose(PluginManager.load(light=True), ["cache=radix", "server.api_key=secret", "overlap=false"])
    text = ev.encoder.encode(header(config, SPEC)).decode()
    assert '"overlap":false' in text
    assert '"cache":{"type":"radix"' in text
    assert "secret" not in text


def test_trace_of_real_run_keeps_every_promise(tmp_path: Path) -> None:
    """Run the embedded model with stop strings, several choices, penalties, and too few pages."""
    path = tmp_path / "run.jsonl"
    options = [f"trace={path}", "num_pages=12", "scheduler=mixed", "max_prefill_tokens=16", "max_running_requests=6"]
    prompts = ["A page holds sixteen tokens, and has one owner. What is a page?"] * 3 + ["Count from 3 to 9.", "radix"]
    params = [
        SamplingParams(max_tokens=90, temperature=0.8, seed=7, n=2, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.0, presence_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=60, temperature=0.0, stop=("page",)),
        SamplingParams(max_tokens=40, temperature=0.0),
        SamplingParams(max_tokens=70, temperature=0.0, ignore_eos=True, logprobs=1),
    ]
    with no_lookahead(), LLM("tutor", overrides=options) as llm:
        outputs = llm.generate(prompts, params)
    trace = read(path)
    assert trace.complete
    assert check(trace) is None
    s = summarize(trace)
    assert (s.requests, sum(s.finish_reasons.values())) == (6, 6)
    assert s.retractions > 0 and s.cached_tokens > 0
    assert s.output_tokens >= sum(len(c.token_ids) for o in outputs for c in o.choices)
    tokens = [t for event in trace if isinstance(event, ev.Done) for t in event.tokens]
    assert set(outputs[3].token_ids) <= set(tokens)


class RecordedCalls:
    """All calls of observer hooks, recorded so that a test can repeat them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []


def recording_observer() -> RecordedCalls:
    """Return an observer of every hook that records the arguments of its calls."""

    def method(name: str) -> Any:
        import inspect

        from minisgl import hooks

        names = list(inspect.signature(getattr(hooks, name)).parameters)
        scope: dict[str, Any] = {}
        exec(f"def {name}(self, {', '.join(names)}): self.calls.append(({name!r}, dict(locals())))", scope)
        return hookimpl(scope[name])

    return type("RecordingObserver", (RecordedCalls,), {f"minisgl_{n}": method(f"minisgl_{n}") for n in EVENTS})()


def test_recording_costs_less_than_2_percent_of_a_step(tmp_path: Path) -> None:
    """Compare CPU seconds: steps of the embedded model, and the recorder's calls of the same steps, repeated alone."""
    calls = recording_observer()
    params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with LLM("tutor", overrides=["cache=radix", "num_pages=400"]) as llm:
        llm.generate(["warm up"] * 4, SamplingParams(max_tokens=4))
        llm.plugin_manager._manager.register(calls)
        scheduler = llm.scheduler
        scheduler.events.__init__(llm.plugin_manager.hook)  # type: ignore[misc]
        begin = time.process_time()
        llm.generate([f"What is page {i}?" for i in range(4)], params)
        run = time.process_time() - begin
    calls.calls = [(name, {k: v for k, v in args.items() if k != "self"}) for name, args in calls.calls]
    steps = sum(name == "minisgl_batch_scheduled" for name, _ in calls.calls)
    recording_times = []
    for _ in range(5):
        with (tmp_path / "run.jsonl").open("wb", buffering=0) as file:
            recorder = Recorder(file, header(llm.config, llm.engine.spec))
            calls_made = [(getattr(recorder, name), args) for name, args in calls.calls if hasattr(recorder, name)]
            with_known_arguments = [
                (call, {k: v for k, v in args.items() if k in call.__code__.co_varnames[: call.__code__.co_argcount]})
                for call, args in calls_made
            ]
            begin = time.process_time()
            for call, args in with_known_arguments:
                call(**args)
            recorder.minisgl_closed()
            recording_times.append(time.process_time() - begin)
    cost, step = min(recording_times) / steps, run / steps
    print(f"{cost * 1e6:.0f} µs of {step * 1e6:.0f} µs a step: {cost / step:.2%}")
    assert cost < 0.02 * step
    assert cost < 200e-6  # also small compared to a decode step of one row on a GPU, which takes 1 ms


class _Disk(io.RawIOBase):
    """A file on a disk of ``room`` bytes, which takes at most 1000 bytes with each write."""

    name = "disk"

    def __init__(self, room: int):
        self.room, self.data = room, bytearray()

    def write(self, data: Any) -> int:
        taken = bytes(data[: min(1000, self.room - len(self.data))])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.data += taken
        return len(taken)

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        del self.data[size:]
        return size


@pytest.mark.parametrize("room", [0, 2500, 10**6])
def test_full_disk_ends_the_trace_after_a_whole_event(room: int, caplog: pytest.LogCaptureFixture) -> None:
    """Writes that take a part of the bytes lose nothing. On a full disk the file ends with a whole event."""
    disk = _Disk(room)
    file = _File(disk)  # type: ignore[arg-type]
    for start in range(0, 200, 20):
        file.write([ev.Retract(step=step, uid=7) for step in range(start, start + 20)])
    file.close([ev.End(step=200)])
    lines = bytes(disk.data).splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))
    assert len(lines) == 201 if room == 10**6 else len(lines) % 20 == 0
    assert disk.closed
    assert len(caplog.records) == (room != 10**6)


def test_run_that_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requests that are open at the end are marked, and break no promise; a request that was lost before still does."""
    path = tmp_path / "run.jsonl"
    manager, drive = recorded(path)
    for uid in (1, 2):
        drive.add(job(uid, 3, 8))
    for _ in range(3):
        drive.step()
    drive.scheduler.close()
    manager.close()
    trace = read(path)
    assert (trace.complete, trace.interrupted, check(trace)) == (True, 2, None)
    assert main([str(path)]) == 0
    assert "The run was interrupted while 2 requests were open." in capsys.readouterr().out
    lost = [event for event in trace.events if not (isinstance(event, ev.Finish) and event.uid == 1)]
    violation = check(replace(trace, events=lost))
    assert violation is not None and "have no final reply" in str(violation)
