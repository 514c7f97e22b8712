"""`python -m minisgl.demo`: serves the embedded model, asks it four questions, and prints the streamed replies.

The demo starts a server on a free port, uses it over HTTP, and stops it. It uses no part of the engine directly. Its
arguments are options of the server (``python -m minisgl.demo tp=2``). The last question is the turn of an agent: the
model calls a tool, the demo runs it, and the model answers with its result.
"""

from __future__ import annotations

import ast
import http.client
import json
import operator
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from minisgl.cluster.attached import READY, HeldLog, read_url

TIMEOUT_SECONDS = 120.0
"""Seconds that the demo waits for the server to reply, and to exit."""

HANDBOOK = """\
Handbook of the Riverside Library
The reading room opens at 9:30. The reading room closes at 18:00.
The chess club meets in room 12. The chess club is led by Maria.
The door code of the archive is 4071.
You can borrow the atlas for 14 days. The globe costs 35 euros.
Bus 7 goes to the museum."""

Message = dict[str, Any]

QUESTIONS: tuple[list[Message], ...] = (
    [{"role": "user", "content": "What is a radix cache?"}],
    [{"role": "user", "content": "What is 123 + 456?"}],
    [{"role": "system", "content": HANDBOOK}, {"role": "user", "content": "What is the door code of the archive?"}],
)


AGENT_QUESTION = "What is 37 * 48?"
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
}  # fmt: skip


def calculator(expression: str) -> str:
    """Return the value of an expression of numbers, parentheses and ``+ - * /``, or what is wrong with it."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                result: float = _OPERATORS[type(op)](value(left), value(right))
                return result
        raise ValueError("invalid expression")

    try:
        return str(value(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, ArithmeticError) as error:
        return f"error: {error}"


class Timing(NamedTuple):
    """The timing of one reply: seconds until its first and its last token, and the numbers of tokens."""

    first: float
    last: float
    prompt_tokens: int
    tokens: int

    def __str__(self) -> str:
        rate = (self.tokens - 1) / (self.last - self.first) if self.tokens > 1 and self.last > self.first else 0.0
        return (
            f"{self.prompt_tokens} prompt tokens, first token after {self.first * 1000:.0f} ms, "
            f"{self.tokens} tokens at {rate:.0f} tok/s"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Return the exit status: 0 if all replies arrived and the server then exited with 0.

    The server's log is shown until the server is ready, and after an error. It would be in the middle of the replies.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "minisgl", "model=tutor", "server.port=0", *words]
    print("$", "python", *command[1:], flush=True)
    begun = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    assert server.stdout is not None
    assert server.stderr is not None
    log = HeldLog(words)
    log.read(server.stderr)
    try:
        address = read_url(server.stdout)
        if address is None:
            status = server.wait(TIMEOUT_SECONDS)
            log.join()
            print(f"The server did not start (exit status {status}).", file=sys.stderr)
            return 1
        log.read(server.stdout)
        log.hold()
        print(f"{READY}{address} (started in {time.monotonic() - begun:.1f} s)", flush=True)
        for messages in QUESTIONS:
            _show(address, messages)
            if log.always:
                log.release()
                log.hold()
        _show_agent(address)
        server.send_signal(signal.SIGTERM)
        status = server.wait(TIMEOUT_SECONDS)
        if status:
            log.release()
        print(f"\nThe server ended with status {status}. Start it yourself: python -m minisgl")
        return status
    except (RuntimeError, OSError, http.client.HTTPException) as error:
        print(f"\nThe demo failed: {error or type(error).__name__}", file=sys.stderr)
        log.release()
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    finally:
        _end(server)


def _end(server: subprocess.Popen[str]) -> None:
    """Stop the server if it still runs: with SIGINT, and after 10 seconds with SIGKILL."""
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _show_agent(address: str) -> None:
    """Ask a question beside a tool. Run the tool that the model calls, and show the answer to its result."""
    messages: list[Message] = [{"role": "user", "content": AGENT_QUESTION}]
    answer = _show(address, messages, tools=[CALCULATOR])
    if not answer.get("tool_calls"):
        return
    messages.append(answer)
    for call in answer["tool_calls"]:
        result = calculator(json.loads(call["function"]["arguments"]).get("expression", ""))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    _show(address, messages, first=2, tools=[CALCULATOR])


def _show(address: str, messages: list[Message], first: int = 0, **fields: Any) -> Message:
    """Send one chat request. Print its messages from ``first`` on, the reply as it is streamed, and its timing.

    Return the reply as a message.
    """
    print()
    for message in messages[first:]:
        text = message["content"].splitlines()
        more = f" … ({len(text)} lines)" if len(text) > 1 else ""
        print(f"{message['role']:>9}: {text[0]}{more}")
    print("assistant: ", end="", flush=True)
    begun = time.monotonic()
    reply: Message = {"role": "assistant", "content": ""}
    first_at, usage = 0.0, {"prompt_tokens": 0, "completion_tokens": 0}
    for event in _stream(address, messages, fields):
        for choice in event["choices"]:
            if piece := _add(reply, choice["delta"]):
                first_at = first_at or time.monotonic() - begun
                print(piece, end="", flush=True)
        usage = event.get("usage") or usage
    timing = Timing(first_at, time.monotonic() - begun, usage["prompt_tokens"], usage["completion_tokens"])
    print(f"\n           ({timing})", flush=True)
    return reply


def _add(reply: Message, delta: Message) -> str:
    """Add the change of a streamed message to ``reply``. Return the new text, also that of a tool call."""
    shown: str = delta.get("content") or ""
    reply["content"] += shown
    for change in delta.get("tool_calls") or ():
        calls = reply.setdefault("tool_calls", [])
        if change["index"] == len(calls):
            calls.append({**change, "function": {"name": change["function"]["name"], "arguments": ""}})
            shown += f"[calls {change['function']['name']}] "
        text = change["function"].get("arguments") or ""
        calls[change["index"]]["function"]["arguments"] += text
        shown += text
    return shown


def _stream(address: str, messages: list[Message], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events (chunks) of a streamed chat completion. Raise RuntimeError if the request fails."""
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=TIMEOUT_SECONDS)
    body = {
        "model": "tutor",
        "messages": messages,
        "temperature": 0,
        "max_tokens": 100,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"The server answered {response.status}: {response.read().decode(errors='replace')}")
        for line in response:
            data = line.decode().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if data:
                yield json.loads(data)
        raise RuntimeError("The stream ended without its last event.")
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main())
