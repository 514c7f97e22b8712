"""Names of minisgl 0.1 that lab files may still use, and the names that replaced them. Data only."""

from __future__ import annotations

from types import MappingProxyType

RENAMED_SINCE = "0.2.0"
UPGRADE_PAGE = "docs/upgrade-0.2.md"

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
        "minisgl.plugins.scheduler": {"arrange": "order_waiting"},
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
