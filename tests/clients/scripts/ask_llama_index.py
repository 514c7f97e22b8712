"""The package ``llama-index-llms-openai-like``."""

from typing import Any, Literal

from cases import KEY, MODEL, QUESTION, URL, Person, called, case, run
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

given: dict[str, Any] = {"model": MODEL, "api_base": URL, "api_key": KEY, "is_chat_model": True, "max_retries": 0}
llm = OpenAILike(**given, context_window=1024, max_tokens=100, temperature=0, should_use_structured_outputs=True)


@case
def chat() -> Any:
    return llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content


@case
def stream() -> Any:
    return [piece.delta or "" for piece in llm.stream_chat([ChatMessage(role="user", content=QUESTION)])]


@case
def schema() -> Any:
    return llm.structured_predict(Person, PromptTemplate(QUESTION)).model_dump()


def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
    """Add two numbers."""
    return a + b


@case
def tools() -> Any:
    llm = OpenAILike(**given, context_window=1024, max_tokens=100, temperature=0, is_function_calling_model=True)
    tool = FunctionTool.from_defaults(add)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = llm.get_tool_calls_from_response(answer)
    return called(call.tool_name, call.tool_kwargs)


run()
