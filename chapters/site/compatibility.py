"""The page of the parameters that clients send: what minisgl does with each of OpenAI's, vLLM's and SGLang's.

What minisgl does is read from its own structs and tables. The names of the others' parameters are lists here; a test
compares OpenAI's with the library `openai`.
"""

from __future__ import annotations

import msgspec

from minisgl.plugins.http.answer_format import READERS
from minisgl.plugins.http.apis.completion import CompletionRequest
from minisgl.plugins.http.apis.parameters import FullChatRequest
from minisgl.plugins.http.compatible import HINTS, REFUSED, REFUSED_OF

OPENAI = [
    "audio",
    "best_of",
    "echo",
    "frequency_penalty",
    "function_call",
    "functions",
    "logit_bias",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "messages",
    "metadata",
    "modalities",
    "model",
    "moderation",
    "n",
    "parallel_tool_calls",
    "prediction",
    "presence_penalty",
    "prompt",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_effort",
    "response_format",
    "safety_identifier",
    "seed",
    "service_tier",
    "stop",
    "store",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "user",
    "verbosity",
    "web_search_options",
]
VLLM = [
    "add_generation_prompt",
    "add_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "best_of",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "echo",
    "guided_choice",
    "guided_decoding_backend",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "guided_whitespace_pattern",
    "ignore_eos",
    "include_reasoning",
    "include_stop_str_in_output",
    "kv_transfer_params",
    "length_penalty",
    "logits_processors",
    "min_p",
    "min_tokens",
    "mm_processor_kwargs",
    "priority",
    "prompt_embeds",
    "prompt_logprobs",
    "repetition_penalty",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
    "structural_tag",
    "structured_outputs",
    "top_k",
    "truncate_prompt_tokens",
    "use_beam_search",
    "vllm_xargs",
]
SGLANG = [
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "cache_salt",
    "chat_template_kwargs",
    "continue_final_message",
    "custom_labels",
    "custom_logit_processor",
    "custom_params",
    "data_parallel_rank",
    "disagg_prefill_dp_rank",
    "ebnf",
    "extra_key",
    "ignore_eos",
    "images_config",
    "input_ids",
    "json_schema",
    "lora_path",
    "min_p",
    "min_tokens",
    "ngram_corpus_id",
    "no_stop_trim",
    "priority",
    "regex",
    "repetition_penalty",
    "return_cached_tokens_details",
    "return_hidden_states",
    "return_routed_experts",
    "return_token_ids",
    "rid",
    "routed_dp_rank",
    "routed_experts_start_len",
    "separate_reasoning",
    "session_id",
    "session_params",
    "skip_special_tokens",
    "stop_regex",
    "stop_token_ids",
    "stream_reasoning",
    "top_k",
]
SERVERS = {"OpenAI": OPENAI, "vLLM": VLLM, "SGLang": SGLANG}
"""Server → its parameters of chats and of plain completions. vLLM and SGLang have OpenAI's too."""


def names() -> list[str]:
    """Return all parameters that the page lists, in the order of the alphabet."""
    own = {field.name for kind in (FullChatRequest, CompletionRequest) for field in msgspec.structs.fields(kind)}
    return sorted(own.union(READERS, HINTS, REFUSED, *REFUSED_OF.values(), *SERVERS.values()))


def treatment(name: str, kind: type[msgspec.Struct]) -> tuple[str, str]:
    """Return what the server does with a parameter in a body of type ``kind``, and the reason.

    It is "done", "hint" or "refused". A parameter that it does not know in such a body is refused too.
    """
    if name in {field.name for field in msgspec.structs.fields(kind)} or name in READERS:
        return "done", ""
    if name in HINTS:
        return "hint", HINTS[name]
    refused = {**REFUSED, **REFUSED_OF[kind]}
    return "refused", refused[name].reason if name in refused else "there is no such parameter in this body"


def page() -> str:
    """Return the page ``compatibility.md``."""
    lines = [
        "# Parameters of other servers",
        "",
        "What minisgl does with each parameter of a chat and of a plain completion that OpenAI, vLLM and SGLang have.",
        "",
        "- **done**: it has the effect that [the HTTP API](http-api.md) describes;",
        "- **hint**: a label, or advice that a server is free not to follow. It is accepted, has no effect, and is",
        "  counted in `minisgl_hint_parameters_total`;",
        "- **refused**: status 400, with the name of the parameter and the reason, unless its value asks for nothing.",
        "",
        "This page is generated from the structs and tables of the server: `make reference`.",
        "",
        "| parameter | of | chat | completion | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in names():
        chat, completion = treatment(name, FullChatRequest), treatment(name, CompletionRequest)
        servers = ", ".join(server for server, known in SERVERS.items() if name in known) or "minisgl"
        why = "; ".join(dict.fromkeys(reason for _, reason in (chat, completion) if reason))
        lines.append(f"| `{name}` | {servers} | {chat[0]} | {completion[0]} | {why} |")
    return "\n".join(lines) + "\n"
