"""``python -m minisgl.shell``: a chat in the terminal, with a running server or with a server that the shell starts.

The shell is a client of the HTTP API, and keeps the messages of the conversation. It also reads lines from a pipe.
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

from minisgl.cluster.attached import HeldLog, attached_server

HELP = "/reset clears the conversation, /exit (or Ctrl-D) ends the shell, Ctrl-C stops a reply."


class ChatError(Exception):
    """An error for the user: the server refused the request, failed, or can't be reached."""


class Chat:
    """One conversation with the server at ``url``.

    ``system`` is the system message, if any. ``options`` are parameters of each chat request, such as ``temperature``.
    ``messages`` are the user's and the assistant's messages so far.
    """

    def __init__(self, url: str, system: str | None = None, api_key: str | None = None, **options: Any):
        self._url = urlsplit(url if "://" in url else f"http://{url}")
        if self._url.scheme not in ("http", "https") or self._url.hostname is None:
            raise ChatError(f"{url} is not the address of a server. Write it as http://127.0.0.1:1919")
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        return kind(self._url.hostname or "", self._url.port)

    def connect(self) -> None:
        """Connect to the server once, and send nothing. Raise `ChatError` if it can't be reached."""
        connection = self._connection()
        try:
            connection.connect()
        except OSError as error:
            raise ChatError(f"No reply from {self._url.geturl()}: {error}") from error
        finally:
            connection.close()

    def reset(self) -> None:
        """Clear the conversation."""
        self.messages.clear()

    def send(self, text: str) -> Generator[str, None, None]:
        """Send a user message, and yield the pieces of the reply as they arrive. Raise `ChatError`.

        The message and its reply are added to ``messages`` when the reply is complete, or when the caller closes the
        generator. If the caller closes it early, the reply is the part that has arrived. After an
        error, neither the message nor the reply is added.
        """
        request = [*self.messages, {"role": "user", "content": text}]
        body = {"messages": [*self._system, *request], "stream": True, **self._options}
        reply = ""
        connection = self._connection()
        try:
            path = self._url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), self._headers)
            for piece in _pieces(connection.getresponse()):
                reply += piece
                yield piece
        except GeneratorExit:
            self.messages = [*request, {"role": "assistant", "content": reply}]
            raise
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"No reply from {self._url.geturl()}: {str(error) or type(error).__name__}") from error
        finally:
            connection.close()  # the server aborts a request whose client has disconnected
        self.messages = [*request, {"role": "assistant", "content": reply}]


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Yield the text pieces of a streamed chat completion. Raise `ChatError` if the server sends an error."""
    if response.status != 200:
        raise ChatError(_error_message(response.read()))
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            event = json.loads(data)
            if "error" in event:
                raise ChatError(event["error"]["message"])
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])
    raise ChatError("The server closed the connection before the reply was complete.")


def _error_message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace") or "the server replied with an error"


def _lines() -> Iterator[str]:
    """Yield the lines that the user types, with editing and a history, or the lines of a pipe."""
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


def run_chat(chat: Chat, lines: Iterator[str], log: HeldLog | None = None) -> int:
    """Send each line to the chat, or run it as a command, until the lines end or a line is ``/exit``.

    ``log``: the log of the shell's own server. After an error, and after each reply if the user asked for the log, its
    lines are written. Return the exit status: 1 if the reply to the last message failed with an error, otherwise 0.
    """
    status = 0
    for line in lines:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/reset":
            chat.reset()
            print("The conversation was cleared.")
        elif text.startswith("/"):
            print(HELP if text == "/help" else f"There is no command {text.split()[0]}. {HELP}")
        elif text:
            status = _print_reply(chat, text)
            if log is not None and (status or log.always):
                log.release()
                log.hold()
    return status


def _print_reply(chat: Chat, text: str) -> int:
    """Send a message and print its reply as it arrives. Return 0, or 1 after an error."""
    pieces = chat.send(text)
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
    """Run the shell until the user ends it. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.shell", description="Chat with a model in the terminal.")
    parser.add_argument("--url", help="the URL of a running server; without it, the shell starts a server")
    parser.add_argument("--api-key", help="the API key of the server at --url")
    parser.add_argument("--system", help="the system message of the conversation")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument(
        "options", nargs="*", metavar="key=value", help="the server's options: see python -m minisgl -h"
    )
    args = parser.parse_args(argv)
    if args.url and args.options:
        parser.error(f"--url names a running server, so it can't have options of a new one: {' '.join(args.options)}")
    options = {"temperature": args.temperature} | ({"max_tokens": args.max_tokens} if args.max_tokens else {})

    log = HeldLog(args.options)

    def run(url: str) -> int:
        log.hold()
        chat = Chat(url, args.system, args.api_key, **options)
        if sys.stdin.isatty():
            chat.connect()
            print(f"Connected to {url}. {HELP}")
        return run_chat(chat, _lines(), log)

    try:
        if args.url:
            return run(args.url)
        with attached_server(args.options, log) as url:
            return run(url)
    except ChatError as error:
        print(f"minisgl: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
