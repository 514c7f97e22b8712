"""Data types shared by all parts of minisgl: requests, steps, step results, outputs.

The module imports no torch and starts no process. Arrays are in host memory: int32, unless a comment says otherwise.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from minisgl.sampling_params import InvalidRequestError, SamplingParams, too_long

__all__ = [
    "I32",
    "I64",
    "INTERRUPTED",
    "PENDING",
    "Admission",
    "Bools",
    "Engine",
    "EngineDeadError",
    "EngineSpec",
    "FinishReason",
    "Finished",
    "InvalidRequestError",
    "KVGroup",
    "Logprobs",
    "LogprobsEntry",
    "Output",
    "PromptRange",
    "Req",
    "SamplingParams",
    "Step",
    "StepResult",
    "TokenMasks",
]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PENDING = -1
"""Placeholder in ``Step.input_ids``: the engine replaces it with the token that the row's request sampled last.

The token is still on the device, so the scheduler can launch a decode row before it has read that token.
"""

FinishReason = Literal["stop", "length", "abort", "error"]

INTERRUPTED = "The run was interrupted."
"""The error of the requests that are open when a scheduler is closed, as after Ctrl-C."""


class EngineDeadError(RuntimeError):
    """The engine cannot continue, after a device error or the death of a rank. Every open request fails."""


# ---- one step: everything that an engine, or a follower rank, receives --------------------------


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request that is admitted with this step: what the engine needs in order to sample for the request.

    ``prompt_ids`` and ``output_ids`` are the request's tokens before this step, int32 ``[tokens]``. They are set only
    if ``params`` has a penalty, which counts earlier tokens, or if the engine drafts from them; else they are None.
    """

    req_pool_idx: int
    uid: int
    params: SamplingParams
    seed: int
    prompt_ids: I32 | None = None
    output_ids: I32 | None = None


class PromptRange(NamedTuple):
    """Consecutive positions of a prefill chunk, from ``first_position`` on, whose logits score tokens of the prompt.

    ``targets`` int32 ``[positions]`` are the prompt tokens after these positions, whose log-probabilities are wanted.
    ``num_top`` is the number of alternatives to report with each of them.
    """

    row: int
    first_position: int
    targets: I32
    num_top: int


class TokenMasks(NamedTuple):
    """The tokens that a grammar allows, for some of the sampled positions of a step. Other positions allow all tokens.

    ``positions`` int32 ``[masks]`` counts the sampled positions of the step over all its rows, in order. Bit ``t % 32``
    of word ``t // 32`` of a mask is 1 if token ``t`` is allowed: ``bits`` is int32 ``[masks, ceil(vocab_size / 32)]``.
    """

    positions: I32
    bits: I32


class Step(msgspec.Struct, frozen=True, array_like=True):
    """The work of one forward pass. Immutable; owns its arrays, which share no memory with scheduler state.

    There are three kinds of rows, in this order, which every rank follows:

    - *decode rows* compute one token, and sample the next one;
    - *verification rows* compute a token and the draft tokens after it, and sample after each of them. If all rows are
      such rows, with equally many drafts, the step may do this in several *rounds*: after each round, the engine goes
      on after the last token that counts, with drafts that it makes itself;
    - *prefill chunks* compute tokens of a prompt. The chunk that ends the prompt samples a token.

    Before the forward pass, the engine applies ``admissions``, and then writes ``page_table_updates`` in the given
    order. ``num_decode`` and ``num_verify`` are numbers of rows.
    """

    id: int  # 0, 1, 2, … without gaps
    req_pool_indices: I32  # [rows]
    num_computed_tokens: I32  # [rows] positions that already have KV = the first position this step computes
    num_scheduled_tokens: I32  # [rows] positions that this step computes, at least 1
    num_sampled_tokens: I32  # [rows] last positions of the row after which it samples: 0, 1, or 1 + number of drafts
    num_decode: int
    num_verify: int
    input_ids: I32  # [sum(num_scheduled_tokens)] token ids; PENDING may be the first token of a decode or verify row
    page_table_updates: tuple[I32, I32, I32]  # (req_pool_idx, column, page), each [updates]; the columns of all groups
    admissions: tuple[Admission, ...] = ()
    prompt_logprobs: tuple[PromptRange, ...] = ()  # at most one for each prefill chunk, in the order of the rows
    late_sampling: bool = False  # whether sampling waits for `Engine.sample`
    rounds: int = 1  # how often each verification row is computed; the counts above are those of the first round
    state_loads: tuple[I32, I32] | None = None  # (slot, req_pool_idx): states copied before the forward pass
    state_saves: tuple[I32, I32, I32] | None = None  # (row, position, slot): states copied when a row gets there

    @property
    def rows(self) -> int:
        """Number of rows: requests that take part in the step."""
        return len(self.req_pool_indices)

    @property
    def num_continuing(self) -> int:
        """Number of decode and verification rows, which come before the prefill chunks."""
        return self.num_decode + self.num_verify

    @property
    def verification_rows(self) -> range:
        """The indices of the verification rows."""
        return range(self.num_decode, self.num_continuing)

    @property
    def sample(self) -> Bools:
        """Whether each row samples a token, bool ``[rows]``: False for a chunk that does not end its prompt."""
        return self.num_sampled_tokens > 0

    def encode(self) -> bytes:
        """Return the step as bytes (MessagePack), which rank 0 sends to the other ranks."""
        return _step_encoder.encode(self)

    @staticmethod
    def decode(data: bytes) -> Step:
        """Return the step that `encode` turned into ``data``. The step owns its arrays, which are copies."""
        return _step_decoder.decode(data)


