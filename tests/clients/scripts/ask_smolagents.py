"""The package ``smolagents``."""

from typing import Any

from cases import KEY, MODEL, QUESTION, URL, Person, case, run
from smolagents import ChatMessage, MessageRole, OpenAIModel

model = OpenAIModel(MODEL, api_base=URL, api_key=KEY, temperature=0, max_tokens=100)
MESSAGES = [ChatMessage(MessageRole.USER, [{"type": "text", "text": QUESTION}])]


@case
def chat() -> Any:
    return model.generate(MESSAGES).content


@case
def stream() -> Any:
    return [delta.content or "" for delta in model.generate_stream(MESSAGES)]


@case
def schema() -> Any:
    format_ = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    return Person.model_validate_json(model.generate(MESSAGES, response_format=format_).content).model_dump()


run()
