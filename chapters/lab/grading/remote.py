"""The student's file as a gate of the grader sees it, while the code runs in another process.

`RemoteStudent` has the interface of `minisgl.chapters.lab.grader.gate.Student`. What its methods return are stand-ins:
an attribute or a method call of a `RemoteObject` is a message to the student's process, and the answer is data. So the
gates run in the grader's process, with their oracles, and the student's code can't reach them.
"""

from __future__ import annotations

import builtins
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from minisgl import hooks
from minisgl.chapters.lab.grader.gate import Broken, Student, StudentError, TimedOut
from minisgl.chapters.lab.grading.requests import first_sent, state_of, update
from minisgl.chapters.lab.grading.wire import Channel, Lost, Malformed, decode, encode
from minisgl.core import Req
from minisgl.plugin_manager.manager import PluginManager

__all__ = ["SLOWER", "RemoteObject", "RemoteStudent", "Sessions"]

ANSWERED = ("grant", "retractions")
"""The methods of the grader's objects that the student's process may call."""
_RAISED = {
    name: type(name, (StudentError, getattr(builtins, name)), {})
    for name in (
        "AssertionError", "NotImplementedError", "AttributeError", "TypeError", "ValueError", "KeyError", "IndexError",
        "LookupError",
    )
}  # fmt: skip
"""Exceptions of the student's code that gates handle: they are raised here as exceptions of the same built-in type."""


SLOWER = 3.0
"""A search in the grader's process may take this many times its time: every call of the student's code is a message."""
PATIENCE = 10.0
"""One workload may take this many times its time: a long one has more than 10,000 calls, and each takes 0.3 ms."""


class Sessions(Protocol):
    """Starts sessions in the student's process, one at a time."""

    def start(self, request: Mapping[str, Any]) -> Channel:
        """Start a session and return the grader's end of its channel."""

    def end(self) -> int:
        """Kill the session and return its exit status."""


