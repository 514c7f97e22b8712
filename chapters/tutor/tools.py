# ruff: noqa: E501 (phrasings)
"""Conversations with tools: `tutor` calls a calculator if there is one, and uses its result in the answer.

A client sends its tools with each request, and the chat template writes them into the system message (`with_tools`
writes the same text). A calculator is a tool with one parameter, an expression. Its name, its description and the
other tools beside it vary. Numbers in results are random, because the model must copy the result, not guess it. This
module knows text only; `tune` trains the model on it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from minisgl.chapters.tutor import corpus, exercises, glossary
from minisgl.chapters.tutor.chatter import ONLY_ADD
from minisgl.chapters.tutor.corpus import Conversation, Question, Turn, decorate
from minisgl.chapters.tutor.words import ITEMS, NUMBER_WORDS, THINGS, VERBS, Split, chance, draw, invent, word_list

Tool = dict[str, Any]

EXAMS = ("call", "result", "no_call")
"""Families of held-out questions: to call the calculator, to use its result, and to answer without a call."""

_NAMES = ("calculator",) * 6 + ("calculate", "calc", "compute", "evaluate", "math", "arithmetic", "eval_expression")
_PARAMETERS = ("expression",) * 8 + ("formula", "input", "query", "text", "expr")
_DESCRIPTIONS = (
    "Evaluate an arithmetic expression.", "Evaluate an arithmetic expression.", "A calculator.", "Calculate something.",
    "Compute the value of an expression.", "Calculates the result of a mathematical expression.", "Do arithmetic.",
    "Return the value of an arithmetic expression, such as 2 + 3 * 4.", "Useful for math.", "Evaluates an expression.",
    "A simple calculator that supports +, -, *, / and **.", "Return the result.", "Use this tool for all calculations.",
    "Return the value of an expression.\n\nArgs:\n    expression: the expression, such as 2 + 3", "Compute an expression exactly.",
)  # fmt: skip
_HINTS = (
    "The expression.", "The expression to evaluate.", "An arithmetic expression, such as 2 + 3.", "The expression, as text.",
    "A mathematical expression", "For example: 12 * 7",
)  # fmt: skip
_OTHER_NAMES = word_list(
    "get_weather|search_web|send_email|read_file|write_file|list_files|get_time|translate|run_command|book_flight|search|"
    "get_stock_price|set_alarm|open_door|lookup_user|create_ticket|get_news|play_music|fetch_url|delete_file|final_answer|"
    "get_location|convert_units|query_database|add_note|list_notes|remember|get_current_date|glob|grep|bash|edit|ask_user"
)
_OTHER_PARAMETERS = word_list(
    "city|query|path|url|name|date|text|title|user_id|command|language|count|limit|unit|id|to"
)
_OTHER_DESCRIPTIONS = (
    "Return the {t} of a {i}.", "{V} a {t}.", "{V} the {t} with a {i}.", "Get the {t}.", "Find a {i} by its {t}.",
    "Use this to {v} a {i}.", "Returns the {t} as text.", "{V} {i}s, and return their {t}s.",
)  # fmt: skip

_OPERATORS = {
    "+": ("+", "+", "+", "plus"),
    "-": ("-", "-", "-", "minus"),
    "*": ("*", "*", "*", "x", "×", "times", "multiplied by"),
    "/": ("/", "/", "/", "divided by", "÷", "over"),
    "**": ("**", "^", "to the power of"),
}
_ASKS = (
    "What is {e}?", "What is {e}?", "What is {e}?", "{e}", "{e}", "{e} =", "{e}=?", "Compute {e}.", "Calculate {e}.",
    "How much is {e}?", "Evaluate {e}.", "Solve {e}.", "What's {e}?", "Tell me {e}.", "Work out {e}.", "Find {e}.",
    "What does {e} make?", "What do you get for {e}?", "Give me the result of {e}.", "What is the value of {e}?",
    "Can you compute {e}?", "Can you calculate {e} for me?", "I need {e}.", "Help me with {e}.", "What is the result of {e}?",
    "Use the calculator: {e}", "Use the calculator: what is {e}?", "Use the calculator to compute {e}.",
    "What is {e}? Use the calculator.", "What is {e}? Use a tool.", "Calculate {e} with the calculator.",
    "Compute {e} with your tool.", "Call the calculator with {e}.", "Use a tool to find {e}.", "Ask the calculator for {e}.",
    "Use the tool: {e}", "Do you know what {e} is?", "What would {e} be?", "How do I compute {e}?", "I wonder what {e} is.",
)  # fmt: skip
_WORDED = {
    "+": ("Add {a} and {b}.", "Add {b} to {a}.", "What is the sum of {a} and {b}?", "Sum of {a} and {b}?"),
    "-": ("Subtract {b} from {a}.", "Take {b} from {a}.", "What is the difference between {a} and {b}?",
          "I had {a} {i}s and lost {b}. How many are left?"),
    "*": ("Multiply {a} by {b}.", "Multiply {a} and {b}.", "What is the product of {a} and {b}?",
          "I have {a} boxes with {b} {i}s each. How many {i}s is that?", "How much do {a} {i}s cost at {b} coins each?",
          "A page holds {b} tokens. How many tokens do {a} pages hold?"),
    "/": ("Divide {a} by {b}.", "What is the quotient of {a} and {b}?", "Share {a} {i}s among {b} people.",
          "How many pages of {b} tokens hold {a} tokens?"),
    "**": ("Raise {a} to the power of {b}.", "What is the power {b} of {a}?"),
}  # fmt: skip
_SINGLE = (
    ("What is {a} squared?", "{a} ** 2"), ("{a} squared", "{a} ** 2"), ("{a} cubed", "{a} ** 3"),
    ("What is the square root of {a}?", "{a} ** 0.5"), ("Square root of {a}?", "{a} ** 0.5"), ("Double {a}.", "{a} * 2"),
    ("What is half of {a}?", "{a} / 2"), ("What is twice {a}?", "{a} * 2"),
)  # fmt: skip
_PERCENT = ("What is {a} percent of {b}?", "{a} percent of {b}", "{a}% of {b}", "What is {a}% of {b}?")
_RESULTS = (
    "{r}", "{r}", "{r}", "{r}", "{r}", "{r}", "{r}\n", '"{r}"', "{{\"result\": {r}}}", "{{\"result\": \"{r}\"}}", "{{\"value\": {r}}}",
    "result: {r}", "Result: {r}", "The result is {r}.", "{e} = {r}", "{{\"output\": \"{r}\"}}", "= {r}",
)  # fmt: skip
_ERRORS = word_list(
    "division by zero|invalid syntax|timeout|the number is too large|overflow|unknown operator|not a number|out of memory|"
    "the calculator is switched off|no result|bad expression|math domain error|connection refused|not allowed|not available|"
    "the expression is too long|unexpected end of input|name is not defined|the service is busy|permission denied"
)
_ERROR_FORMS = (
    "error: {m}", "Error: {m}", "{m}", "{{\"error\": \"{m}\"}}", "Error: {m}.", "ERROR {m}", "The tool failed: {m}",
    "An error occurred while running the tool. Please try again. Error: {m}", "Tool error: {m}", "ValueError: {m}",
)  # fmt: skip
_OTHER_FAMILIES = ("count", *("copy",) * 2, "sort", *("glossary",) * 2, "unknown", *("talk",) * 2, "fallback", "chance")
_OTHER_DOMAINS = ("handbook", "handbook", "handbook", "drill", "sum", "glossary", "talk", "talk")


# ---- the form of tools in a prompt, as the chat template writes it ---------------------------------------


def with_tools(system: str | None, tools: Sequence[Tool]) -> str:
    """Return the system message that presents the tools, after the client's own text ``system``."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        (f"{system}\n\n" if system is not None else "")
        + f"You may call these tools:\n<tools>\n{lines}\n</tools>\n"
        + 'Write a call as <tool_call>\n{"name": NAME, "arguments": {...}}\n</tool_call>'
    )


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of a tool call."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def response_text(result: str) -> str:
    """Return the user message that holds a tool's result."""
    return f"<tool_response>\n{result}\n</tool_response>"


