"""What each group of parts builds: which object, when, and from which arguments.

Plugins register parts by the hook `minisgl.hooks.minisgl_configs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class PartSpec(NamedTuple):
    """What ``build`` of a group's dataclass returns, when it is called, and which arguments it may take by name.

    In each group it may also take ``build_other``: ``build_other(name)`` builds another part of the group by name, with
    default options, for a part that wraps or selects others.
    """

    builds: str
    when: str
    arguments: Mapping[str, str] = MappingProxyType({})


_DEVICE = {"device": "the device of this rank, a `torch.device`"}
_EACH_RANK = "once in each rank's process, at start, before the model is loaded and the KV pool is allocated"
_API = "once in the API server's process, when the engine is ready"
_TEMPLATE = {"template": "the source of the model's chat template, or an empty text"}
_RANK_0 = "once in rank 0's process, at start, when the scheduler is built; other ranks execute the steps of rank 0"

PARTS: Mapping[str, PartSpec] = MappingProxyType(
    {
        "attention": PartSpec("`minisgl.attention.AttentionBackend`", _EACH_RANK, _DEVICE),
        "cache": PartSpec(
            "`minisgl.plugins.cache.base.PrefixCache`, empty",
            _RANK_0,
            {"page_size": "tokens of a KV page", "spec": "the sizes of the engine, an `EngineSpec`"},
        ),
        "scheduler": PartSpec("`minisgl.scheduler.SchedulerPolicy`", _RANK_0),
        "moe": PartSpec(
            "`minisgl.plugins.moe.MoeBackend`", f"{_EACH_RANK}; only for models that have experts", _DEVICE
        ),
        "kernels": PartSpec("`minisgl.models.converter.Kernels`", _EACH_RANK, _DEVICE),
        "quantization": PartSpec(
            "`minisgl.plugins.quantization.base.Quantization`",
            f"{_EACH_RANK}; only if config.json has a ``quantization_config``, or with the option ``quantize``. The "
            "class attribute ``methods`` of the dataclass lists the values of ``quant_method`` that the part reads",
            {
                **_DEVICE,
                "dtype": "the dtype of activations and of weights that are not quantised, a `torch.dtype`",
                "build_part": "``build_part(group)`` builds the part of another group that the options select",
            },
        ),
        "fp8_gemm": PartSpec(
            "`minisgl.plugins.kernels.ops.fp8_gemm.Fp8Gemm`",
            f"{_EACH_RANK}; only if the checkpoint is in FP8, or with the option ``quantize=fp8``",
            _DEVICE,
        ),
        "graph": PartSpec("`minisgl.plugins.graph.GraphRunner`", _EACH_RANK, _DEVICE),
        "communicator": PartSpec(
            "`minisgl.distributed.Communicator`, connected to the other ranks",
            f"{_EACH_RANK}; also if there is only one rank",
            {
                "rank": "the number of this rank, from 0",
                "size": "the number of ranks",
                "local_size": "the number of ranks on this rank's machine: ``size``, or fewer if torchrun started the "
                "ranks on several nodes",
                "address": "``host:port`` at which rank 0 listens for the other ranks; may be empty if ``size`` is 1",
                **_DEVICE,
            },
        ),
        "speculation": PartSpec(
            "`minisgl.plugins.speculation.DraftProposer`",
            _RANK_0,
            {"spec": "the sizes of the engine, an `EngineSpec`: pages, page size, running requests, sequence length"},
        ),
        "routing": PartSpec(
            "`minisgl.cluster.routing.RoutingPolicy`",
            "once in the process of a router, at start: ``python -m minisgl.cluster`` or ``python -m minisgl.bench "
            "cluster``; a server has no router",
        ),
        "tokenizer": PartSpec(
            "`minisgl.tokenizer.Tokenizer`, or None if the model has no tokenizer. It may come from other files. In a "
            "subclass, ``render`` may change or refuse messages, and ``stream`` may filter the text of an answer",
            "once in each process that needs the tokenizer, at start: the tokenizers, the detokenizer, rank 0 (for the "
            "end-of-sequence id), a router, and the caller's process with `LLM`. Most of them must not import torch",
            {
                "path": "the model's directory, a `pathlib.Path`",
                "parse_special_tokens": "the option of this name: whether special tokens in messages are tokens",
            },
        ),
        "grammar": PartSpec(
            "`minisgl.plugins.grammar.lazy.Grammars`",
            "in each tokenizer process, in rank 0's process, and in the caller's process with `LLM`: when the first "
            "request that has a grammar arrives there",
            {"tokenizer": "the model's tokenizer, a `minisgl.tokenizer.Tokenizer`"},
        ),
        "tool_parser": PartSpec("`minisgl.plugins.tool_parser.ToolParser`, or None for no tools", _API, _TEMPLATE),
        "reasoning_parser": PartSpec(
            "`minisgl.plugins.reasoning_parser.ReasoningParser`, or None if the model does not think", _API, _TEMPLATE
        ),
        "live": PartSpec(
            "`minisgl.server.extension.HttpExtension`, or None for no view of the running server",
            "once in the API server's process, while the worker processes start. The module of the part may have the "
            "hook `minisgl_observer` too, whose observer sends the extension what it shows",
            {"all_options": "all options, a `Config`"},
        ),
        "router": PartSpec(
            "`minisgl.cluster.router.Router`, which does nothing before its ``start``",
            "once in the process of ``python -m minisgl.cluster``, at start, before the replicas",
            {
                "cluster": "all options of the cluster, a `ClusterConfig`",
                "status": "the states of the replicas, a `ClusterStatus`, in which the router counts its requests",
                "policy": "the routing policy, of the group ``routing``",
                "make_tokenizer": "a function that returns the tokenizer of the servers, or None if the model has none",
            },
        ),
    }
)
"""Group → what its dataclasses build."""
