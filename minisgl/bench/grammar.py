"""``python -m minisgl.bench grammar``: what structured output costs, in output tokens a second.

The same rows are generated without a grammar and with each plugin of the group ``grammar``, in turns. Every row has one
of eight JSON schemas, whose texts are longer than the output, so that all rows have equal lengths with and without.
The schemas' grammars were compiled before. The model needs a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from minisgl.bench.arguments import add_json, add_options, parse, write_json
from minisgl.bench.offline import machine
from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.options.compose import compose, plain_errors
from minisgl.plugin_manager.manager import PluginManager
from minisgl.sampling_params import Grammar

_TEXT = {"type": "string", "minLength": 3, "maxLength": 40}
_WORD = {"type": "string", "pattern": "^[a-z]{2,12}( [a-z]{2,12}){1,6}$"}
_POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x", "y"]}
_COLOUR = {"enum": ["red", "green", "blue", "yellow", "a colour without a name"]}
_PERSON = {
    "type": "object",
    "properties": {"name": _WORD, "age": {"type": "integer"}, "friends": {"type": "array", "items": _WORD}},
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
_ITEMS = (
    {"type": "integer"},
    _TEXT,
    _WORD,
    _POINT | {"additionalProperties": False},
    _COLOUR,
    _PERSON,
    {"anyOf": [_WORD, {"type": "boolean"}, {"type": "null"}]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
)


def schemas(items: int) -> list[str]:
    """Return eight JSON schemas of arrays of at least ``items`` items, each of another kind."""
    return [json.dumps({"type": "array", "items": item, "minItems": items}) for item in _ITEMS]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser("python -m minisgl.bench grammar", description=__doc__)
    add_options(parser, "for every run")
    parser.add_argument("--rows", type=int, default=64, help="requests at once (default 64)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer (default 256)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--grammars", nargs="+", default=["plain", "llguidance"], help="plugins of the group grammar")
    add_json(parser)
    args = parse(parser, argv)
    report = {}
    with plain_errors():
        config = compose(PluginManager.load(), args.options)
        for plugin in args.grammars:
            report[plugin] = measure([*args.options, f"grammar={plugin}"], args.rows, args.tokens, args.repeat)
    found = machine(config.device, config.dtype)
    print_table(report, args.rows, args.tokens)
    Console().print(" · ".join(f"{name} {value}" for name, value in found.items()))
    write_json(args, {"machine": found, "rows": args.rows, "tokens": args.tokens, "runs": report})


def measure(options: Sequence[str], rows: int, tokens: int, repeat: int) -> dict[str, list[float]]:
    """Return the output tokens a second of ``repeat`` runs without a grammar (``without``) and with one (``with``)."""
    plain = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True)
    texts = schemas(tokens)
    with_grammar = [
        SamplingParams(temperature=1.0, max_tokens=tokens, grammar=Grammar("json_schema", texts[row % len(texts)]))
        for row in range(rows)
    ]
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with LLM(overrides=options) as llm:
        for run in range(repeat + 1):
            for name, params in (("without", [plain] * rows), ("with", with_grammar)):
                prompts = [f"{name} {run}: item {row} of the list is" for row in range(rows)]
                started = time.perf_counter()
                outputs = llm.generate(prompts, params)
                seconds = time.perf_counter() - started
                count = sum(len(output.token_ids) for output in outputs)
                if count != rows * tokens:
                    raise RuntimeError(f"{name} a grammar, {count} tokens came instead of {rows * tokens}.")
                if run:  # the first run compiles the grammars
                    rates[name].append(count / seconds)
    return rates


def print_table(report: dict[str, dict[str, list[float]]], rows: int, tokens: int) -> None:
    """Print the medians of each plugin's runs, and the difference in percent."""
    table = Table(title=f"{rows} rows, {tokens} tokens each, eight schemas: output tokens/s (median)")
    for column in ("grammar", "without", "with", "difference"):
        table.add_column(column, justify="left" if column == "grammar" else "right")
    for plugin, rates in report.items():
        before, after = statistics.median(rates["without"]), statistics.median(rates["with"])
        table.add_row(plugin, f"{before:,.0f}", f"{after:,.0f}", f"{100 * (after / before - 1):+.1f} %")
    Console().print(table)