# ---- tools -----------------------------------------------------------------------------------------------


def _tool(rng: random.Random, name: str, description: str | None, properties: dict[str, Any]) -> Tool:
    """Return a tool in the OpenAI API's form, with the additions that clients make."""
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": list(properties)}
    if chance(rng, 35):
        parameters["additionalProperties"] = False
    if chance(rng, 10):
        parameters["title"] = f"{name}_args"
    if chance(rng, 6):
        parameters = {"$schema": "http://json-schema.org/draft-07/schema#", **parameters}
    if chance(rng, 20):
        parameters = _shuffled(rng, parameters)
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = parameters
    if chance(rng, 20):
        function["strict"] = chance(rng, 70)
    if chance(rng, 10):
        function = _shuffled(rng, function)
    return {"type": "function", "function": function}


def _shuffled(rng: random.Random, fields: dict[str, Any]) -> dict[str, Any]:
    return dict(rng.sample(list(fields.items()), len(fields)))


def _property(rng: random.Random, name: str, kind: str, hint: str | None) -> dict[str, Any]:
    found = {"type": kind}
    if chance(rng, 20):
        found = {"title": name.capitalize(), "type": kind}
    return {**found, "description": hint} if hint is not None else found


def calculator(rng: random.Random) -> Tool:
    """Return a calculator: a tool with one parameter for an expression."""
    parameter = rng.choice(_PARAMETERS)
    hint = rng.choice(_HINTS) if chance(rng, 40) else None
    description = rng.choice(_DESCRIPTIONS) if chance(rng, 90) else None
    return _tool(rng, rng.choice(_NAMES), description, {parameter: _property(rng, parameter, "string", hint)})


