"""`LLM` after an exception at any line, after Ctrl-C and after an engine failure: it works, or it says it is closed."""

from __future__ import annotations

import contextlib
import linecache
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

import minisgl
import minisgl.llm
from minisgl import LLM, SamplingParams
from minisgl.config import ConfigError
from minisgl.core import EngineDeadError, EngineSpec, InvalidRequestError
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.interrupts import llm as interrupts
from minisgl.scheduler import Plan
from minisgl.testing.checkpoints import tiny_checkpoint
from minisgl.testing.idle import check_idle
from minisgl.testing.sim import SimEngine
from minisgl.testing.truth import SimRequest

ROOT = Path(minisgl.__file__).parent
FILES = (f"{ROOT}/llm.py", f"{ROOT}/outputs.py", f"{ROOT}/scheduler/", f"{ROOT}/engine/", interrupts.__file__)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
TWO = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, n=2, logprobs=0)
PROMPTS = [[5, 6, 7], list(range(30, 50)), [9] * 5]
PARAMS = [GREEDY, TWO, GREEDY]
OPTIONS = ["device=cpu", "num_pages=64", "page_size=4"]
CLOSED = "this LLM was closed"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("interrupts"), tokenizer=True)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Install Python's own handler: a shell starts background processes with SIGINT ignored."""
    assert threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture
def make(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], LLM]]:
    """Return a function that makes an LLM on the simulated engine, which checks every step that it gets."""
    made: list[LLM] = []
    requests: dict[int, SimRequest] = {}
    spec = EngineSpec(page_size=4, num_pages=24, max_running_requests=4, max_seq_len=64, vocab_size=320)
    monkeypatch.setattr(minisgl.llm, "start_engine", lambda *_: SimEngine(spec, requests))
    config = compose(PluginManager.load(), [f"model={path}", "device=cpu", "page_size=4"])
    monkeypatch.setattr(minisgl.llm, "compose", lambda *_: config)  # slow, and the same each time

    def build() -> LLM:
        llm = LLM(str(path), overrides=[])
        made.append(llm)
        add = llm.scheduler.add_request

        def add_request(uid: int, prompt_ids: list[int], params: SamplingParams) -> None:
            requests[uid] = SimRequest(prompt_ids, params)
            add(uid, prompt_ids, params)

        requests.clear()
        monkeypatch.setattr(llm.scheduler, "add_request", add_request)
        return llm

    yield build
    for llm in made:
        llm.close()


# ---- an exception at any line ------------------------------------------------------------------------


def trace_lines(call: Callable[[], Any], actions: dict[int, Callable[[], None]]) -> int:
    """Run ``call``, and each action before the line with its number. Return how many lines of `FILES` ran.

    Lines where no exception can arise are not counted: those of `DeferredInterrupt` and of the ``with`` statements
    that use it, which hold the exception back, and two where CPython runs no signal handler: the end of ``with
    self._lock``, before the lock is released, and the beginning of the ``except`` clauses that mark the LLM as
    inconsistent.
    """
    excluded = (
        "with DeferredInterrupt()",
        "with self._call(",
        "with self._lock",
        "except BaseException as error",
        "consistent, self._consistent =",
    )
    count, previous = 0, sys.gettrace()

    def trace_frame(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if not any(words in line for words in excluded):
                count += 1
                if count in actions:
                    actions[count]()
        return trace_frame

    def trace_call(frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(FILES):
            return None
        return trace_frame

    sys.settrace(trace_call)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count


def break_off(call: Callable[[], Any], actions: dict[int, Callable[[], None]]) -> None:
    """Run ``call`` with these actions, which must lead to a KeyboardInterrupt, unless ``call`` has fewer lines."""
    try:
        count = trace_lines(call, actions)
    except KeyboardInterrupt:
        return
    assert count < min(actions)


def interrupt() -> None:
    raise KeyboardInterrupt


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def methods(llm: LLM) -> list[Callable[[], Any]]:
    return [
        lambda: llm.generate([[5, 6]], GREEDY),
        lambda: llm.chat([{"role": "user", "content": "x"}], GREEDY),
        lambda: llm.add_request([5, 6], GREEDY),
        llm.step,
        lambda: llm.abort_request(0),
        llm.has_unfinished_requests,
    ]


def assert_closed(llm: LLM, error: type[RuntimeError] = RuntimeError, message: str = "") -> None:
    """Every method says that the LLM is closed, and `close` works."""
    for method in methods(llm):
        with pytest.raises(RuntimeError, match=f"{CLOSED}.*{message}") as caught:
            method()
        assert type(caught.value) is error
    llm.close()
    llm.close()


def tokens(llm: LLM) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.choices] for output in llm.generate(PROMPTS, PARAMS)]


