"""The process in which a student's code runs under ``lab grade``: it answers calls, and judges nothing.

``python -m minisgl.chapters.lab.grading.student_side FD MODULE…`` imports the modules and waits at the socket FD. For
each session it gets one end of a new channel, and forks a child for it. The child loads the student's file. Then it
either answers the grader's calls (`Session`), or runs one whole gate and sends the verdict, for the gates whose objects
can't be sent. The program runs in a clean installation, as another user. What it sends is an answer, never a command.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import socket
import sys
import time
import tracemalloc
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from minisgl.chapters.lab.catalog import find
from minisgl.chapters.lab.grader.diagnosis import diagnose
from minisgl.chapters.lab.grader.gate import Student
from minisgl.chapters.lab.grader.gate_process import LOADS, ImportGuard, run_gate
from minisgl.chapters.lab.grader.held import container_sizes
from minisgl.chapters.lab.grading.requests import MirroredReq, state_of, update
from minisgl.chapters.lab.grading.wire import Channel, Lost, Malformed, decode, encode
from minisgl.plugin_manager.manager import PluginManager

FACTORIES = ("minisgl_configs", "minisgl_models", "minisgl_observer")
"""Hooks that are no events: `Session.op_observer` does not list them."""


class Budget:
    """The step's budget, which is in the grader's process: every grant is a question to the grader."""

    def __init__(self, session: Session, number: int, tokens: int, rows: int):
        self._session, self._number, self.tokens, self.rows = session, number, tokens, rows

    def grant(self, request: Any, num_tokens: int) -> int:
        """Return how many tokens the grader's budget grants."""
        granted, self.tokens, self.rows = self._session.ask(self._number, "grant", [request, num_tokens])
        return int(granted)

    def retractions(self, order: Sequence[Any]) -> list[int]:
        """Return the requests that must be retracted."""
        victims: list[int] = self._session.ask(self._number, "retractions", [list(order)])
        return victims


