"""The data that every part shares: sampling parameters, one step of work, its result, what a step replies.

Knows numpy and msgspec, and neither torch nor any process. Host arrays are int32 unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PENDING = -1
"""In ``Step.tokens``: the token that this row's slot sampled last, read on the device."""

FinishReason = Literal["stop", "length", "abort", "error"]


class InvalidRequestError(ValueError):
    """A request that can't be served, found before it was queued. ``field`` names what was wrong."""

    def __init__(self, field: str, message: str, code: str = "invalid_value"):
        super().__init__(message)
        self.field, self.message, self.code = field, message, code

    def __reduce__(self) -> tuple[Any, ...]:
        return InvalidRequestError, (self.field, self.message, self.code)


class EngineDeadError(RuntimeError):
    """The engine can't go on: a device error, or a rank that is gone. Every open request fails."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request's tokens are chosen and when it ends. Immutable; the field names are OpenAI's and vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 (or -1) is off. ``seed`` None lets the scheduler draw one from the
    server's seed; a given seed fixes the tokens whatever else is in the batch. ``stop`` strings are cut from the
    text, ``stop_token_ids`` end a request like an end-of-sequence id does. ``logprobs`` is how many alternatives
    are reported with each token (None: no log-probabilities at all, 0: the chosen token's only).
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    skip_special_tokens: bool = True

    MAX_LOGPROBS = 20
    MAX_STOPS = 16

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on which tokens came before (a penalty is on)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int | None = None) -> None:
        """Raise `InvalidRequestError`, naming the field, where a value is out of its range."""

        def need(ok: bool, field: str, what: str) -> None:
            if not ok:
                raise InvalidRequestError(field, f"{field} must be {what}, got {getattr(self, field)!r}.")

        for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
            need(math.isfinite(getattr(self, field)), field, "a finite number")
        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(0.0 <= self.temperature <= 100.0, "temperature", "between 0 and 100")
        need(self.top_k >= -1, "top_k", "-1 or 0 (off) or at least 1")
        need(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        need(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        need(self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "a 64-bit integer")
        need(1 <= self.n <= 128, "n", "between 1 and 128")
        need(self.repetition_penalty > 0.0, "repetition_penalty", "above 0")
        need(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        need(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        need(
            self.logprobs is None or 0 <= self.logprobs <= self.MAX_LOGPROBS,
            "logprobs",
            f"between 0 and {self.MAX_LOGPROBS}",
        )
        need(len(self.stop) <= self.MAX_STOPS, "stop", f"at most {self.MAX_STOPS} strings")
        need(all(self.stop), "stop", "strings that are not empty")
        need(all(-100.0 <= b <= 100.0 for b in self.logit_bias.values()), "logit_bias", "between -100 and 100")
        if vocab_size is not None:
            inside = f"token ids below the vocabulary size {vocab_size}"
            need(all(0 <= t < vocab_size for t in self.stop_token_ids), "stop_token_ids", inside)
            need(all(0 <= t < vocab_size for t in self.logit_bias), "logit_bias", inside)


# ---- one step: all that an engine (or a follower rank) is told ----------------------------------


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that takes a slot with this step: what the engine must know to sample for it.

    ``prompt`` and ``output`` (the tokens before this step, int32) are given only where a penalty counts them.
    """

    req_pool_idx: int
    uid: int
    params: SamplingParams
    seed: int
    prompt_ids: I32 | None = None
    output_ids: I32 | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """What to compute in one forward pass. Immutable; owns its arrays: no view of scheduler state.

    Rows ``[:num_decode]`` compute one token each; the rest are prefill chunks. The order is the order on every
    rank. ``table`` is written before the step, in this order; seats are applied before it too.
    """

    id: int  # 0, 1, 2, … without gaps
    req_pool_indices: I32  # [rows]
    num_computed_tokens: I32  # [rows] first position computed
    num_scheduled_tokens: I32  # [rows] positions computed, at least 1
    num_decode: int
    sample: Bools  # [rows] False for a chunk that is not the prompt's last
    input_ids: I32  # [sum(counts)] ids, or PENDING (decode rows)
    page_table_updates: tuple[I32, I32, I32]  # (slot, page column, page), each [writes]
    admissions: tuple[Admission, ...] = ()

    @property
    def rows(self) -> int:
        return len(self.req_pool_indices)

    def encode(self) -> bytes:
        """The step as bytes (MessagePack), for the ranks that follow."""
        return _step_encoder.encode([getattr(self, f.name) for f in fields(self)])

    @staticmethod
    def decode(data: bytes) -> Step:
        """The inverse of `encode`. The arrays are fresh and owned by the step."""
        step_id, slots, starts, counts, num_decode, sample, tokens, table, seats = _step_decoder.decode(data)
        return Step(
            step_id,
            slots,
            starts,
            counts,
            num_decode,
            sample,
            tokens,
            tuple(table),
            tuple(_seat(s) for s in seats),
        )


