"""The package ``langchain-openai``."""

from typing import Any

from cases import KEY, MODEL, QUESTION, URL, Person, case, run
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=100, max_retries=0)


@case
def chat() -> Any:
    return llm.invoke(QUESTION).content


@case
def stream() -> Any:
    return [chunk.content for chunk in llm.stream(QUESTION)]


@case
def schema() -> Any:
    return llm.with_structured_output(Person, method="json_schema").invoke(QUESTION).model_dump()


run()
