"""The package ``pydantic-ai``."""

from typing import Any, Literal

from cases import KEY, MODEL, QUESTION, RESULT, TO_CALCULATE, URL, Person, called, case, run
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

settings = ModelSettings(temperature=0, max_tokens=100)


def agent(**more: Any) -> Agent[Any, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(model, model_settings=settings, retries=0, **more)


@case
async def chat() -> Any:
    return (await agent().run(QUESTION)).output


@case
async def stream() -> Any:
    async with agent().run_stream(QUESTION) as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]


@case
async def schema() -> Any:
    return (await agent(output_type=NativeOutput(Person)).run(QUESTION)).output.model_dump()


@case
async def schema_by_tool() -> Any:
    return (await agent(output_type=Person).run(QUESTION)).output.model_dump()


@case
async def tools() -> Any:
    """End with a function: a call is forced because the agent may not answer with text."""
    calls = []

    def end(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        calls.append(called("add", {"a": a, "b": b}))
        return a + b

    await agent(output_type=ToolOutput(end, name="add")).run(QUESTION)
    return calls[0]


@case
async def streamed_agent() -> Any:
    """Leave it to the model to call a tool and to use its result, with both answers streamed."""
    calls = []

    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression."""
        calls.append(called("calculator", {"expression": expression}))
        return RESULT

    async with agent(tools=[calculator]).run_stream(TO_CALCULATE) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    return {"call": calls[0], "text": "".join(pieces)}


@case
async def responses() -> Any:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return (await Agent(model, model_settings=settings).run(QUESTION)).output


run()
