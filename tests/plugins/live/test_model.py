"""After each step, the live view's page has the state that `minisgl.trace` computes from the same run."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pluggy
import pytest

from minisgl import hooks
from minisgl.config import Config
from minisgl.core import EngineSpec, SamplingParams
from minisgl.message import Call, Message
from minisgl.message.link import Link, deliver
from minisgl.plugins.live.view.observer import MAX_BEHIND, TOPIC, LiveObserver
from minisgl.testing.drive import Drive, Job, make_plugin
from minisgl.testing.small import no_lookahead
from minisgl.trace import events as ev
from minisgl.trace.check import check
from minisgl.trace.draw import timeline
from minisgl.trace.read import TraceError, read
from minisgl.trace.record import EventMaker
from minisgl.trace.state import State
from minisgl.trace.summary import summarize
from minisgl.trace.view import page as view_page
from minisgl.trace.what_if import what_if

node = shutil.which("node")
pytestmark = pytest.mark.skipif(node is None, reason="Node.js is not installed: it runs the page's model")


class Api:
    """The API server's end of the link: it reads every message at once."""

    def __init__(self) -> None:
        self.link = Link(self._receive)
        self.frames: list[tuple[str, list[bytes]]] = []
        self.reads = True

    def _receive(self, message: Message) -> None:
        assert isinstance(message, Call)
        topic, content = message.arguments
        assert topic == TOPIC
        first, _, data = content.partition(b"\n")
        self.frames.append((first[:1].decode(), data.splitlines()))
        if self.reads:
            self.tell(do="read", number=int(first[1:]))

    def tell(self, **command: Any) -> None:
        deliver(self, TOPIC, json.dumps(command).encode())

    def take(self) -> list[tuple[str, list[bytes]]]:
        frames, self.frames = self.frames, []
        return frames


def expected(state: State) -> dict[str, Any]:
    """Return minisgl.trace's state in the form of the page's ``Model.summary``."""
    nodes = list(state.tree.nodes())
    index = {id(node): i for i, node in enumerate(nodes)}
    tables = {uid: state.page_table[req.req_pool_idx] for uid, req in state.running.items()}
    return {
        "requests": [
            [
                req.uid,
                len(req.token_ids),
                req.req_pool_idx,
                req.admission_order,
                req.num_computed_tokens if req.req_pool_idx >= 0 else 0,
                req.cached_pages,
                req.state,
                req.queued_at_step,
            ]
            for req in state.requests.values()
        ],
        "running": list(state.running),
        "owner": state.owner.tolist(),
        "refs": state.ref_counts.tolist(),
        "tables": [[uid, table[table >= 0].tolist()] for uid, table in tables.items()],
        "tree": [[index.get(id(n.parent), -1), n.pages, n.users, n.step] for n in nodes],
        "in_flight": [step.batch.step for step in state.in_flight],
        "retiring": [[step, pages] for step, pages in state.retiring],
        "launched": state.last_launched,
        "read": state.last_read,
    }