class Session:
    """The answers to the grader's calls: ``op_NAME`` answers the call NAME. Objects are numbered and stay here."""

    def __init__(self, channel: Channel, student: Student):
        self.channel, self.student = channel, student
        self.objects: dict[int, Any] = {}
        self.numbers: dict[int, int] = {}  # id of an object -> its number
        self.requests: dict[int, MirroredReq] = {}
        self.next = 0
        self.seconds = 0.0  # processor time of the student's code in this call

    def serve(self) -> None:
        """Answer calls until the grader closes the channel."""
        with contextlib.suppress(Lost):
            while True:
                self.answer(decode(self.channel.receive(), self.resolve))

    def answer(self, message: Any) -> None:
        """Answer one call.

        A message has the call's name and arguments, the numbers of objects and of requests that the grader has dropped,
        and other requests that have changed, which `resolve` has updated.
        """
        name, args, dropped, ended, _ = message
        for number in dropped:
            kept = self.objects.pop(number, None)
            self.numbers.pop(id(kept), None)
        self.seconds = 0.0
        try:
            value, changed = getattr(self, f"op_{name}")(*args)
            reply = self.encode(["ok", value, changed, self.changed_requests(), self.seconds])
        except BaseException as error:  # includes SystemExit
            reply = self.encode(["error", *self.described(error)])
        for number in ended:
            self.requests.pop(number, None)
        self.channel.send(reply)

    def described(self, error: BaseException) -> list[Any]:
        """Return an exception as data: its nearest built-in type, its text, and what it means for the student."""
        builtin = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
        try:
            broken, text = diagnose(self.student, error), str(error)
        except BaseException:  # the student's exception can't be printed
            return [builtin, "", "raises", "The code raises no exception.", f"{type(error).__name__}."]
        return [builtin, text[:2000], broken.cause, broken.promise, broken.seen[:2000]]

    def changed_requests(self) -> list[Any]:
        """Return the requests that the student's code changed, and how many of their tokens it copied."""
        found = []
        for number, req in self.requests.items():
            copied, req.copied = req.copied, 0
            state = state_of(req)
            if state != req.sent or copied:
                found.append([number, state if state != req.sent else None, copied])
                req.sent = state
        return found

    def ask(self, number: int, name: str, args: list[Any]) -> Any:
        """Ask the grader to call a method of one of its objects, and return the result."""
        self.channel.send(self.encode(["ask", number, name, args]))
        kind, value = decode(self.channel.receive(), self.resolve)
        if kind == "fail":
            raise TypeError(value)
        return value

    # ---- objects -------------------------------------------------------------------------------------------

    def encode(self, value: Any) -> bytes:
        """Return a message as bytes."""
        return encode(value, self.refer)

    def refer(self, value: Any) -> list[Any]:
        """Return the number of an object that stays in this process, or of a request of the grader."""
        if isinstance(value, MirroredReq):
            return ["request", [value.number]]
        number = self.numbers.get(id(value))
        if number is None:
            number, self.next = self.next, self.next + 1
            self.objects[number], self.numbers[id(value)] = value, number
        return ["reference", [number, type(value).__name__]]

    def resolve(self, code: str, value: Any) -> Any:
        """Return the object that a number of a message means."""
        if code == "request":
            number, *state = value
            req = self.requests.get(number)
            if req is None:
                self.requests[number] = req = MirroredReq(number, *state)
            elif state:
                update(req, state[-1])
                req.sent = state_of(req)
            return req
        number, *more = value
        return self.objects[number] if number >= 0 else Budget(self, number, *more)

    # ---- calls ---------------------------------------------------------------------------------------------

    def timed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the student's code, and count its processor time."""
        started = time.thread_time()
        try:
            return call(*args, **kwargs)
        finally:
            self.seconds += time.thread_time() - started

    def op_load(self) -> Any:
        """Load the file. Return its hooks, and (group, name) of its options."""
        self.student.load()
        plugin = self.student.plugin
        assert plugin is not None
        return [list(plugin.hooks), [[group, name] for group, name, _ in plugin.options]], []

    def op_options(self) -> Any:
        """Return the names of the plugin's options."""
        assert self.student.lab.hook is not None
        schema: Any = self.student.plugin_manager.schema(self.student.lab.hook, self.student.lab.name)
        return [f.name for f in fields(schema)], []

    def op_config(self, options: dict[str, Any]) -> Any:
        """Return the student's config object."""
        return self.timed(self.student.config, **options), []

    def op_make(self, config: Any, kwargs: dict[str, Any]) -> Any:
        """Build the student's object."""
        return self.timed(self.student.make, config, **kwargs), []

    def op_get(self, owner: Any, name: str) -> Any:
        """Return an attribute: (True, None) for a method, else (False, value)."""
        value = self.timed(getattr, owner, name)
        return ([True, None] if callable(value) else [False, value]), []

    def op_call(self, owner: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a method. Return the result, and the lists and arrays among the arguments that it changed."""
        before = [_copied(arg) for arg in args]
        value = self.timed(getattr(owner, name), *args, **kwargs)
        changed = [[i, arg] for i, (arg, old) in enumerate(zip(args, before, strict=True)) if not _same(arg, old)]
        return value, changed

    def op_equal(self, a: Any, b: Any) -> Any:
        """Return whether two objects are equal."""
        return bool(a == b), []

    def op_sizes(self, owner: Any) -> Any:
        """Return the number of elements in each container of an object."""
        return container_sizes(owner), []

    def op_trace(self, on: bool) -> Any:
        """Begin or end to trace allocations."""
        (tracemalloc.start if on else tracemalloc.stop)()
        return None, []

    def op_traced(self) -> Any:
        """Return the number of bytes that are allocated since the trace began."""
        return tracemalloc.get_traced_memory()[0], []

    def op_run(self, function: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call a function of `chapters.lab.grader.tutor_runs`, which runs an engine with the student's plugin."""
        from minisgl.chapters.lab.grader import tutor_runs

        if function not in tutor_runs.__all__:
            raise ValueError(function)
        return getattr(tutor_runs, function)(*args, **kwargs), []

    def op_observer(self, attribute: str, ready: Collection[str] | None) -> Any:
        """Return a new observer, its manager, and the file's hooks with their arguments."""
        from minisgl.chapters.lab.grader.observers import observer

        found, manager = observer(self.student, attribute, ready)
        called = [
            [caller.name, list(caller.spec.argnames)]
            for part in manager._manager.get_plugins()
            for caller in manager._manager.get_hookcallers(part) or ()
            if caller.spec is not None and caller.name not in FACTORIES and not caller.spec.opts["firstresult"]
        ]
        return [found, manager, called], []

    def op_hook(self, manager: PluginManager, name: str, kwargs: dict[str, Any]) -> Any:
        """Call a hook of an observer's manager."""
        return self.timed(getattr(manager.hook, name), **kwargs), []

    def op_hooks(self, manager: PluginManager, calls: list[tuple[str, dict[str, Any]]]) -> Any:
        """Call many hooks, in order."""
        for name, kwargs in calls:
            self.timed(getattr(manager.hook, name), **kwargs)
        return None, []


def _copied(arg: Any) -> Any:
    if isinstance(arg, list):
        return [_copied(part) for part in arg]
    return arg.copy() if isinstance(arg, np.ndarray) else arg


def _same(arg: Any, old: Any) -> bool:
    """Return whether a list or an array is still what it was. Other arguments can't be changed, or are requests."""
    if isinstance(arg, list):
        return len(arg) == len(old) and all(map(_same, arg, old))
    if isinstance(arg, np.ndarray):
        return arg.shape == old.shape and bool((arg == old).all())
    return arg is old or not isinstance(arg, int | tuple) or bool(arg == old)


# ---- sessions ----------------------------------------------------------------------------------------------


def _run_session(request: dict[str, Any], channel: Channel) -> None:
    """Serve one session in the forked child."""
    os.setsid()
    lab = find(request["lab"])
    if "gate" not in request:
        student = Student(lab, Path(request["path"]), seed=request["seed"])
        if lab.forbidden:
            sys.meta_path.insert(0, ImportGuard(student.path, lab.forbidden))
        Session(channel, student).serve()
        return
    send = functools.partial(_send_json, channel)
    gates = [LOADS, *(lab.gates if request["gate"] != LOADS.name else ())]
    if request.get("gates"):
        from minisgl.chapters.lab.grading.private import private_gates

        gates += private_gates(Path(request["gates"])).get(lab.lab, [])
    gate = next(gate for gate in gates if gate.name == request["gate"])
    send({"verdict": run_gate(lab, gate, request, send).encode()})


def _send_json(channel: Channel, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def _kill_all() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _end(pid: int) -> int:
    """Kill a session and everything that it left behind. Return the session's exit status."""
    status = 0
    with contextlib.suppress(ChildProcessError):  # raised when no child is left
        while True:
            _kill_all()
            ended, code = os.waitpid(-1, 0)
            if ended == pid:
                status = os.waitstatus_to_exitcode(code)
    return status


def _serve(control: socket.socket, request: dict[str, Any], descriptor: int) -> None:
    """Fork a session. Wait until it ends or the grader ends it, and report its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            control.close()
            _run_session(request, Channel(socket.socket(fileno=descriptor)))
            status = 0
        except (Lost, Malformed):
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(descriptor)
    code: int | None = None
    while code is None:
        if select.select([control], [], [], 0.01)[0]:
            if not control.recv(1 << 16):
                os._exit(0)
            break
        ended, raw = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(raw)
    rest = _end(pid)
    control.send(json.dumps({"status": rest if code is None else code}).encode())


def main(words: list[str]) -> None:
    """Serve sessions until the grader closes the socket."""
    control = socket.socket(fileno=int(words[0]))
    control.set_inheritable(False)
    with contextlib.suppress(OSError, AttributeError):
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, as in gate_process
    for name in words[1:]:
        importlib.import_module(name)
    gc.freeze()
    control.send(b"ready")
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not data:
            return
        if descriptors:
            _serve(control, json.loads(data), descriptors[0])


if __name__ == "__main__":
    main(sys.argv[1:])
