"""The package ``litellm``."""

from typing import Any

import litellm
from cases import KEY, MODEL, URL, USER, Person, case, run

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


run()
