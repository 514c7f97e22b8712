"""``python -m minisgl.shell``: chat in the terminal, with a server that runs already or one of its own.

A client like any other: it knows the HTTP API and keeps the conversation. Lines that are piped in work too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from minisgl.server.attached import attached_server

HELP = "/reset forgets the conversation, /exit leaves (so does Ctrl-D), Ctrl-C stops an answer."


class ChatError(Exception):
    """The server refused, failed, or is not there. Says why."""


class Chat:
    """One conversation with a server at ``url``; ``options`` are parameters of each request."""

    def __init__(self, url: str, system: str | None = None, api_key: str | None = None, **options: Any):
        self._url = urlsplit(url if "://" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or self._url.hostname is None:
            raise ChatError(f"{url} is not the address of a server. Write it as http://127.0.0.1:1919")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget what was said."""
        self.turns.clear()

    def say(self, text: str) -> Generator[str, None, None]:
        """The pieces of the answer as they come. The turn counts as said once all of them came, or the caller closes
        the iterator: then the answer is what came until then. Raises `ChatError`."""
        asked = [*self.turns, {"role": "user", "content": text}]
        body = {"messages": [*self._system, *asked], "stream": True, **self._options}
        answer = ""
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port)
        try:
            path = self._url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), self._headers)
            for piece in _pieces(connection.getresponse()):
                answer += piece
                yield piece
        except GeneratorExit:
            self.turns = [*asked, {"role": "assistant", "content": answer}]
            raise
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"No answer from {self._url.geturl()}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()  # a server that still computes stops then
        self.turns = [*asked, {"role": "assistant", "content": answer}]


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """The text in a stream of server-sent events, or in one chunk. Raises `ChatError` for an error object."""
    if response.status != 200:
        raise ChatError(_message(response.read()))
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"]["message"])
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])
    raise ChatError("The server hung up in the middle of its answer.")


def _message(body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace") or "the server answered with an error"


def _lines() -> Iterator[str]:
    """What the user types, with history and editing; or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minisgl"
    cache.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession("> ", history=FileHistory(str(cache / "shell_history")))
    while True:
        try:
            yield session.prompt()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def talk(chat: Chat, lines: Iterator[str]) -> int:
    """Until the lines end, or one says so. The exit status: 1 where the last question got no answer."""
    status = 0
    for line in lines:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            chat.reset()
            print("The conversation is forgotten.")
        elif text.startswith("/"):
            print(HELP if text == "/help" else f"There is no {text.split()[0]}. {HELP}")
        elif text:
            status = _answer(chat, text)
    return status


def _answer(chat: Chat, text: str) -> int:
    pieces = chat.say(text)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        pieces.close()
        print(" …")
    except ChatError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Chat until the user leaves."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.shell", description="Chat with a model in the terminal.")
    parser.add_argument("--url", help="a server that runs already; without it, one is started")
    parser.add_argument("--api-key", help="the key that the server at --url asks for")
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="the server's options: see python -m minisgl -h"
    )
    args = parser.parse_args(argv)
    if args.url and args.options:
        parser.error(f"--url names a server that runs already, so it can't be given options: {' '.join(args.options)}")
    options = {"temperature": args.temperature} | ({"max_tokens": args.max_tokens} if args.max_tokens else {})

    def run(url: str) -> int:
        if sys.stdin.isatty():
            print(f"Talking to {url}. {HELP}")
        return talk(Chat(url, args.system, args.api_key, **options), _lines())

    try:
        if args.url:
            return run(args.url)
        with attached_server(args.options) as url:
            return run(url)
    except ChatError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
