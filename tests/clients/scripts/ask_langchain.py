"""The package ``langchain-openai``."""

import functools
import operator
from typing import Any

import openai
from cases import KEY, MODEL, QUESTION, URL, Person, add, called, case, run
from langchain_core.messages import HumanMessage, ToolMessage
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


@case
def tools() -> Any:
    (call,) = llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False).invoke(QUESTION).tool_calls
    return called(call["name"], call["args"])


@case
def named_tool() -> Any:
    (call,) = llm.bind_tools([add, Person], tool_choice="add").invoke(QUESTION).tool_calls
    return called(call["name"], call["args"])


@case
def streamed_tools() -> Any:
    chunks = list(llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False).stream(QUESTION))
    (call,) = functools.reduce(operator.add, chunks).tool_calls
    return called(call["name"], call["args"])


@case
def schema_by_tool() -> Any:
    return llm.with_structured_output(Person, method="function_calling").invoke(QUESTION).model_dump()


@case
def json_object() -> Any:
    """Return the text that the server sent: the schema is in no prompt, so the model may not follow it."""
    bound = llm.with_structured_output(Person, method="json_mode", include_raw=True)
    try:
        return bound.invoke(f"{QUESTION} Answer in JSON.")["raw"].content
    except openai.LengthFinishReasonError as error:
        return error.completion.choices[0].message.content


@case
def agent() -> Any:
    bound = llm.bind_tools([add], tool_choice="any", parallel_tool_calls=False)
    messages = [HumanMessage(QUESTION), bound.invoke(QUESTION)]
    (call,) = messages[-1].tool_calls
    messages.append(ToolMessage(str(add(**call["args"])), tool_call_id=call["id"]))
    answer = llm.bind_tools([add], tool_choice="none").invoke(messages)
    return {"call": called(call["name"], call["args"]), "text": answer.content}


run()