def _seat(raw: dict[str, Any]) -> Admission:
    params = msgspec.convert(raw.pop("params"), SamplingParams, str_keys=False)
    return Admission(params=params, **raw)


def _pack_array(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return msgspec.msgpack.Ext(1, (b"b" if obj.dtype == np.bool_ else b"i") + obj.tobytes())
    raise TypeError(f"a Step can't carry a {type(obj).__name__}")


def _unpack_array(code: int, data: memoryview) -> Any:
    return np.frombuffer(data[1:], dtype=np.bool_ if data[:1] == b"b" else np.int32).copy()


class StepResult(NamedTuple):
    """What a step sampled. ``tokens`` is [rows, k], k = 1 until speculative decoding; ``accepted`` [rows] says how
    many of the k are valid (0 where ``sample`` was False)."""

    id: int
    tokens: I32
    accepted: I32
    logprobs: tuple[Logprobs | None, ...] | None = None  # [rows], where a row asked for them


class Logprobs(NamedTuple):
    """The chosen token's log-probability, and the most likely alternatives, best first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine can hold. Pages and slots are counted without the scratch ones, which come after them:
    slot ``max_slots`` and page ``num_pages`` exist, are written by padding rows, and belong to nobody."""

    page_size: int
    num_pages: int
    max_running_requests: int
    max_seq_len: int
    vocab_size: int


class Engine(Protocol):
    """What a scheduler knows of an engine. Steps take effect in the order of their launch."""

    spec: EngineSpec

    def launch(self, step: Step) -> None:
        """Start a step and return; raises `EngineDeadError`."""

    def result(self) -> StepResult:
        """Wait for the oldest unread step. There is no ``ready()``: what depends on timing differs by rank."""

    def close(self) -> None: ...


# ---- what a step replies ------------------------------------------------------------------------


class Finished(msgspec.Struct, array_like=True):
    """The end of one request; exactly one for each (promise 1)."""

    uid: int
    finish_reason: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    stop_id: int | None = None  # the token that ended it, if one did (it is not part of the text)
    error: str = ""
    status: int = 500  # HTTP status, where reason is "error"
    field: str = ""  # the parameter that was refused, if one was
    code: str = ""  # why it was refused, in OpenAI's words


class Output(msgspec.Struct, array_like=True):
    """Tokens that requests gained, and requests that ended. ``uids[i]`` gained ``tokens[i]``."""

    uids: list[int] = []
    tokens: list[int] = []
    finished: list[Finished] = []
    logprobs: dict[int, tuple[float, tuple[int, ...], tuple[float, ...]]] = {}  # by index into uids

    def __bool__(self) -> bool:
        return bool(self.uids or self.finished)


class Req:
    """One request's state, as the scheduler keeps it and observers read it. ``slot`` is -1 while it waits or when it
    has ended; ``reason`` is None until then. ``max_len`` is prompt and output together, in tokens."""

    __slots__ = (
        "admission_order",
        "arrival",
        "cache_handle",
        "error",
        "finish_reason",
        "first_admission",
        "max_len",
        "num_cached_pages",
        "num_cached_tokens",
        "output_ids",
        "page_hashes",
        "params",
        "prefix_match",
        "prompt_ids",
        "queued_at_step",
        "req_pool_idx",
        "seed",
        "stop_ids",
        "uid",
    )  # fmt: skip

    def __init__(self, uid: int, prompt: Sequence[int] | I32, params: SamplingParams, arrival: int, seed: int = 0):
        self.uid = uid
        self.prompt_ids: I32 = np.asarray(prompt, np.int32)
        self.output_ids: list[int] = []
        self.params = params
        self.arrival = arrival
        self.seed = seed
        self.max_len = len(self.prompt_ids) + params.max_tokens
        self.stop_ids: frozenset[int] = frozenset()
        self.queued_at_step = 0  # the step for which it began to wait
        self.req_pool_idx = -1
        self.admission_order = -1  # number of its admission
        self.first_admission = True
        self.num_cached_tokens = 0  # tokens that the cache spared at the first admission
        self.num_cached_pages = 0  # leading pages of its table row that are the cache's
        self.cache_handle: Any = None  # the cache's, locked while seated
        self.prefix_match: Any = None
        self.page_hashes: list[int] | None = None
        self.finish_reason: FinishReason | None = None
        self.error = ""

    def tokens(self) -> I32:
        """Prompt and output so far, int32."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, np.int32)))

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def __repr__(self) -> str:
        where = f"slot {self.req_pool_idx}" if self.req_pool_idx >= 0 else (self.finish_reason or "waiting")
        return f"Req({self.uid}, {len(self.prompt_ids)}+{len(self.output_ids)} tokens, {where})"


_step_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_step_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack_array)
