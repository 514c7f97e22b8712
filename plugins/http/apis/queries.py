"""What extensions ask the worker processes: tokens and text of a tokenizer, counts and an empty cache of the scheduler.

Each question is a function that the worker calls, and the ``ask`` beside it, which an extension calls. The question and
its answer are each a `minisgl.message.Call`. So the workers import this module too, and it imports no HTTP library.
"""

from __future__ import annotations

import itertools
import logging
import pkgutil
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from minisgl.core import Finished, InvalidRequestError
from minisgl.message import Call, Prompt, unpack_ids
from minisgl.message.link import attempt
from minisgl.plugin_manager.failures import described
from minisgl.server.errors import ApiError, timed_out

if TYPE_CHECKING:
    from minisgl.plugin_manager.manager import PluginManager
    from minisgl.server.dispatch import Dispatcher
    from minisgl.server.extension import Stats
    from minisgl.server.rank_process import SchedulerLoop
    from minisgl.server.text_process import TextWorker

log = logging.getLogger(__name__)

T = TypeVar("T")
_failed: WeakKeyDictionary[PluginManager, set[str]] = WeakKeyDictionary()
"""The plugins whose `minisgl_metrics` has failed."""
_uids, _turns = itertools.count(1), itertools.count()
BUSY = -1
"""The answer of `flush_cache` before the last step was read."""


async def ask_worker(dispatcher: Dispatcher, worker: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Have one of the dispatcher's workers call ``function(process, *arguments)``, and return the value.

    ``process`` is a tokenizer's or the detokenizer's `TextWorker`, the `SchedulerLoop` of rank 0; of another rank it
    has ``inbox``, ``manager`` and ``to_api``. The function is found by the name of its module, so it can't be in a
    plugin file. A struct in the value arrives as a dictionary or a list. Raise `ApiError` (503), or for an error of the
    function.
    """
    import asyncio  # the workers don't need it

    if dispatcher.state not in ("ready", "draining"):
        raise dispatcher.unavailable()
    uid = next(_uids)
    future = dispatcher.pending[uid] = asyncio.get_running_loop().create_future()
    try:
        place = f"{function.__module__}:{function.__qualname__}"
        dispatcher.send(worker, Call(f"{__name__}:answer", [uid, place, list(arguments)]))
        return await future
    finally:
        del dispatcher.pending[uid]


async def ask_tokenizer(dispatcher: Dispatcher, function: Callable[..., Any], *arguments: Any) -> Any:
    """Do it in a tokenizer's process."""
    names = [name for name in dispatcher.workers if name.startswith("tokenizer")] or ["detokenizer"]
    return await ask_worker(dispatcher, names[next(_turns) % len(names)], function, *arguments)


def answer(process: Any, uid: int, function: str, arguments: list[Any]) -> None:
    """Call the function of a question in a worker's process, and send what it returns, or its error."""
    value: Any = None

    def work() -> None:
        nonlocal value
        value = pkgutil.resolve_name(function)(process, *arguments)

    error = attempt(work, uid)
    process.to_api(Call(f"{__name__}:receive", [uid, value, error]))


def receive(dispatcher: Dispatcher, uid: int, value: Any, error: Any) -> None:
    """Receive an answer in the API server's process."""
    future = dispatcher.pending.get(uid)
    if future is None or future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(ApiError.from_finished(msgspec.convert(error, Finished)))


class Tokens(NamedTuple):
    """The token ids of a prompt, and their texts if they were asked for and there is a tokenizer."""

    ids: list[int]
    texts: list[str] | None


def tokenize(worker: TextWorker, prompt: Any, with_texts: bool) -> Tokens:
    """Return the tokens of a prompt, in a tokenizer's process. Raise `InvalidRequestError`."""
    ids = unpack_ids(worker.token_ids(msgspec.convert(prompt, Prompt), empty=True)).tolist()
    if not with_texts or worker.tokenizer is None:
        return Tokens(ids, None)
    return Tokens(ids, [worker.tokenizer.token_bytes(token).decode(errors="replace") for token in ids])


def detokenize(worker: TextWorker, packed: bytes) -> str:
    """Return the text of token ids, packed by `pack_ids`, in a tokenizer's process. Raise `InvalidRequestError`."""
    if worker.tokenizer is None:
        raise InvalidRequestError("tokens", "This model has no tokenizer.")
    ids = unpack_ids(packed)
    unknown = ids[ids >= worker.limits.vocab_size]
    if len(unknown):
        what = f"Token id {unknown[0]} is not in the vocabulary of {worker.limits.vocab_size}."
        raise InvalidRequestError("tokens", what)
    return worker.tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def count(loop: SchedulerLoop) -> tuple[dict[str, float], str]:
    """Return the fields of `Stats`, in rank 0's process."""
    return {name: float(value) for name, value in loop.scheduler.stats().items()}, "".join(metrics_of(loop.manager))


def own_counts(worker: Any) -> tuple[int, list[tuple[str, str, str, str, int]]]:
    """Return how many messages a worker process of any kind has dropped, and its calls of plugins not built in.

    A call is a plugin's name, path and SHA-256, the hook or method, and the number of calls.
    """
    return worker.inbox.num_dropped, worker.manager.call_counts()


def metrics_of(manager: PluginManager) -> list[str]:
    """Return the metrics of the observers, each as lines in Prometheus' text format.

    Those of an observer with an error are left out, and its first error is logged.
    """
    found: list[str] = []
    failed = _failed.setdefault(manager, set())
    for implementation in manager.hook.minisgl_metrics.get_hookimpls():
        try:
            text: Any = implementation.function()
            if text is not None:
                found.append(text if text.endswith("\n") or not text else text + "\n")
        except Exception as error:
            if (name := implementation.plugin_name) not in failed:
                failed.add(name)
                log.error(
                    "minisgl_metrics of %s failed, so /metrics leaves its metrics out: %s", name, described(error)
                )
    return found


def flush_cache(loop: SchedulerLoop) -> int | None:
    """Evict all pages of the prefix cache. Return their number; None if a request is open: nothing changes.

    Return `BUSY` if a step of requests that have ended is in flight: the loop reads its result next.
    """
    scheduler = loop.scheduler
    if scheduler.requests:
        return None
    if scheduler.in_flight:
        return BUSY
    flush = getattr(scheduler.cache_manager, "flush", None)
    return 0 if flush is None else int(flush())


async def ask_tokens(dispatcher: Dispatcher, prompt: Prompt, with_texts: bool = False) -> Tokens:
    """Return a prompt's token ids, and with ``with_texts`` each token's text. Raise `ApiError`."""
    return Tokens(*await ask_tokenizer(dispatcher, tokenize, prompt, with_texts))


async def ask_text(dispatcher: Dispatcher, ids: bytes) -> str:
    """Return the text of token ids, packed by `pack_ids`. Raise `ApiError`."""
    text: str = await ask_tokenizer(dispatcher, detokenize, ids)
    return text


async def ask_stats(dispatcher: Dispatcher) -> Stats:
    """Return the scheduler's counts. Raise `ApiError` (503)."""
    from minisgl.server.extension import Stats

    return Stats(*await ask_worker(dispatcher, "scheduler-0", count))


async def in_time(answer: Awaitable[T], seconds: float | None) -> T:
    """Wait for an answer. Raise `ApiError` (504) after ``seconds``."""
    import asyncio  # the workers don't need it

    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise timed_out(seconds) from None
