"""The package ``litellm``."""

from typing import Any

import litellm
from cases import ADD, KEY, MODEL, URL, USER, Person, called, case, run

given: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "messages": USER}


@case
def chat() -> Any:
    return litellm.completion(**given, temperature=0).choices[0].message.content


@case
def stream() -> Any:
    chunks = litellm.completion(**given, temperature=0, stream=True, stream_options={"include_usage": True})
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


@case
def schema() -> Any:
    answer = litellm.completion(**given, max_tokens=100, response_format=Person)
    return Person.model_validate_json(answer.choices[0].message.content).model_dump()


@case
def json_object() -> Any:
    answer = litellm.completion(**given, max_tokens=20, response_format={"type": "json_object"})
    return answer.choices[0].message.content


@case
def vllm_provider() -> Any:
    return litellm.completion(**given | {"model": f"hosted_vllm/{MODEL}"}, temperature=0).choices[0].message.content


@case
def tools() -> Any:
    answer = litellm.completion(**given, max_tokens=100, tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    return called(call.function.name, call.function.arguments)


@case
def streamed_tools() -> Any:
    chunks = litellm.completion(
        **given, max_tokens=100, tools=[ADD], tool_choice="required", parallel_tool_calls=False, stream=True
    )
    (call,) = litellm.stream_chunk_builder(list(chunks)).choices[0].message.tool_calls
    return called(call.function.name, call.function.arguments)


@case
def context_overflow() -> Any:
    long = [{"role": "user", "content": "word " * 4000}]
    try:
        litellm.completion(**given | {"messages": long})
    except litellm.ContextWindowExceededError:
        return "refused"


run()
