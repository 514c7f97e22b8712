"""The package ``instructor``, with the package ``openai``."""

import contextlib
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from cases import KEY, MODEL, QUESTION, URL, USER, Person, case, run
from instructor.core import IncompleteOutputException, InstructorRetryException

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


def ask(mode: instructor.Mode) -> Any:
    patched = instructor.from_openai(client, mode=mode)
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 200, "response_model": Person}
    return patched.chat.completions.create(**given, max_retries=0).model_dump()


@case
def schema() -> Any:
    return ask(instructor.Mode.JSON_SCHEMA)


@case
def json_object() -> Any:
    """Return the text that the server sent: the schema is in the prompt only, so the model may not follow it."""
    texts = []
    patched = instructor.from_openai(client, mode=instructor.Mode.JSON)
    patched.on("completion:response", lambda answer: texts.append(answer.choices[0].message.content))
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20, "response_model": Person}
    with contextlib.suppress(IncompleteOutputException, InstructorRetryException):
        patched.chat.completions.create(**given, max_retries=0)
    return texts[0]


@case
def json_in_markdown() -> Any:
    """Return the text that the server sent: a block of JSON is only asked for in the prompt."""
    texts = []
    patched = instructor.from_openai(client, mode=instructor.Mode.MD_JSON)
    patched.on("completion:response", lambda answer: texts.append(answer.choices[0].message.content))
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20, "response_model": Person}
    with contextlib.suppress(IncompleteOutputException, InstructorRetryException):
        patched.chat.completions.create(**given, max_retries=0)
    return texts[0]


@case
def parallel_tools() -> Any:
    """Return the text that the server sent: the library lets the model choose, and ``tutor`` calls nothing."""
    texts = []
    patched = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
    patched.on("completion:response", lambda answer: texts.append(answer.choices[0].message.content))
    given: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 20, "response_model": Iterable[Person]}
    with contextlib.suppress(IncompleteOutputException, InstructorRetryException):
        list(patched.chat.completions.create(**given, max_retries=0))
    return texts[0]


@case
def schema_by_tool() -> Any:
    return ask(instructor.Mode.TOOLS)


@case
def schema_by_strict_tool() -> Any:
    return ask(instructor.Mode.TOOLS_STRICT)


@case
def responses_schema() -> Any:
    patched = instructor.from_openai(client, mode=instructor.Mode.RESPONSES_TOOLS)
    given: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": 200, "response_model": Person}
    return patched.responses.create(**given, max_retries=0).model_dump()


run()
