"""The package ``pydantic-ai``."""

from typing import Any

from cases import KEY, MODEL, QUESTION, URL, Person, case, run
from pydantic_ai import Agent, ModelSettings, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
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


run()
