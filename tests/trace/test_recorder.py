"""`trace=run.jsonl`: every event is in the file, whatever ends the run, and writing them costs next to nothing."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams, hookimpl
from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.observer.trace import Recorder, header
from minisgl.scheduler.events import OBSERVERS
from minisgl.testing.drive import Drive, make_plugin
from minisgl.testing.small import SPEC, job, tight
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.read import read
from minisgl.trace.summary import summarize


def recorded(path: Path, spec: EngineSpec = SPEC, **options: Any) -> tuple[PluginManager, Drive]:
    manager = PluginManager.load(light=True)
    manager.observe(Config(trace=str(path)), spec)
    cache, policy = make_plugin("cache", "radix", page_size=spec.page_size), make_plugin("scheduler", "mixed")
    return manager, Drive(spec, cache, policy, hook=manager.hook, **options)


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


def test_each_thing_that_happens_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    manager, drive = recorded(path, EngineSpec(4, 12, 3, 40, 50))
    drive.run([job(u, 14, 12, first=u % 2, arrive=u) for u in range(1, 7)] + [job(9, 8, 6, abort=4)])
    assert {"pool", "finish"} <= set(kinds(path))  # written as soon as nothing is left to do
    assert "end" not in kinds(path)
    manager.close()
    found = kinds(path)
    assert set(found) == {cls.__struct_config__.tag for cls in ev.Event.__subclasses__()} - {"plan", "unread"}
    assert (found[0], found[-1]) == ("header", "end")
    assert found.count("batch") == found.count("step") == drive.engine.counts.steps
    assert found.count("admit") == sum(drive.report.counts.seats.values())
    assert found.count("retract") == drive.report.retractions > 0
    lines = [ev.decoder.decode(line) for line in path.read_bytes().splitlines()]
    computed = sum(sum(line.num_scheduled_tokens) for line in lines if isinstance(line, ev.Batch))
    assert computed == drive.engine.counts.tokens
    tokens: dict[int, list[int]] = {}
    batches = {line.step: line for line in lines if isinstance(line, ev.Batch)}
    for line in lines:
        if isinstance(line, ev.Done):
            uids, gained = batches[line.step].uids, line.gained or [1] * len(line.tokens)
            for uid, token, got in zip(uids, line.tokens, gained, strict=True):
                if got:
                    tokens.setdefault(uid, []).append(token)
    assert tokens == {uid: gained for uid, gained in drive.report.tokens.items() if gained}


def test_no_trace_no_listener() -> None:
    manager = PluginManager.load(light=True)
    manager.observe(Config(), SPEC)
    assert not manager._made
    assert not manager.hook.minisgl_pages_evicted.get_hookimpls()


def test_a_run_that_fails_is_written_to_its_end_and_so_is_one_that_nobody_closes(tmp_path: Path) -> None:
    for closes in (True, False):
        path = tmp_path / f"{closes}.jsonl"
        manager, drive = recorded(path)
        drive.add(job(1, 9, 8))
        drive.step()
        assert kinds(path) == []  # collected, and not written yet
        if closes:
            manager.close()
        else:
            del manager, drive
            gc.collect()
        assert kinds(path)[:4] == ["header", "add", "match", "allocate"]
        assert ("end" in kinds(path)) == closes


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file or directory\. Name a file"):
        recorded(tmp_path / "nowhere" / "run.jsonl")


def test_options_are_in_the_header_and_the_key_is_not() -> None:
    config = compose(PluginManager.load(light=True), ["cache=radix", "server.api_key=secret", "overlap=false"])
    text = ev.encoder.encode(header(config, SPEC)).decode()
    assert '"overlap":false' in text
    assert '"cache":{"type":"radix"' in text
    assert "secret" not in text


def test_the_trace_of_a_real_run_keeps_every_promise(tmp_path: Path) -> None:
    """The embedded model with everything that ends a request or puts it off: stop strings, several choices, penalties,
    a pool that runs out of pages."""
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
    with tight(), LLM("tutor", overrides=options) as llm:
        outputs = llm.generate(prompts, params)
    trace = read(path)
    assert trace.whole
    assert check(trace) is None
    s = summarize(trace)
    assert (s.requests, sum(s.ends.values())) == (6, 6)
    assert s.retractions > 0 and s.cached > 0
    assert s.output >= sum(len(c.token_ids) for o in outputs for c in o.choices)
    tokens = [t for event in trace if isinstance(event, ev.Done) for t in event.tokens]
    assert set(outputs[3].token_ids) <= set(tokens)


class Calls:
    """Every call of an observer hook, to be made again."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []


def listener() -> Calls:
    """An observer of every hook that remembers what it was called with."""

    def method(name: str) -> Any:
        import inspect

        from minisgl import hooks

        names = list(inspect.signature(getattr(hooks, name)).parameters)
        scope: dict[str, Any] = {}
        exec(f"def {name}(self, {', '.join(names)}): self.calls.append(({name!r}, dict(locals())))", scope)
        return hookimpl(scope[name])

    return type("Listener", (Calls,), {f"minisgl_{n}": method(f"minisgl_{n}") for n in OBSERVERS})()


def test_writing_costs_less_than_2_percent_of_a_step(tmp_path: Path) -> None:
    """CPU seconds on one machine: the embedded model's steps, and the recorder's part of the same steps alone."""
    calls = listener()
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
    alone = []
    for _ in range(5):
        with (tmp_path / "run.jsonl").open("wb", buffering=0) as file:
            recorder = Recorder(file, header(llm.config, llm.engine.spec))
            made = [(getattr(recorder, name), args) for name, args in calls.calls if hasattr(recorder, name)]
            asked = [
                (call, {k: v for k, v in args.items() if k in call.__code__.co_varnames[: call.__code__.co_argcount]})
                for call, args in made
            ]
            begin = time.process_time()
            for call, args in asked:
                call(**args)
            recorder.minisgl_closed()
            alone.append(time.process_time() - begin)
    cost, step = min(alone) / steps, run / steps
    print(f"{cost * 1e6:.0f} µs of {step * 1e6:.0f} µs a step: {cost / step:.2%}")
    assert cost < 0.02 * step
    assert cost < 200e-6  # of a decode step of one row on a GPU, 1 ms, it must stay a small part too