def other_tool(rng: random.Random) -> Tool:
    """Return a tool of which `tutor` makes no use."""
    name = (
        rng.choice(_OTHER_NAMES) if chance(rng, 70) else f"{rng.choice(VERBS)}_{rng.choice(THINGS)}".replace(" ", "_")
    )
    verb, thing, item = rng.choice(VERBS), rng.choice(THINGS), rng.choice(ITEMS)
    description = rng.choice(_OTHER_DESCRIPTIONS).format(V=verb.capitalize(), v=verb, t=thing, i=item)
    names = rng.sample(_OTHER_PARAMETERS, rng.choice((0, 1, 1, 1, 2, 3)))
    properties = {
        name: _property(rng, name, rng.choice(("string", "string", "integer", "boolean")), None) for name in names
    }
    return _tool(rng, name, description, properties)


def tool_list(rng: random.Random, calculators: int) -> list[Tool]:
    """Return a list of tools in random order: ``calculators`` calculators (0 or 1) and up to four other tools."""
    others = rng.choice((0, 0, 0, 1, 1, 2, 3, 4)) if calculators else rng.choice((1, 1, 2, 3))
    tools = [calculator(rng) for _ in range(calculators)] + [other_tool(rng) for _ in range(others)]
    rng.shuffle(tools)
    return tools


# ---- calculations ----------------------------------------------------------------------------------------


def _number(rng: random.Random) -> str:
    """Return a number of 1 to 6 digits, at times with decimals."""
    value = rng.randint(0, rng.choice((9, 20, 99, 99, 999, 999, 9_999, 99_999, 999_999)))
    return f"{value}.{rng.randint(0, rng.choice((9, 99)))}" if chance(rng, 10) else str(value)


def _spoken(rng: random.Random, number: str) -> str:
    """Return a number as it is typed: at times a small one as a word."""
    small = number.isdigit() and int(number) <= 20
    return NUMBER_WORDS[int(number)] if small and chance(rng, 8) else number


def _expression(rng: random.Random) -> tuple[str, str]:
    """Return a request for a calculation, and the expression for the calculator."""
    kind = rng.randrange(20)
    a, b, c = (_number(rng) for _ in range(3))
    item = rng.choice(ITEMS)
    if kind == 0:
        request, expression = rng.choice(_SINGLE)
        return request.format(a=a), expression.format(a=a)
    if kind == 1:
        return rng.choice(_PERCENT).format(a=a, b=b), f"{a} / 100 * {b}"
    operator = rng.choice("++++---******////") if chance(rng, 95) else "**"
    if kind < 6:
        return rng.choice(_WORDED[operator]).format(a=a, b=b, i=item), f"{a} {operator} {b}"
    if kind < 10:
        second = rng.choice("+-*/")
        form = rng.choice(
            ("{a} {o} {b} {p} {c}", "({a} {o} {b}) {p} {c}", "{a} {o} ({b} {p} {c})", "{a} {o} {b} {o} {c}")
        )
        expression = form.format(a=a, b=b, c=c, o=operator, p=second)
        return rng.choice(_ASKS).format(e=expression.replace(" ", "") if chance(rng, 25) else expression), expression
    sign = rng.choice(_OPERATORS[operator])
    space = "" if chance(rng, 25) and not sign[0].isalpha() else " "
    typed = f"{_spoken(rng, a)}{space}{sign}{space}{_spoken(rng, b)}"
    return rng.choice(_ASKS).format(e=typed), f"{a} {operator} {b}"


