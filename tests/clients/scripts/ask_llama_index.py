"""The package ``llama-index-llms-openai-like``."""

from typing import Any

from cases import KEY, MODEL, QUESTION, URL, Person, case, run
from llama_index.core import PromptTemplate
from llama_index.core.llms import ChatMessage
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


run()