def run(
    seed: int, steps: int, launched: dict[int, dict[str, Any]] | None = None, **options: Any
) -> tuple[list[str], list[dict[str, Any]]]:
    """Run random requests. Return the input of ``model.mjs``, and the summaries that it must print.

    The model ``first`` watches from the start, ``late`` and ``lost`` from a random step on. ``launched`` gets the
    summary at the launch of each step that is a key of it.
    """
    rng = random.Random(seed)
    spec = EngineSpec(page_size=4, num_pages=40, max_running_requests=5, max_seq_len=120, vocab_size=40)
    api, line, summaries = Api(), list[str](), list[dict[str, Any]]()
    observer = LiveObserver(Config(), spec, api.link, text=options.pop("text", False), delay=0.0)
    state = State(spec)
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)

    def take(event: Any) -> None:
        state.apply(event)
        if launched is not None and isinstance(event, ev.Batch) and event.step in launched:
            launched[event.step] = expected(state)

    for each in (observer, EventMaker(take)):
        manager.register(each)
    cache = make_plugin("cache", options.pop("cache", "radix"), page_size=spec.page_size)
    policy = make_plugin("scheduler", options.pop("policy", "mixed"))
    stems = [[rng.randrange(3) for _ in range(40)] for _ in range(3)]
    late_at, lose_at = rng.randrange(5, steps // 2), rng.randrange(5, steps // 2)
    needs_state: dict[str, bool] = {"first": True}  # model -> whether it waits for the state, as a page does

    def pass_on() -> None:
        for kind, lines in api.take():
            for name, waits in needs_state.items():
                if waits == (kind == "n"):
                    line.extend(f"{name} {each.decode()}" for each in lines)
                    needs_state[name] = False

    with no_lookahead():
        drive = Drive(spec, cache, policy, observers=manager.hook, thorough=False, eos_ids=(3,), **options)
        api.tell(do="now")
        uid = 0
        for number in range(steps):
            if rng.random() < 0.4 or not drive.scheduler.has_work:
                uid += 1
                stem = rng.choice(stems)[: rng.randrange(40)] + [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
                drive.add(Job(uid, stem, SamplingParams(max_tokens=rng.randrange(1, 30), seed=uid)))
            if rng.random() < 0.08 and drive.scheduler.requests:
                drive.abort(rng.choice(list(drive.scheduler.requests)))
            drive.step()
            observer._flush()
            if number == late_at:
                needs_state["late"] = True
            if number == lose_at:
                needs_state["lost"] = True
            pass_on()
            if number in (late_at, lose_at + 3):
                api.tell(do="now")
                pass_on()
            if number % 20 == 19 or number == steps - 1:
                for name in sorted(name for name, waits in needs_state.items() if not waits):
                    line.append(f"{name} ?")
                    summaries.append(expected(state))
    return line, summaries


def modules_in(folder: Path) -> list[Path]:
    """Copy the page's modules that need no browser to a folder: model, history, words, tree."""
    (folder / "package.json").write_text('{"type": "module"}')
    modules = [folder / f"{name}.js" for name in ("model", "history", "words", "tree")]
    for module in modules:
        module.write_bytes((files("minisgl.plugins.live.view") / "page" / module.name).read_bytes())
    return modules


def evaluate(expression: str, folder: Path) -> Any:
    """Return the value of a JavaScript expression, in which ``words`` and ``model`` are modules of the page."""
    model, _, words, _ = modules_in(folder)
    assert node is not None
    program = f"const words = await import('{words}'), model = await import('{model}');"
    program += f"console.log(JSON.stringify({expression}))"
    ran = subprocess.run([node, "--input-type=module", "-e", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def in_node(lines: list[str], tmp_path: Path) -> list[Any]:
    """Return what ``model.mjs`` prints for these lines."""
    modules = modules_in(tmp_path)[:2]
    assert node is not None
    ran = subprocess.run(
        [node, str(Path(__file__).with_name("model.mjs")), *map(str, modules)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(each) for each in ran.stdout.splitlines()]


@pytest.mark.parametrize(
    ("seed", "steps", "options"),
    [
        (1, 1000, {}),
        (2, 150, {"overlap": False, "policy": "prefill_first"}),
        (3, 150, {"max_prefill_tokens": 7, "text": True}),
        (4, 150, {"drafts": (4, 60, 1)}),
        (5, 150, {"drafts": (3, 90, 1), "rounds": 3, "full_drafts": True, "text": True}),
        (6, 100, {"cache": "naive"}),
    ],
)
def test_page_equals_the_trace(tmp_path: Path, seed: int, steps: int, options: dict[str, Any]) -> None:
    lines, summaries = run(seed, steps, **options)
    found = in_node(lines, tmp_path)
    assert len(found) == len(summaries)
    names = [line.partition(" ")[0] for line in lines if line.endswith(" ?")]
    for i, (have, want, name) in enumerate(zip(found, summaries, names, strict=True)):
        for key, value in want.items():
            assert have[key] == value, f"comparison {i}, model {name}: {key}"


@pytest.mark.parametrize(
    ("steps", "options"),
    [(740, {}), (200, {"drafts": (3, 90, 1), "rounds": 3, "full_drafts": True, "text": True})],
)
def test_earlier_steps(tmp_path: Path, steps: int, options: dict[str, Any]) -> None:
    """The page rebuilds the state at the launch of a step, if it still has its events. The present is not changed."""
    launched: dict[int, dict[str, Any]] = {
        step: {} for step in random.Random(1).sample(range(steps - 140, steps - 60), 25)
    }
    lines, summaries = run(8, steps, launched, **options)
    assert all(launched.values())
    late = json.loads(next(line for line in lines if line.startswith('late {"event":"now"'))[5:])
    asked = [(name, step) for step in launched for name in ("first", "late")]
    asked += [("late", late["step"] - 1), ("first", steps + 1)]
    kept = [line for line in lines if not line.endswith(" ?")]
    *found, old, present = in_node(
        [*kept, *(f"{name} at {step}" for name, step in asked), "first at 0", "first ?"], tmp_path
    )
    for (name, step), have in zip(asked, found, strict=True):
        assert (have is None) == (step not in launched), f"{name} at {step}"
        for key, value in launched.get(step, {}).items():
            assert have[key] == value, f"{name} at {step}: {key}"
    assert (old is None) == (steps > 700)
    assert {key: present[key] for key in summaries[-1]} == summaries[-1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"text": True, "max_prefill_tokens": 7},
        {"drafts": (3, 90, 1), "rounds": 3, "full_drafts": True, "text": True},
    ],
)
def test_trace_of_a_late_page(tmp_path: Path, options: dict[str, Any]) -> None:
    """A trace that begins with a state is checked, summarized and drawn; what-if says why it can't repeat it."""
    late = [line.removeprefix("late ") for line in run(7, 100, **options)[0] if line.startswith("late {")]
    header = next(i for i, line in enumerate(late) if '"event":"header"' in line[:20])
    lines = [line for line in late[header:] if '"event":"pace"' not in line[:20]]
    path = tmp_path / "late.jsonl"
    path.write_text("\n".join(lines) + "\n")
    trace = read(path)
    start = trace.events[0]
    assert isinstance(start, ev.Now)
    assert start.step > 0
    assert start.requests
    assert check(trace) is None
    summary = summarize(trace)
    assert summary.steps == sum(isinstance(event, ev.Batch) for event in trace) > 20
    assert "<svg" in timeline(trace, None)
    assert view_page([trace])
    found = "requests were open" if options.get("text") else "has no token ids"
    with pytest.raises(TraceError, match=found):
        what_if(trace, start.step + 3)
    broken = [line for line in lines if '"event":"free"' not in line[:20]]
    path.write_text("\n".join(broken) + "\n")
    assert check(read(path)) is not None


def test_words(tmp_path: Path) -> None:
    """The page says the true reason for a discarded token, and why a prompt found little in the cache."""
    row = '{uid: 7, kind: "decode", start: 9, count: 1, lost: %s, cached: 0, drafts: 0, accepted: null}'
    step = "words.explain(new model.Model(), {s: 5, rows: [%s], waiting: [], retracted: %s, events: [], pool: null})"
    size = 16
    ended, retracted, victim, short, other, rest = evaluate(
        "[" + ", ".join([
            step % (row % '"ended"', "[]"), step % (row % '"retracted"', "[]"), step % (row % '""', "[3]"),
            f"words.whyCached(14, 0, {size})", f"words.whyCached(40, 0, {size})", f"words.whyCached(72, 64, {size})",
        ]) + "]", tmp_path,
    )  # fmt: skip
    assert "had read the token that ended it" in ended
    assert "it was retracted in step 6" in retracted
    assert "ended" not in retracted
    assert "request 3 was retracted before it: the pool had no free page" in victim
    assert "only whole pages of 16 tokens are kept, and before its last token, this prompt fills none" in short
    assert "no earlier text began with the same 16 tokens" in other
    assert rest == "only whole pages of 16 tokens are kept"


def test_discarded_tokens_have_their_reason(tmp_path: Path) -> None:
    """A row whose request was retracted meanwhile says so; one whose request had ended says that."""
    lines, _ = run(1, 150)
    reasons, retracted = set[str](), dict[int, list[int]]()
    events = [json.loads(line[6:]) for line in lines if line.startswith("first {")]
    for event in events:
        if event["event"] == "retract":
            retracted.setdefault(event["step"], []).append(event["uid"])
    found = in_node([line for line in lines if line.startswith("first {")] + ["first lost"], tmp_path)[0]
    for step, uid, reason in found:
        reasons.add(reason)
        assert (reason == "retracted") == (uid in retracted.get(step + 1, [])), (step, uid, reason)
    assert reasons == {"ended", "retracted"}


def test_observer_drops_events_that_are_not_read() -> None:
    """While the API server reads nothing, few messages wait for it, and all requests end in as many steps."""
    steps = []
    for reads in (True, False):
        spec = EngineSpec(page_size=4, num_pages=200, max_running_requests=8, max_seq_len=120, vocab_size=40)
        api = Api()
        observer = LiveObserver(Config(), spec, api.link, text=False, delay=0.0)
        manager = pluggy.PluginManager(hooks.PROJECT)
        manager.add_hookspecs(hooks)
        manager.register(observer)
        with no_lookahead():
            drive = Drive(
                spec, make_plugin("cache", "radix", page_size=4), make_plugin("scheduler", "mixed"),
                observers=manager.hook, thorough=False,
            )  # fmt: skip
            api.tell(do="now")
            api.reads = reads
            for uid in range(1, 41):
                drive.add(Job(uid, [uid % 40] * 8, SamplingParams(max_tokens=40, seed=uid)))
            count = 0
            while drive.scheduler.has_work:
                drive.step()
                observer._flush()
                count += 1
        steps.append(count)
        assert len(drive.report.finished) == 40
        if not reads:
            assert len(api.frames) <= MAX_BEHIND + 3
            api.take()
            api.tell(do="read", number=observer._sent)
            observer._take(ev.End(step=0))
            observer._flush()
            assert [kind for kind, _ in api.take()] == ["l"]
    assert steps[0] == steps[1] > 2 * MAX_BEHIND
