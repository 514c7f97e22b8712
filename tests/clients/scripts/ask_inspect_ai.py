"""The package ``inspect-ai``."""

from typing import Any, Literal

from cases import KEY, MODEL, QUESTION, URL, called, case, run
from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import tool
from inspect_ai.util import json_schema
from pydantic import BaseModel

MODEL_OF_PROVIDER = f"openai-api/minisgl/{MODEL}"


class Person(BaseModel):
    """A person, without bounds, because `json_schema` drops them."""

    name: Literal["Ada", "Alan"]
    age: Literal[4, 5]


def model(**more: Any) -> Any:
    config = GenerateConfig(temperature=0, max_tokens=100, max_retries=0, **more)
    return get_model(MODEL_OF_PROVIDER, base_url=URL, api_key=KEY, config=config, memoize=False)


@case
async def chat() -> Any:
    return (await model().generate(QUESTION)).completion


@case
async def schema() -> Any:
    format_ = ResponseSchema(name="person", json_schema=json_schema(Person))
    answer = await model(response_schema=format_).generate(QUESTION)
    return Person.model_validate_json(answer.completion).model_dump()


@tool
def add() -> Any:
    async def execute(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    return execute


@case
async def tools() -> Any:
    answer = await model(parallel_tool_calls=False).generate(QUESTION, tools=[add()], tool_choice="any")
    (call,) = answer.message.tool_calls
    return called(call.function, call.arguments)


run()