class Session:
    """The calls of one session. ``broken``: a call was interrupted, so the session can't be used any more."""

    def __init__(self, sessions: Sessions, request: Mapping[str, Any], deadline: float):
        self._sessions, self._deadline = sessions, deadline
        self._channel = sessions.start(request)
        self.broken = False
        self.seconds = 0.0  # processor time of the student's code
        self.dropped: list[int] = []
        self._objects: dict[int, Any] = {}  # the grader's own objects, by negative number
        self._requests: dict[int, tuple[int, Req]] = {}  # id of a request -> (its number, the request)
        self._states: dict[int, list[Any]] = {}  # number of a request -> its state when it was last sent
        self._ended: list[int] = []
        self._next_request = 0
        self.methods: set[tuple[str, str]] = set()  # (type, name) of known methods

    def close(self) -> None:
        """End the session."""
        self.broken = True
        self._channel.close()
        self._sessions.end()

    def call(self, name: str, *args: Any) -> Any:
        """Call ``op_<name>`` of the student's session and return its answer. Raise `StudentError` if that raises."""
        if self.broken:
            raise _dead("An object was used whose process has ended.")
        self.broken = True  # until the answer is here: an alarm may interrupt
        dropped, self.dropped = self.dropped, []
        own = [arg for arg in args if isinstance(arg, list)]
        self._objects.clear()
        refresh = [req for _, req in self._requests.values() if state_of(req) != self._states[self._number(req)]]
        ended, self._ended = self._ended, []
        try:
            self._channel.send(encode([name, list(args), dropped, ended, refresh], self._refer))
            reply = self._reply()
        except (Lost, Malformed) as error:
            raise self._lost(error) from error
        except TimeoutError:
            raise TimedOut from None
        self.broken = False
        removed = args[2][0] if name == "call" and args[1] == "removed" and args[2] else None
        self._forget(removed)
        return self._taken(reply, own)

    def _reply(self) -> Any:
        """Return the answer, after all questions that the student's code asks before it."""
        while True:
            message = decode(self._channel.receive(self._deadline), self._resolve)
            if not isinstance(message, list) or not message:
                raise Malformed(f"{message!r:.80}")
            if message[0] != "ask":
                return message
            self._channel.send(encode(self._answered(message), self._refer))

    def _answered(self, message: list[Any]) -> list[Any]:
        _, number, name, args = message
        if name not in ANSWERED or number not in self._objects:
            raise Malformed(f"the question {name!r:.40}")
        budget = self._objects[number]
        try:
            found = getattr(budget, name)(*args)
        except (TypeError, AttributeError, ValueError, KeyError) as error:  # the arguments are the student's
            return ["fail", f"budget.{name}: {error}"]
        return ["ok", [found, budget.tokens, budget.rows] if name == "grant" else found]

    def _taken(self, reply: list[Any], own: list[list[Any]]) -> Any:
        """Apply the changes that the student's code made to its arguments, and return its answer."""
        try:
            if reply[0] == "error":
                raise self._raised(*reply[1:])
            _, value, changed, requests, seconds = reply
            self.seconds += float(seconds)
            for i, new in changed:
                _change(own[-1][i], new)
            for number, state, copied in requests:
                self._change_request(number, state, copied)
        except (ValueError, TypeError, IndexError, KeyError) as error:
            if isinstance(error, StudentError):
                raise
            raise self._lost(Malformed(f"{type(error).__name__}: {error}")) from error
        return value

    def _change_request(self, number: int, state: list[Any] | None, copied: int) -> None:
        req = next((req for known, req in self._requests.values() if known == number), None)
        if req is None:
            return
        if state is not None:
            update(req, state)
            self._states[number] = state
        if hasattr(req, "copied"):
            req.copied += int(copied)

    def _raised(self, kind: str, text: str, cause: str, promise: str, seen: str) -> StudentError:
        broken = Broken(str(cause), str(promise), str(seen))
        raised: StudentError = _RAISED.get(kind, StudentError)(str(text), broken)
        return raised

    def _lost(self, error: Exception) -> StudentError:
        """Return the finding for a process that ended, or that sent no answer that can be read."""
        if isinstance(error, Malformed):
            seen = f"The answer is not one that the grader reads: {error}."
            return StudentError(seen, Broken("transcript", "The code's process answers with data.", seen))
        return _dead(f"The process ended with status {self._sessions.end()}, without an answer.")

    # ---- objects -------------------------------------------------------------------------------------------

    def _refer(self, value: Any) -> list[Any] | None:
        if isinstance(value, Req):
            return ["request", self._request(value)]
        if isinstance(value, RemoteObject):
            session, number = object.__getattribute__(value, "_of")
            if session is not self:
                raise _dead("An object was used whose process has ended.")
            return ["reference", [number]]
        if hasattr(value, "grant"):
            number = -1 - len(self._objects)
            self._objects[number] = value
            return ["reference", [number, value.tokens, value.rows]]
        return None

    def _request(self, req: Req) -> list[Any]:
        known, state = self._requests.get(id(req)), state_of(req)
        if known is None:
            number, self._next_request = self._next_request, self._next_request + 1
            self._requests[id(req)] = number, req
            self._states[number] = state
            return [number, *first_sent(req), state]
        number = known[0]
        same, self._states[number] = self._states[number] == state, state
        return [number] if same else [number, state]

    def _number(self, req: Req) -> int:
        return self._requests[id(req)][0]

    def _forget(self, removed: Any) -> None:
        """Forget the requests that have ended, were removed, or are used nowhere else.

        If one of them is sent again, it is a new request.
        """
        for key, (number, req) in list(self._requests.items()):
            unused = sys.getrefcount(req) <= 3  # the references of `_requests`, of `req` and of this call
            if unused or req.finish_reason is not None or req is removed:
                del self._requests[key], self._states[number]
                self._ended.append(number)

    def _resolve(self, code: str, value: Any) -> Any:
        if code == "request":
            return next(req for number, req in self._requests.values() if number == value[0])
        number, what = value
        if number < 0:
            return self._objects[number]
        return RemoteObject(self, int(number), str(what))


def _dead(seen: str) -> StudentError:
    return StudentError(seen, Broken("dies", "The process that runs the code does not end.", seen))


def _change(argument: Any, new: Any) -> None:
    """Give a list or an array the content that the student's code gave its copy."""
    if isinstance(argument, list) and isinstance(new, list):
        argument[:] = new
    elif isinstance(argument, np.ndarray) and isinstance(new, np.ndarray) and argument.shape == new.shape:
        argument[...] = new


