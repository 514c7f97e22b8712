"""The package ``pydantic-ai``."""

from typing import Any, Literal

from cases import KEY, MODEL, QUESTION, URL, Person, called, case, run
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
    """Call a tool, and stream the answer to its result. The call is forced in the first request only."""
    calls = []

    def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        """Add two numbers."""
        calls.append(called("add", {"a": a, "b": b}))
        return a + b

    def choose(context: Any) -> ModelSettings:
        choice: Any = "required" if context.run_step <= 1 else "none"
        return ModelSettings(temperature=0, max_tokens=100, tool_choice=choice, parallel_tool_calls=False)

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    made = Agent(model, model_settings=choose, retries=0, tools=[add])
    async with made.run_stream(QUESTION) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    return {"call": calls[0], "text": "".join(pieces)}


@case
async def responses() -> Any:
    model = OpenAIResponsesModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return (await Agent(model, model_settings=settings).run(QUESTION)).output


run()