def _pack_array(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return msgspec.msgpack.Ext(1, obj.astype(np.int32, copy=False).tobytes())
    raise TypeError(f"a Step cannot contain a {type(obj).__name__}")


def _unpack_array(code: int, data: memoryview) -> Any:
    return np.frombuffer(data, dtype=np.int32).copy()


_step_encoder = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_step_decoder = msgspec.msgpack.Decoder(Step, ext_hook=_unpack_array)


class StepResult(NamedTuple):
    """The sampled tokens of one step.

    ``tokens`` is int32 ``[rows, k]``, where k is the largest number of tokens that a row samples, at least 1.
    ``accepted`` is int32 ``[rows]``: how many of a row's tokens are valid. That is ``num_sampled_tokens`` of the row,
    except in a verification row: there, it is 1 + the number of draft tokens that equal the token sampled before them,
    counted up to the first draft that does not.

    In a step of several rounds, the tokens of all rounds follow each other, and ``accepted`` is their sum. k is then
    the largest number of tokens of a round times the number of rounds. ``rounds`` int32 ``[rounds, rows]`` has the
    number of each round; it is None in a step of one round.
    """

    id: int
    tokens: I32
    accepted: I32
    logprobs: tuple[tuple[Logprobs, ...] | None, ...] | None = None  # [rows][accepted]; None: not asked for
    prompt_logprobs: tuple[tuple[Logprobs, ...], ...] = ()  # [len(step.prompt_logprobs)][positions]
    rounds: I32 | None = None


class Logprobs(NamedTuple):
    """Log-probability of a sampled token, and its most likely alternatives, the most likely one first."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class KVGroup(NamedTuple):
    """Layers with the same pages: docs/design/kv-groups.md. Page c of group g is in column g · ``num_columns`` + c."""

    window: int = -1  # positions that a query of these layers reads, its own included; -1: all
    max_pages: int = 2**31 - 1  # the most pages that one request needs in the group at a time, whatever its length


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Capacity of an engine.

    The engine has one scratch page, number ``num_pages``, and one scratch row in its request pool, number
    ``max_running_requests``. Padding rows write to them. The counts below exclude both, and no request owns them.
    """

    page_size: int  # tokens per KV page
    num_pages: int  # pages in the KV pool
    max_running_requests: int  # rows of the request pool
    max_seq_len: int  # tokens per request, prompt and output together
    vocab_size: int
    groups: tuple[KVGroup, ...] = (KVGroup(),)
    has_states: bool = False  # whether each request-pool row also has a recurrent state: docs/design/states.md

    @property
    def num_columns(self) -> int:
        """Columns of the page table for one group: the pages of ``max_seq_len`` tokens."""
        return -(-self.max_seq_len // self.page_size)

    def pages_of(self, num_pages: int) -> int:
        """Return how many pages of the pool a request needs, in all groups, for the KV of ``num_pages`` pages of it."""
        return sum(min(num_pages, group.max_pages) for group in self.groups)

    @property
    def max_tokens_per_request(self) -> int:
        """The largest number of tokens of a request that the context and the KV pool can hold."""
        pages = bisect_right(range(self.num_columns + 1), self.num_pages, key=self.pages_of) - 1
        return min(self.max_seq_len, pages * self.page_size + 1)  # the last token's KV is never stored

    def check_length(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raise `InvalidRequestError` for a prompt of this many tokens that the engine can never serve."""
        if num_prompt_tokens == 0:
            raise InvalidRequestError("prompt", "The prompt is empty. It must have at least one token.")
        limit = self.max_tokens_per_request
        if num_prompt_tokens + max_tokens > limit:
            limited_by = "the model's context" if limit == self.max_seq_len else "the KV pool"
            name = "prompt" if num_prompt_tokens >= limit else "max_tokens"
            sizes = f"The prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}"
            raise too_long(name, limit, f"{sizes}: together more than {limited_by} can hold.")


class Engine(Protocol):
    """The interface between a scheduler and its engine. Steps take effect in the order of their launch."""

    spec: EngineSpec

    def launch(self, step: Step) -> None:
        """Start to execute ``step`` and return without waiting for it. Raise `EngineDeadError` if the engine failed.

        If ``step.late_sampling`` is set, only the forward pass starts, and `sample` must be the next call of `launch`
        and `sample`.
        """

    def sample(self, masks: TokenMasks) -> None:
        """Start the sampling of the step launched last, whose ``late_sampling`` is set.

        Between `launch` and this call, the scheduler may read the result of the step before, on which the masks depend.
        Raise `EngineDeadError` if the engine failed.
        """

    def result(self) -> StepResult:
        """Wait for the oldest launched step whose result is unread, and return its result.

        There is no call that asks whether a result is ready: the answer would depend on timing and could differ between
        ranks. Raise `EngineDeadError` if the engine failed.
        """

    def close(self) -> None:
        """Release the engine's resources."""


# ---- outputs of the scheduler, and its requests -------------------------------------------------


class Finished(msgspec.Struct, array_like=True):
    """The final reply to one request. Every request gets exactly one (promise 1)."""

    uid: int
    finish_reason: FinishReason
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    stop_id: int | None = None  # the stop token that ended the request, if any; it is not part of the text
    error: str = ""
    status: int = 500  # HTTP status, used if finish_reason is "error"
    field: str = ""  # the request parameter that was invalid, if the request was rejected
    code: str = ""  # OpenAI's error code, if the request was rejected


LogprobsEntry = tuple[float, tuple[int, ...], tuple[float, ...]]
"""The fields of `Logprobs`, as the messages between processes carry them."""


class Output(msgspec.Struct, array_like=True):
    """New output tokens and finished requests. ``tokens[i]`` is a new token of request ``uids[i]``.

    A request that gained several tokens is in ``uids`` several times in a row. ``logprobs`` maps an index into ``uids``
    to the log-probability of that token, the ids of its most likely alternatives, and their log-probabilities.
    ``prompt_logprobs`` maps a uid to the same for the next tokens of its prompt: all entries of a request, over all
    outputs, are those of the positions from ``max(logprob_start_len, 1)`` on.
    """

    uids: list[int] = []
    tokens: list[int] = []
    finished: list[Finished] = []
    logprobs: dict[int, LogprobsEntry] = {}
    prompt_logprobs: dict[int, list[LogprobsEntry]] = {}

    def __bool__(self) -> bool:
        return bool(self.uids or self.finished or self.prompt_logprobs)


@dataclass(slots=True, eq=False, repr=False)
class Req:
    """The state of one request. The scheduler changes it; observers only read it."""

    uid: int
    prompt_ids: I32
    params: SamplingParams
    arrival: int  # arrival number: 0, 1, 2, …; not a time
    seed: int = 0
    output_ids: list[int] = field(default_factory=list)
    priority: int = 0  # lower is more urgent; `StarvationGuard` lowers it for a starved request
    constraint: Any = None  # its grammar while it is open, a `minisgl.plugins.constraint.base.Constraint`
    group: int = 0  # above 0: the choices of one HTTP request, which take turns as one: plugins/scheduler/guard.py
    max_len: int = 0  # the largest number of tokens that it can have, prompt and output together
    stop_ids: frozenset[int] = frozenset()
    queued_at_step: int = 0  # the next step when it last entered the waiting queue
    req_pool_idx: int = -1  # its row in the request pool while it runs; else -1
    admission_order: int = -1  # number of the current admission over all requests; else -1
    first_admission: bool = True  # whether it was never admitted so far
    num_prompt_logprobs: int = 0  # prompt tokens whose log-probabilities were reported
    num_cached_tokens: int = 0  # prompt tokens in the prefix cache at the first admission
    num_cached_pages: int = 0  # leading pages in its page table that the cache owns
    cache_handle: Any = None  # the cache's handle of these pages, locked while it runs
    prefix_match: Any = None  # CacheManager's last match for it
    finish_reason: FinishReason | None = None  # None until it ends
    error: str = ""

    def __post_init__(self) -> None:
        self.prompt_ids = np.asarray(self.prompt_ids, np.int32)
        self.priority = self.params.priority
        self.max_len = len(self.prompt_ids) + self.params.max_tokens

    @property
    def urgency(self) -> tuple[int, int]:
        """The request's place in the order of urgency: lower values are more urgent, and among equals came earlier."""
        return self.priority, self.arrival

    @property
    def next_prompt_logprob(self) -> int:
        """First position whose logits are still needed for ``prompt_logprobs``.

        The prefix cache may hold the positions before it. Without ``prompt_logprobs`` it is the length of the prompt.
        """
        if self.params.prompt_logprobs is None:
            return len(self.prompt_ids)
        return max(self.params.logprob_start_len - 1, 0) + self.num_prompt_logprobs

    def tokens(self) -> I32:
        """Return the prompt and the output so far, int32 ``[len(self)]``."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate((self.prompt_ids, np.asarray(self.output_ids, np.int32)))

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def __repr__(self) -> str:
        state = f"running in row {self.req_pool_idx}" if self.req_pool_idx >= 0 else (self.finish_reason or "waiting")
        return f"Req({self.uid}, {len(self.prompt_ids)}+{len(self.output_ids)} tokens, {state})"
