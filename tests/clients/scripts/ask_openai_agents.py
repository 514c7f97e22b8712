"""The package ``openai-agents``."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from cases import KEY, MODEL, QUESTION, URL, Person, case, run
from openai import AsyncOpenAI

set_tracing_disabled(True)
settings = ModelSettings(temperature=0, max_tokens=100)


def model() -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))


@case
async def chat() -> Any:
    return (await Runner.run(Agent("a", model=model(), model_settings=settings), QUESTION)).final_output


@case
async def stream() -> Any:
    ran = Runner.run_streamed(Agent("a", model=model(), model_settings=settings), QUESTION)
    return [
        event.data.delta
        async for event in ran.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


@case
async def schema() -> Any:
    agent = Agent("a", model=model(), model_settings=settings, output_type=Person)
    return (await Runner.run(agent, QUESTION)).final_output.model_dump()


run()