def works(llm: LLM, want: list[list[list[int]]]) -> bool:
    """Check that the LLM gives the right answer and is whole, or is closed. Return whether it is open."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        got = tokens(llm)
    except RuntimeError:
        assert_closed(llm)
        return False
    assert got == want
    assert not llm.has_unfinished_requests()
    check_idle(llm.scheduler)
    return True


def loop(llm: LLM) -> dict[int, list[int]]:
    """Use every method of the loop that a user writes. Return the token ids of the finished outputs."""
    finished = {}
    kept, aborted = llm.add_request(PROMPTS[0], GREEDY), llm.add_request(PROMPTS[1], GREEDY)
    llm.step()
    llm.generate([PROMPTS[2]], TWO)
    llm.abort_request(aborted)
    while llm.has_unfinished_requests():
        finished |= {output.request_id: output.token_ids for output in llm.step() if output.finished}
    assert kept in finished
    return finished


def drain(llm: LLM, want: list[int]) -> None:
    """Run the requests that an interrupted `loop` left open: `LLM` may not drop a request that it accepted."""
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished and output.finish_reason != "abort" and output.prompt_token_ids == PROMPTS[0]:
                assert output.token_ids == want


@pytest.mark.parametrize("second", [0, 1, 5, 33, 150])
def test_an_exception_at_any_line_leaves_a_right_or_a_closed_llm(make: Callable[[], LLM], second: int) -> None:
    """``second`` is how many lines after the first exception another one is raised; 0 means that there is one only."""
    llm = make()
    want = tokens(llm)
    lines = trace_lines(lambda: tokens(llm), {})
    survived = closed = 0
    for k in range(1, lines, 97 if second else 31):
        break_off(partial(tokens, llm), {k: interrupt, k + second: interrupt})
        if works(llm, want):
            survived += 1
        else:
            closed += 1
            llm = make()
    assert closed > survived / 2  # most lines are within a turn


def test_an_exception_at_any_line_of_the_users_loop(make: Callable[[], LLM]) -> None:
    llm = make()
    want, kept = tokens(llm), next(iter(loop(llm).values()))
    lines = trace_lines(lambda: loop(llm), {})
    for k in range(3, lines, 53):
        break_off(partial(loop, llm), {k: interrupt})
        try:
            drain(llm, kept)
        except RuntimeError:
            assert_closed(llm)
        if not works(llm, want):
            llm = make()


def test_an_exception_in_close_is_followed_by_a_whole_close(make: Callable[[], LLM]) -> None:
    lines = trace_lines(make().close, {})
    for k in range(1, lines):
        llm = make()
        break_off(llm.close, {k: interrupt})
        llm.close()
        assert_closed(llm)
        assert llm.engine.closed  # type: ignore[union-attr]


def test_an_exception_at_any_line_with_a_model(path: Path) -> None:
    def start() -> LLM:
        return LLM(str(path), overrides=OPTIONS)

    llm = start()
    try:
        want = tokens(llm)
        lines = trace_lines(lambda: tokens(llm), {})
        for k in range(50, lines, lines // 12):
            break_off(partial(tokens, llm), {k: interrupt})
            if not works(llm, want):
                llm = start()
    finally:
        llm.close()


# ---- Ctrl-C ------------------------------------------------------------------------------------------


def test_after_ctrl_c_at_any_line_the_next_call_works(make: Callable[[], LLM]) -> None:
    llm = make()
    want = tokens(llm)
    lines = trace_lines(lambda: tokens(llm), {})
    for k in range(1, lines, 43):
        break_off(partial(tokens, llm), {k: ctrl_c})
        assert works(llm, want)


def test_after_ctrl_c_in_the_users_loop_it_can_go_on(make: Callable[[], LLM]) -> None:
    llm = make()
    want, kept = tokens(llm), next(iter(loop(llm).values()))
    lines = trace_lines(lambda: loop(llm), {})
    for k in range(1, lines, 59):
        break_off(partial(loop, llm), {k: ctrl_c})
        drain(llm, kept)
        assert works(llm, want)


@pytest.mark.parametrize("later", [1, 9, 60, 200])
def test_a_second_ctrl_c_takes_effect_at_once(make: Callable[[], LLM], later: int) -> None:
    llm = make()
    want = tokens(llm)
    lines = trace_lines(lambda: tokens(llm), {})
    closed = 0
    for k in range(1, lines - later, 131):
        break_off(partial(tokens, llm), {k: ctrl_c, k + later: ctrl_c})
        if not works(llm, want):
            closed += 1
            llm = make()
    assert closed


def test_a_second_ctrl_c_does_not_wait_for_the_turn(make: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    pressed = 0

    def hang() -> Any:
        nonlocal pressed
        while True:
            pressed += 1
            ctrl_c()

    monkeypatch.setattr(llm.scheduler, "step", hang)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert pressed == 2
    assert_closed(llm, message="KeyboardInterrupt")


def test_the_users_handler_is_called_and_kept(make: Callable[[], LLM]) -> None:
    llm, calls = make(), []
    want = tokens(llm)

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append((number, frame is not None))

    signal.signal(signal.SIGINT, handler)
    try:
        got: list[Any] = []
        for k in (1, 30, 400, 900):
            trace_lines(lambda: got.append(tokens(llm)), {k: ctrl_c, k + 3: ctrl_c, k + 6: ctrl_c})
        assert got == [want] * 4
        assert calls == [(signal.SIGINT, True)] * 12
        assert signal.getsignal(signal.SIGINT) is handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ctrl_c()
        assert tokens(llm) == want
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_handler_may_abort_and_close(make: Callable[[], LLM]) -> None:
    """Between two turns a handler may call the LLM."""
    llm = make()
    request_id = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    signal.signal(signal.SIGINT, lambda *_: llm.abort_request(request_id))
    try:
        trace_lines(llm.step, {20: ctrl_c})
        outputs = [output for _ in range(3) for output in llm.step()]
        assert outputs[-1].finish_reason == "abort"
        signal.signal(signal.SIGINT, lambda *_: llm.close())
        with pytest.raises(RuntimeError, match=CLOSED):
            trace_lines(lambda: tokens(llm), {300: ctrl_c})
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert_closed(llm)


def test_other_threads_install_no_handler(make: Callable[[], LLM]) -> None:
    llm, got = make(), []
    want = tokens(llm)
    seen: list[Any] = []

    def run() -> None:
        trace_lines(lambda: got.append(tokens(llm)), {200: lambda: seen.append(signal.getsignal(signal.SIGINT))})

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert got == [want]
    assert seen == [signal.default_int_handler]


PROGRAM = """
import signal, sys
from minisgl import LLM, SamplingParams
from minisgl.testing.idle import check_idle
signal.signal(signal.SIGINT, signal.default_int_handler)
params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
with LLM(sys.argv[1], overrides=sys.argv[2:]) as llm:
    want = [o.token_ids for o in llm.generate([[5, 6], [7]], params)]
    try:
        print("ready", flush=True)
        while True:
            llm.generate([[5, 6], [7], [8, 9]], params)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert [o.token_ids for o in llm.generate([[5, 6], [7]], params)] == want
    check_idle(llm.scheduler)
    print("works", flush=True)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_sigint(path: Path, ranks: int) -> None:
    words = [sys.executable, "-c", PROGRAM, str(path), *OPTIONS, f"tp={ranks}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        children = psutil.Process(program.pid).children()
        assert len(children) == ranks - 1
        for process in (*children, program):  # a terminal sends it to every process of the group
            process.send_signal(signal.SIGINT)
        assert program.stdout.read() == "interrupted\nworks\n"
    assert program.returncode == 0
    assert not any(child.is_running() for child in children)


def test_ranks_end_with_a_closed_llm(path: Path) -> None:
    """An exception within a turn ends the other ranks, wherever it was raised, and `close` leaves nothing."""
    before = psutil.Process().children(recursive=True)
    for k in (700, 1200):
        llm = LLM(str(path), overrides=[*OPTIONS, "tp=2"])
        (rank,) = [child for child in psutil.Process().children(recursive=True) if child not in before]
        with contextlib.suppress(KeyboardInterrupt):
            trace_lines(partial(tokens, llm), {k: interrupt})
        assert not rank.is_running()
        assert_closed(llm, message="KeyboardInterrupt")
    assert psutil.Process().children(recursive=True) == before


# ---- errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["launch", "result"])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_dead_engine_closes_the_llm(
    make: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    for use in (tokens, loop):
        llm, calls = make(), 0
        real = getattr(llm.engine, call)

        def die(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise EngineDeadError("the device is gone")
            return real(*args)  # noqa: B023 - called in this turn of the loop

        monkeypatch.setattr(llm.engine, call, die)
        with pytest.raises(EngineDeadError, match=r"^the device is gone$"):
            use(llm)
        assert llm.engine.closed  # type: ignore[union-attr]
        assert_closed(llm, EngineDeadError, "the device is gone")


def test_an_error_in_a_turn_closes_the_llm(make: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    monkeypatch.setattr(llm.scheduler.planner, "plan", lambda *_: Plan([(77, 1)]))
    with pytest.raises(Exception, match="the plan names request 77"):
        llm.generate(PROMPTS, PARAMS)
    assert_closed(llm, message="PolicyError: the plan names request 77")


def test_a_refused_request_closes_nothing(make: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    want = tokens(llm)
    with pytest.raises(InvalidRequestError):
        llm.generate([*PROMPTS, []], GREEDY)
    bad: Any = ["a word", "another"]
    with pytest.raises(ValueError, match="invalid literal"):
        llm.generate([[5], bad], GREEDY)
    assert works(llm, want)
    with monkeypatch.context() as patch:
        patch.setattr(llm.scheduler, "add_request", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.add_request([5], GREEDY)
    assert works(llm, want)


def test_an_engine_that_can_not_be_closed(make: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """After a device error, releasing memory may fail with the same error."""
    llm = make()

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "close", fail)
        patch.setattr(llm.engine, "launch", lambda *_: fail())
        with pytest.raises(RuntimeError, match=r"^CUDA error$"):
            llm.generate(PROMPTS, PARAMS)
    assert_closed(llm, message="RuntimeError: CUDA error")


def test_an_llm_that_can_not_be_made_closes_its_engine(
    make: Callable[[], LLM], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines: list[Any] = []

    def build(_config: Any, _manager: Any, engine: Any, **_options: Any) -> None:
        engines.append(engine)
        raise ConfigError("no such policy")

    monkeypatch.setattr(minisgl.llm, "build_scheduler", build)
    with pytest.raises(ConfigError):
        make()
    assert engines[0].closed
