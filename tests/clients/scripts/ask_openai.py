"""The package ``openai``."""

from typing import Any

import openai
from cases import ADD, CALCULATOR, KEY, MODEL, RESULT, TO_CALCULATE, URL, USER, Person, called, case, run

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)


@case
def chat() -> Any:
    answer = client.chat.completions.create(model=MODEL, messages=USER, temperature=0)
    assert answer.usage and answer.usage.completion_tokens > 1
    return answer.choices[0].message.content


@case
def stream() -> Any:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[-1].usage and not chunks[-1].choices
    return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]


@case
def schema() -> Any:
    answer = client.chat.completions.parse(model=MODEL, messages=USER, max_tokens=100, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)
    return answer.choices[0].message.parsed.model_dump()


@case
def streamed_schema() -> Any:
    with client.chat.completions.stream(model=MODEL, messages=USER, max_tokens=100, response_format=Person) as stream:
        for _event in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Person)
    return parsed.model_dump()


@case
def tools() -> Any:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=100, tools=[ADD], tool_choice="required", parallel_tool_calls=False
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    return called(call.function.name, call.function.arguments)


@case
def streamed_tools() -> Any:
    with client.chat.completions.stream(
        model=MODEL, messages=USER, max_tokens=100, tools=[ADD], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert "".join(pieces) == call.function.arguments
    return called(call.function.name, call.function.arguments)


@case
def agent() -> Any:
    """Call a tool, send its result back, and get an answer."""
    given: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "tools": [ADD]}
    first = client.chat.completions.create(**given, messages=USER, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    (call,) = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    second = client.chat.completions.create(**given, messages=[*USER, message, result], tool_choice="none")
    return {"call": called(call.function.name, call.function.arguments), "text": second.choices[0].message.content}


@case
def streamed_agent() -> Any:
    """Leave it to the model to call a tool and to use its result, with both answers streamed."""
    given: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 100, "tools": [CALCULATOR]}
    asked: list[Any] = [{"role": "user", "content": TO_CALCULATE}]
    with client.chat.completions.stream(**given, messages=asked) as first:
        message = first.get_final_completion().choices[0].message
    (call,) = message.tool_calls or []
    sent = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    result = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    chunks = client.chat.completions.create(**given, messages=[*asked, sent, result], stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    return {"call": called(call.function.name, call.function.arguments), "text": text}


run()
