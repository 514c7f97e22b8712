"""`InterruptibleLLM`: an `LLM` whose calls Ctrl-C can break off without harm. It is ``minisgl.LLM``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from minisgl.core import I32, SamplingParams
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.plugins.command.interrupts.deferred import DeferredInterrupt

__all__ = ["InterruptibleLLM"]


class InterruptibleLLM(LLM):
    """An `LLM` for which Ctrl-C (SIGINT) takes effect between two turns of the scheduler.

    The requests of the interrupted call are then aborted, open requests of `add_request` stay open, and the next call
    works. A second Ctrl-C takes effect at once. If it, or any other error, breaks a turn off, the LLM is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        # False while a call changes the scheduler, the engine or the outputs. If an exception leaves it False, they may
        # disagree, and the LLM must be closed.
        self._consistent = True
        self._interrupt = DeferredInterrupt()  # that of the present call
        super().__init__(*args, **kwargs)

    def close(self) -> None:
        """Close the LLM. Ctrl-C waits until it is closed."""
        with self._lock, DeferredInterrupt():
            super().close()

    # ---- changes of the state ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Mark the state as inconsistent inside the context. An exception leaves it so."""
        before, self._consistent = self._consistent, False
        yield
        self._consistent = before

    def _turn(self) -> list[RequestOutput]:
        if self._interrupt.deliver():
            self._check_open()  # the handler may have closed this LLM
        with self._changing():
            return super()._turn()

    def _abort(self, uids: Sequence[int]) -> None:
        with self._changing():
            super()._abort(uids)

    def _add_choice(self, output: RequestOutput, k: int, ids: Sequence[int] | I32, params: SamplingParams) -> I32:
        uid = self._next_uid
        self._consistent = False
        try:
            prompt_ids = super()._add_choice(output, k, ids, params)
        except Exception:
            self._consistent = uid not in self.scheduler.requests  # refused before anything changed
            raise
        self._consistent = True
        return prompt_ids

    # ---- after an exception --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed is None:
            with self._lock:
                if not self._consistent:  # a call was broken off, and so was the handling of its exception
                    self._close_after(KeyboardInterrupt())
        super()._check_open()

    @contextlib.contextmanager
    def _call(self, outputs: Sequence[RequestOutput] = ()) -> Iterator[None]:
        """Let one call at a time change the scheduler. Ctrl-C waits for the end of the body, or for the next turn.

        After an exception, what is left of ``outputs`` is cancelled, or this LLM is closed if a turn was broken off.
        """
        with self._lock:
            self._check_open()
            try:
                with DeferredInterrupt() as interrupt:
                    outer, self._interrupt = self._interrupt, interrupt  # a handler may call this LLM
                    try:
                        yield
                    finally:
                        self._interrupt = outer
            except BaseException as error:
                # Python runs no signal handler between the exception and this assignment.
                consistent, self._consistent = self._consistent, False
                self._recover(error, outputs, consistent)
                raise

    def _recover(self, error: BaseException, outputs: Sequence[RequestOutput], consistent: bool) -> None:
        """Cancel what is left of these requests after an exception, or close this LLM if a turn was broken off.

        After a KeyboardInterrupt, the next Ctrl-C is the second one: it is not deferred, and closes this LLM.
        """
        defer = contextlib.nullcontext() if isinstance(error, KeyboardInterrupt) else DeferredInterrupt()
        try:
            if consistent and self._closed is None:
                with defer:
                    self._cancel(outputs)
                    self._consistent = True
        except BaseException as second:
            error = second
            raise
        finally:
            if not self._consistent:
                self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        super()._close_after(error)
        self._consistent = True
