"""Parameters of the OpenAI API, of vLLM and of SGLang that minisgl does not implement: hints, and refusals by name.

A parameter that changes the answer is implemented or refused. A *hint* (`HINTS`) is advice or a label that a server is
free not to follow: it is accepted with every value, and counted in a metric. All others (`REFUSED`) are refused with a
reason, unless the value asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, Counter, generate_latest

from minisgl import hookimpl
from minisgl.config import Config
from minisgl.plugins.http.apis.chat_template import model_template
from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.parameters import FullChatRequest, StreamOptions, decode_field, with_whole_numbers
from minisgl.sampling_params import shorten
from minisgl.server.app import Api
from minisgl.server.errors import ApiError
from minisgl.server.extension import HttpExtension, Stats
from minisgl.server.parsing import fields_of, unknown_parameter

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "custom_labels": "labels for SGLang's metrics",
        "guided_decoding_backend": "advice which library makes the masks of a grammar",
        "metadata": "labels of the request in OpenAI's dashboard",
        "prompt_cache_key": "advice for a router that looks for a server with this prompt in its cache",
        "prompt_cache_options": "advice how a prompt is cached",
        "prompt_cache_retention": "advice how long a prompt stays in the cache",
        "safety_identifier": "a label of the end user",
        "service_tier": "advice on the speed and price of a request at OpenAI",
        "user": "a label of the end user",
        "verbosity": "advice to OpenAI's models on the length of an answer",
    }
)
"""The parameters that are accepted with every value and have no effect here: name → what they are."""


class Refusal(NamedTuple):
    """A parameter that is refused by name, and ``reason``, a sentence. ``neutral``: the values that ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


_NO_MEDIA = "the models here read and write text only"
_NO_DISAGGREGATION = "prompts are computed where the answer is"
REFUSED: Mapping[str, Refusal] = MappingProxyType(
    {
        "audio": Refusal(_NO_MEDIA),
        "best_of": Refusal("it must be equal to n: all choices are returned, none is chosen by its probability"),
        "bootstrap_host": Refusal(_NO_DISAGGREGATION),
        "bootstrap_port": Refusal(_NO_DISAGGREGATION),
        "bootstrap_room": Refusal(_NO_DISAGGREGATION),
        "chat_template": Refusal("the server uses the model's own chat template"),
        "custom_logit_processor": Refusal("a server runs no code of its clients"),
        "custom_params": Refusal("they belong to custom_logit_processor"),
        "data_parallel_rank": Refusal("a router chooses the server"),
        "disagg_prefill_dp_rank": Refusal(_NO_DISAGGREGATION),
        "documents": Refusal("write the documents into a message", ([],)),
        "extra_key": Refusal("use cache_salt"),
        "function_call": Refusal("it is the old name of tool_choice", ("none", "auto")),
        "functions": Refusal("it is the old name of tools", ([],)),
        "guided_whitespace_pattern": Refusal("a JSON answer has the white space that the grammar of its schema allows"),
        "images_config": Refusal(_NO_MEDIA, ({},)),
        "include_reasoning": Refusal("the answer has its reasoning", (True,)),
        "input_embeds": Refusal("a prompt is a text or token ids"),
        "input_ids": Refusal("a prompt of token ids is the parameter prompt of a completion"),
        "kv_transfer_params": Refusal(_NO_DISAGGREGATION, ({},)),
        "length_penalty": Refusal("it belongs to beam search", (1.0, 1)),
        "logits_processors": Refusal("a server runs no code of its clients", ([],)),
        "lora_path": Refusal("there are no LoRA adapters"),
        "mm_processor_kwargs": Refusal(_NO_MEDIA, ({},)),
        "modalities": Refusal(_NO_MEDIA, (["text"],)),
        "moderation": Refusal("no model here judges texts"),
        "ngram_corpus_id": Refusal("drafts come from the option speculation of the server"),
        "no_stop_trim": Refusal("use include_stop_str_in_output", (False,)),
        "prediction": Refusal("drafts come from the option speculation of the server"),
        "prompt_embeds": Refusal("a prompt is a text or token ids"),
        "request_id": Refusal("send the header X-Request-Id"),
        "return_cached_tokens_details": Refusal("the usage has the number of cached tokens", (False,)),
        "return_hidden_states": Refusal("hidden states stay in the engine", (False,)),
        "return_routed_experts": Refusal("the choice of experts stays in the engine", (False,)),
        "return_tokens_as_token_ids": Refusal("use return_token_ids", (False,)),
        "rid": Refusal("send the header X-Request-Id"),
        "routed_dp_rank": Refusal("a router chooses the server"),
        "routed_experts_start_len": Refusal("it belongs to return_routed_experts", (0,)),
        "separate_reasoning": Refusal("the option of the server decides how reasoning is read", (True,)),
        "session_id": Refusal("the server keeps no sessions: its cache finds common prefixes by itself"),
        "session_params": Refusal("the server keeps no sessions: its cache finds common prefixes by itself", ({},)),
        "spaces_between_special_tokens": Refusal("special tokens are written as the model's tokenizer does", (True,)),
        "stop_regex": Refusal("use stop", ([], "")),
        "store": Refusal("the server keeps no answers", (False,)),
        "stream_reasoning": Refusal("reasoning is streamed as it is written", (True,)),
        "structural_tag": Refusal("use a grammar"),
        "suffix": Refusal("no model here was trained to fill in the middle of a text", ("",)),
        "use_beam_search": Refusal("there is no beam search", (False,)),
        "vllm_xargs": Refusal("there are no such arguments", ({},)),
        "web_search_options": Refusal("the server has no access to the web"),
    }
)
"""The parameters that are refused by name, in the bodies of chats and of plain completions."""
REFUSED_OF: Mapping[type[msgspec.Struct], Mapping[str, Refusal]] = MappingProxyType(
    {
        FullChatRequest: {
            "echo": Refusal("it belongs to a plain completion", (False,)),
            "add_special_tokens": Refusal("the chat template writes them", (False,)),
        },
        CompletionRequest: {
            "reasoning_effort": Refusal("it belongs to a chat"),
            "enable_thinking": Refusal("it belongs to a chat"),
            "add_generation_prompt": Refusal("it belongs to a chat"),
            "continue_final_message": Refusal("it belongs to a chat: a plain prompt is continued anyway", (False,)),
            "add_special_tokens": Refusal("give the prompt as token ids", (True,)),
            "parallel_tool_calls": Refusal("it belongs to a chat", (True, False)),
            "tool_choice": Refusal("it belongs to a chat", ("none", "auto")),
            "tools": Refusal("it belongs to a chat", ([],)),
        },
    }
)
"""More of `REFUSED` for one kind of body: what has no effect in a chat may ask for something in a plain completion."""
NEUTRAL_STREAM_OPTIONS: Mapping[str, Refusal] = MappingProxyType(
    {"include_obfuscation": Refusal("chunks have no padding that hides their lengths", (False,))}
)
"""Entries of ``stream_options`` that are refused."""