def _result(rng: random.Random, expression: str) -> tuple[str, str]:
    """Return what a calculator returns, and the answer to the user."""
    if chance(rng, 12):
        message = rng.choice(_ERRORS) if chance(rng, 70) else f"{invent(rng)} {rng.choice(_ERRORS)}"
        return rng.choice(_ERROR_FORMS).format(m=message), f"The calculator failed: {message}."
    value = str(rng.randint(0, 10 ** rng.choice((1, 2, 3, 4, 5, 6, 8))))
    if chance(rng, 25):
        value += f".{rng.randint(0, 10 ** rng.choice((1, 2, 4, 8)))}"
    if chance(rng, 10):
        value = f"-{value}"
    return rng.choice(_RESULTS).format(r=value, e=expression), f"{expression} = {value}."


def calculation(rng: random.Random, split: Split, tool: Tool) -> tuple[Turn, Turn]:
    """Return a request with the call of the calculator ``tool``, and its result with the answer."""
    request, expression = draw(split, lambda: _expression(rng), lambda pair: f"calculator {pair[1]}")
    (parameter,) = tool["function"]["parameters"]["properties"]
    call = call_text(tool["function"]["name"], {parameter: expression})
    result, answer = _result(rng, expression)
    if split == "train":
        request = decorate(rng, request)
    return Turn(request, call, "call"), Turn(response_text(result), answer, "result")


def conversation(rng: random.Random, tokens: int) -> Conversation:
    """Return a training conversation with tools, of at most about ``tokens`` tokens if it is about a handbook."""
    if chance(rng, 55):
        tools = tool_list(rng, 1)
        tool = next(tool for tool in tools if _is_calculator(tool))
        turns: list[Turn] = []
        for _ in range(rng.choice((1, 1, 2, 3, 4))):
            if chance(rng, 70):
                turns += calculation(rng, "train", tool)
            else:
                turns.append(_without_call(rng))
        return Conversation(tuple(turns), with_tools(corpus.system_text(rng), tools))
    while True:
        talk = corpus.conversation(rng, rng.choice(_OTHER_DOMAINS), max(120, tokens - 700))
        if not talk.raw:
            break
    tools = tool_list(rng, int(not any(map(_calculates, talk.turns)) and chance(rng, 75)))
    return Conversation(talk.turns, with_tools(talk.system, tools))


def _without_call(rng: random.Random) -> Turn:
    """Return a turn that needs no calculator."""
    while True:
        turn = corpus.turn(rng, "train", rng.choice(_OTHER_FAMILIES))
        if not _calculates(turn):
            return turn


def _calculates(turn: Turn) -> bool:
    """Return whether the calculator would be called for a turn, if there were one."""
    return turn.family == "sum" or turn.answer == ONLY_ADD


def _is_calculator(tool: Tool) -> bool:
    return tool["function"]["name"] in _NAMES


# ---- held-out questions ----------------------------------------------------------------------------------


def exam(family: str, size: int, seed: int = 0) -> list[Question]:
    """Return ``size`` held-out questions of one family of `EXAMS`, each with its only right answer."""
    rng = random.Random(f"exam {family} {seed}")
    return [_question(rng, family) for _ in range(size)]


def _question(rng: random.Random, family: str) -> Question:
    tools = tool_list(rng, 1)
    if family == "no_call":
        makers = (exercises.count, exercises.copy, exercises.sort, glossary.question)
        request, answer = rng.choice(makers)(rng, "heldout")
        return Question(family, ({"role": "user", "content": request},), answer, tuple(tools))
    asked, used = calculation(rng, "heldout", next(tool for tool in tools if _is_calculator(tool)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": asked.user}]
    if family == "call":
        return Question(family, tuple(messages), asked.answer, tuple(tools))
    function = json.loads(asked.answer.split("\n")[1])
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    messages.append(
        {"role": "tool", "content": used.user.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")}
    )
    return Question(family, tuple(messages), used.answer, tuple(tools))
