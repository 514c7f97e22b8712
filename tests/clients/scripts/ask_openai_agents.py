"""The package ``openai-agents``."""

from typing import Any, Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import KEY, MODEL, QUESTION, RESULT, TO_CALCULATE, URL, Person, called, case, run
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


@case
async def agent() -> Any:
    """Call a tool and answer: the library forces a call in the first turn only."""
    calls = []

    @function_tool
    def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        """Add two numbers."""
        calls.append(called("add", {"a": a, "b": b}))
        return a + b

    forced = ModelSettings(temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False)
    ran = await Runner.run(Agent("a", model=model(), model_settings=forced, tools=[add]), QUESTION, max_turns=3)
    return {"call": calls[0], "text": ran.final_output}


@case
async def streamed_agent() -> Any:
    """Leave it to the model to call a tool and to use its result, with both answers streamed."""
    calls = []

    @function_tool
    def calculator(expression: str) -> str:
        """Evaluate an arithmetic expression."""
        calls.append(called("calculator", {"expression": expression}))
        return RESULT

    agent = Agent("a", model=model(), model_settings=settings, tools=[calculator])
    ran = Runner.run_streamed(agent, TO_CALCULATE, max_turns=3)
    pieces = [
        event.data.delta
        async for event in ran.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(pieces) == ran.final_output
    return {"call": calls[0], "text": ran.final_output}


@case
async def responses() -> Any:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    agent = Agent("a", model=OpenAIResponsesModel(MODEL, client), model_settings=settings)
    return (await Runner.run(agent, QUESTION)).final_output


@case
async def responses_schema() -> Any:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    agent = Agent("a", model=OpenAIResponsesModel(MODEL, client), model_settings=settings, output_type=Person)
    return (await Runner.run(agent, QUESTION)).final_output.model_dump()


run()