class RemoteObject:
    """An object of the student's process. Its attributes and methods are messages to that process."""

    _of: tuple[Session, int]
    _what: str

    def __init__(self, session: Session, number: int, what: str):
        object.__setattr__(self, "_of", (session, number))
        object.__setattr__(self, "_what", what)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        (session, _), known = self._of, (self._what, name)
        if known not in session.methods:
            is_method, value = _pair(session, session.call("get", self, name))
            if not is_method:
                return value
            session.methods.add(known)
        return lambda *args, **kwargs: session.call("call", self, name, list(args), kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"the attribute {name} of an object in another process can't be set")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteObject):
            return False
        (session, number), (theirs, their_number) = self._of, other._of
        return session is theirs and (number == their_number or bool(session.call("equal", self, other)))

    def __hash__(self) -> int:
        return hash(self._of[1])

    def __repr__(self) -> str:
        return f"<{self._what} of the student's process>"

    def __del__(self) -> None:
        session, number = object.__getattribute__(self, "_of")
        session.dropped.append(number)

    def __container_sizes__(self) -> dict[str, int]:
        found: dict[str, int] = self._of[0].call("sizes", self)
        return found

    def __cpu_seconds__(self) -> float:
        """Return the processor time that the student's code has used so far, in all calls of the session."""
        seconds: float = self._of[0].seconds
        return seconds

    def __trace__(self, on: bool) -> None:
        self._of[0].call("trace", on)

    def __traced__(self) -> int:
        return int(self._of[0].call("traced"))


def _pair(session: Session, value: Any) -> tuple[bool, Any]:
    if not isinstance(value, list) or len(value) != 2:
        raise session._lost(Malformed(f"{value!r:.80}"))
    return bool(value[0]), value[1]


@dataclass
class RemoteStudent(Student):
    """A student's file that runs in the process behind ``sessions``."""

    by_messages = True
    sessions: Any = None
    slower: float = SLOWER
    patience: float = PATIENCE
    _session: Session | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.plugin: Any = None

    @property
    def session(self) -> Session:
        """The current session, in which the file is loaded. A session in which a call was interrupted is replaced."""
        if self._session is None or self._session.broken:
            self.close()
            request = {"lab": self.lab.lab, "path": str(self.path), "seed": self.seed}
            self._session = Session(self.sessions, request, self.deadline)
            if not self.lab.plugin:  # a package: the gates install it
                return self._session
            hooks_found, options = self._session.call("load")
            self.plugin = SimpleNamespace(
                hooks=tuple(hooks_found), options=tuple((group, name, None) for group, name in options)
            )
        return self._session

    def close(self) -> None:
        """End the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def load(self) -> None:
        """Load the file in the student's process."""
        assert self.session is not None

    def options(self) -> set[str]:
        """Return the names of the plugin's options."""
        return set(self.session.call("options"))

    def config(self, **options: Any) -> Any:
        """Return a stand-in for the student's config object."""
        return self.session.call("config", options)

    def make(self, config: Any = None, **kwargs: Any) -> Any:
        """Build the student's object in the student's process, and return a stand-in."""
        return self.session.call("make", config, kwargs)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of `minisgl.chapters.lab.grader.tutor_runs` in the student's process."""
        return self.session.call("run", function.__name__, list(args), kwargs)

    def observer(self, attribute: str, ready: Collection[str] | None = None) -> tuple[Any, PluginManager]:
        """Return a stand-in for the student's observer, and a plugin manager whose hooks call the student's."""
        session = self.session
        found, remote, called = session.call("observer", attribute, None if ready is None else sorted(ready))
        manager, known = RemoteManager(session, remote), dict(_hook_arguments())
        relay = SimpleNamespace()
        for name, arguments in called:
            if known.get(name) == tuple(arguments):
                setattr(relay, name, _relayed(session, remote, name, known[name]))
        manager._manager.register(relay)
        for name in vars(relay):
            for implementation in getattr(manager.hook, name).get_hookimpls():
                implementation.argnames = known[name]  # pluggy passes these arguments, in this order
        return found, manager


class RemoteManager(PluginManager):
    """A plugin manager whose hooks are those of a manager in the student's process."""

    def __init__(self, session: Session, remote: Any):
        super().__init__()
        self._session, self._remote = session, remote

    def call_hooks(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Call many hooks, in order, with one message."""
        self._session.call("hooks", self._remote, list(calls))


def _hook_arguments() -> list[tuple[str, tuple[str, ...]]]:
    """Return the names of all hooks, each with its arguments."""
    found = [(name, part) for name, part in vars(hooks).items() if name.startswith("minisgl_")]
    return [(name, tuple(inspect.signature(part).parameters)) for name, part in found]


def _relayed(session: Session, remote: Any, name: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Return an implementation of a hook that calls the hook in the student's process."""

    def call(*values: Any) -> Any:
        return session.call("hook", remote, name, dict(zip(arguments, values, strict=True)))

    call.__name__ = name
    return hooks.hookimpl(call)
