"""The names that 0.2.0 and 0.3.0 retired, and the names that replaced them: for error messages and the labs."""

from __future__ import annotations

import logging
from importlib import import_module
from types import MappingProxyType
from typing import Any

RENAMED_SINCE = "0.2.0"
UPGRADE_PAGE = "docs/upgrade-0.2.md"

FACTORY_HOOKS = MappingProxyType(
    {
        f"minisgl_{'proposer' if group == 'speculation' else group}": group
        for group in ("attention", "cache", "scheduler", "moe", "fp8_gemm", "graph", "communicator", "speculation",
                      "routing", "router")
    }
)  # fmt: skip
"""Hooks that built the parts of an engine in 0.2 → the group. Since 0.3, the options dataclass has a method ``build``.
Plugins with these hooks still work, with a warning."""

ADDED_METHODS = MappingProxyType(
    {
        "attention": (("attend", "norm_rope_store"), "minisgl.attention", "AttentionBackend"),
        "graph": (("wrap", "wrap_attention"), "minisgl.plugins.graph.replaying", "BucketRunner"),
        "speculation": (("speculate",), "minisgl.plugins.speculation", "DraftProposer"),
    }
)
"""Group → methods that its parts have since 0.3, and the class from which a part for 0.2 gets them."""

ADDED_ARGUMENTS = MappingProxyType({"attention": {"attend": ("layer", "qkv", "norm", "cos_sin", "out_cache_loc")}})
"""Group → method that its parts have since 0.3 → its arguments. A part for 0.2 may use the name for something else."""

MOVED = MappingProxyType({"DraftProposer": "minisgl.plugins.speculation"})
"""Public names that moved in 0.3 → the module that has them now. They still work at their old place, with a warning."""


def moved(module: str, name: str) -> Any:
    """Return what ``name``, which ``module`` does not have any more, is now. Log a warning that says where it is.

    Raise AttributeError if ``name`` has not moved. A module calls this function in its ``__getattr__``.
    """
    if name not in MOVED:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    logging.getLogger(__name__).warning(
        "%s.%s has moved: write `from %s import %s` (docs/upgrade-0.3.md)", module, name, MOVED[name], name
    )
    return getattr(import_module(MOVED[name]), name)


RENAMED_OPTIONS = MappingProxyType({"load": "load_format", "server.log_level": "log_level"})
"""Options of the command line: old name → new name."""

RENAMED_HOOK_ARGUMENTS = MappingProxyType({"minisgl_pages_cached": MappingProxyType({"held": "cached_pages"})})
"""Hook → old name of an argument → new name."""

RENAMED_ATTRIBUTES = MappingProxyType(
    {
        "Req": {
            "prompt": "prompt_ids",
            "output": "output_ids",
            "slot": "req_pool_idx",
            "seated": "admission_order",
            "first_seat": "first_admission",
            "cached": "num_cached_tokens",
            "shared": "num_cached_pages",
            "match": "prefix_match",
            "hashes": "page_hashes",
            "queued": "queued_at_step",
            "reason": "finish_reason",
            "handle": "cache_handle",
        },
        "Step": {
            "slots": "req_pool_indices",
            "starts": "num_computed_tokens",
            "counts": "num_scheduled_tokens",
            "tokens": "input_ids",
            "table": "page_table_updates",
            "seats": "admissions",
        },
        "Admission": {"slot": "req_pool_idx", "prompt": "prompt_ids", "output": "output_ids"},
        "EngineSpec": {"max_slots": "max_running_requests", "max_len": "max_seq_len"},
        "Waiting": {
            "length": "num_tokens",
            "cached": "num_cached_tokens",
            "twin": "same_prefix_req",
            "order": "arrival",
            "skipped": "skipped_steps",
        },
        "Running": {
            "left": "num_remaining_tokens",
            "new_pages": "num_new_pages",
            "seated": "admission_order",
            "skipped": "skipped_steps",
        },
        "AttnBatch": {
            "q_indptr": "cu_seqlens_q",
            "q_indptr_host": "cu_seqlens_q_cpu",
            "kv_len": "seq_lens",
            "kv_len_host": "seq_lens_cpu",
            "slots": "req_pool_indices",
            "table": "page_table",
            "key": "graph_key",
            "shared": "shared_prefix_len",
            "part": "slice_rows",
        },
        "GraphKey": {"shared": "shared_prefix"},
        "GraphRunner": {"frame": "input_buffers"},
        "AttnNeeds": {"shared": "shared_prefix"},
        "PrefixCache": {"held": "total_pages", "evictable": "evictable_pages"},
        "Scheduler": {"add": "add_request", "abort": "abort_request"},
    }
)
"""Class → old name of an attribute or method → new name. A plugin may read or implement all of these classes."""

RENAMED_IMPORTS = MappingProxyType(
    {
        "minisgl.core": {"Seat": "Admission", "Refused": "InvalidRequestError", "EngineDead": "EngineDeadError"},
        "minisgl.engine.inputs": {"Tokens": "ModelInputs"},
        "minisgl.kvcache": {"Match": "MatchResult", "Inserted": "InsertResult"},
        "minisgl.scheduler": {"PageLedger": "PageAllocator", "LedgerError": "PageOwnershipError"},
        "minisgl.scheduler.order": {"arrange": "order_waiting"},
    }
)
"""Module → old name of a class or function that a plugin imports → new name."""

RENAMED_METRICS = MappingProxyType(
    {
        "minisgl_queue_seconds": "minisgl_request_queue_time_seconds",
        "minisgl_first_token_seconds": "minisgl_time_to_first_token_seconds",
        "minisgl_next_token_seconds": "minisgl_inter_token_latency_seconds",
        "minisgl_request_seconds": "minisgl_e2e_request_latency_seconds",
        "minisgl_meter_gap_seconds": "minisgl_meter_inter_token_latency_seconds",
    }
)
"""Metrics of ``/metrics``: old name → new name."""
