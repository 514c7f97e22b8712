"""The package ``openai``."""

from typing import Any

import openai
from cases import KEY, MODEL, URL, USER, Person, case, run

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


run()
