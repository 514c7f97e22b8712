"""How the requests of one HTTP request ended, for the access log and for traces."""

from __future__ import annotations

from minisgl.server.request_record import Stream


def prompt_tokens(stream: Stream) -> int | None:
    """Return the tokens of all prompts, or None unless the first choice of each has ended without an error.

    The choices of a prompt share it.
    """
    tokens = 0
    for end in stream.ends[:: stream.params.n]:
        if end is None or end.finish_reason == "error":
            return None
        tokens += end.prompt_tokens
    return tokens


def finish_reasons(stream: Stream) -> list[str]:
    """Return why each choice ended, in order. A choice that was aborted has "abort"."""
    return ["abort" if end is None else end.finish_reason for end in stream.ends]