STREAM_OPTIONS = frozenset(field.name for field in msgspec.structs.fields(StreamOptions))


@hookimpl
def minisgl_http(config: Config) -> HttpExtension:
    return Compatible()


class Compatible(HttpExtension):
    """Removes hints and parameters without effect from the bodies of requests, and counts the hints.

    A number such as 3.0 is an integer, as in JSON.
    """

    def __init__(self) -> None:
        self._variables: frozenset[str] = frozenset()  # of the chat template
        self._nameless: frozenset[str] = frozenset()  # the roles whose messages the template writes without a name
        self._registry = CollectorRegistry()
        self._hints = Counter(
            "minisgl_hint_parameters", "Parameters that were accepted as hints", ["name"], registry=self._registry
        )

    def begin(self, api: Api) -> None:
        template = model_template(api)
        self._variables, self._nameless = template.variables, template.roles_without_name()

    def check_fields(self, kind: type, fields: dict[str, msgspec.Raw]) -> None:
        self._count_hints_of(kind, fields)
        known = {field.name for field in fields_of(kind)}
        refused = {**REFUSED, **REFUSED_OF.get(kind, {})}
        for name in [name for name in fields if name not in known]:
            if name in HINTS:
                if decode_field(name, fields.pop(name)) is not None:
                    self._hints.labels(name).inc()
            elif name in refused:
                value = decode_field(name, fields.pop(name))
                neutral = refused[name].neutral
                if name == "best_of":
                    neutral = (decode_field("n", fields["n"]) if "n" in fields else 1,)
                _check_neutral(name, value, refused[name].reason, neutral)
        for name in fields:
            fields[name] = with_whole_numbers(name, fields[name])
        if "stream_options" in known & fields.keys():
            options = decode_field("stream_options", fields["stream_options"])
            if isinstance(options, dict):
                fields["stream_options"] = msgspec.Raw(msgspec.json.encode(_stream_options(options)))

    def _count_hints_of(self, kind: type, fields: dict[str, msgspec.Raw]) -> None:
        """Count the hints that a body of another API has by its own names, such as ``text.verbosity``."""
        for hint in getattr(kind, "HINTS", ()):
            name, _, entry = hint.partition(".")
            value = decode_field(name, fields[name]) if name in fields else None
            if entry:
                value = value.get(entry) if isinstance(value, dict) else None
            if value is not None:
                self._hints.labels(hint).inc()

    def check_body(self, body: msgspec.Struct, max_seq_len: int) -> None:
        """Remove ``cache_control``, a hint to Anthropic's cache, from the parts of messages.

        How much to think is a hint to a model whose template reads none of its variables, and so is the name of a
        message that the template does not write.
        """
        if not isinstance(body, FullChatRequest):
            return
        variables = body.optional_kwargs
        for name, value in (("reasoning_effort", body.reasoning_effort), ("enable_thinking", body.enable_thinking)):
            if value is not None and self._variables.isdisjoint(variables):
                self._hints.labels(name).inc()
        for message in body.messages:
            if not isinstance(message, dict):
                continue
            role = message.get("role")
            if message.get("name") and isinstance(role, str) and role in self._nameless:
                self._hints.labels("name").inc()
            parts = message.get("content")
            for part in parts if isinstance(parts, list) else ():
                if isinstance(part, dict) and part.pop("cache_control", None) is not None:
                    self._hints.labels("cache_control").inc()

    def metrics(self, stats: Stats) -> bytes:
        return generate_latest(self._registry)


def _check_neutral(name: str, value: Any, reason: str, neutral: Sequence[Any]) -> None:
    """Raise `ApiError` unless ``value`` is null or one of the values that ask for nothing."""
    if value is not None and not any(each == value and type(each) is type(value) for each in neutral):
        name = shorten(name)
        raise ApiError(400, f"{name} is not supported by this server: {reason}.", name, "unsupported_parameter")


def _stream_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of ``stream_options`` that minisgl supports."""
    for name, value in options.items():
        if name in NEUTRAL_STREAM_OPTIONS:
            _check_neutral(f"stream_options.{name}", value, *NEUTRAL_STREAM_OPTIONS[name])
        elif name not in STREAM_OPTIONS:
            raise unknown_parameter(f"stream_options.{name}")
    return {name: value for name, value in options.items() if name in STREAM_OPTIONS and value is not None}
