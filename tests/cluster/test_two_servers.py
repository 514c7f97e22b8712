"""Two real servers of ``tutor`` behind the exact router, with the ``openai`` client as it is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import openai

from minisgl.testing.serving import patient_timeout

QUESTIONS = ("What is a KV cache?", "What is a page table?")


class Stream(threading.Thread):
    """A streamed chat completion in a thread of its own."""

    def __init__(self, client: openai.OpenAI, question: str):
        super().__init__(daemon=True)
        self.client, self.question = client, question
        self.text, self.error, self.finish = "", "", None
        self.start()

    def run(self) -> None:
        try:
            for chunk in self.client.chat.completions.create(
                model="tutor",
                messages=[{"role": "user", "content": self.question}],
                max_tokens=400,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                self.text += chunk.choices[0].delta.content or ""
                self.finish = chunk.choices[0].finish_reason or self.finish
        except openai.APIError as error:
            self.error = str(error)


def ask(client: openai.OpenAI, question: str, **more: Any) -> openai.types.chat.ChatCompletion:
    messages: Any = [{"role": "user", "content": question}]
    return client.chat.completions.create(model="tutor", messages=messages, max_tokens=24, temperature=0, **more)


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + patient_timeout(seconds)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_servers(start_cluster: Callable[..., Any], leftovers: Callable[[], list[str]]) -> None:
    """Prompts go where they are cached; kill -9 of a server breaks its own streams only; it is back; none is left."""
    cluster = start_cluster("router=exact", "num_pages=1024", "page_size=4", "log_level=warning")
    cluster.wait_until_ready()
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        assert [model.id for model in client.models.list().data] == ["tutor"]

        # The first requests of both prompts go to different replicas, the later ones to the replica that has them,
        # unless it then has too much load.
        for question in QUESTIONS:
            ask(client, question)
        wait_for(lambda: all(each["cached_blocks"] for each in cluster.replicas()))
        assert [each["requests"] for each in cluster.replicas()] == [2, 1]  # the first one is the list of models
        answers = [ask(client, question) for _ in range(3) for question in QUESTIONS]
        usages = [answer.usage.model_dump() for answer in answers if answer.usage is not None]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        whole = [(usage["prompt_tokens"] - 1) // 4 * 4 for usage in usages]
        assert sum(one == other for one, other in zip(cached, whole, strict=True)) >= 5, (cached, whole)

        # kill -9 under load
        streams = [Stream(client, f"{index}: {QUESTIONS[index % 2]}") for index in range(4)]
        wait_for(lambda: all(stream.text for stream in streams))
        victim = cluster.replicas()[0]
        assert 0 < victim["open_requests"] < 4
        os.kill(victim["pid"], signal.SIGKILL)
        killed = time.monotonic()
        found = cluster.wait_for_states("ready", "ready")
        while found[0]["restarts"] == 0:
            found = cluster.wait_for_states("ready", "ready")
        back = time.monotonic() - killed
        # It is started again after 1 s. Starting beside four streams takes longer than at the beginning.
        assert back < found[0]["start_seconds"] + patient_timeout(5.0)
        for stream in streams:
            stream.join(patient_timeout(120))
        broken = [stream for stream in streams if stream.error]
        assert len(broken) == victim["open_requests"]
        for stream in streams:
            if stream in broken:
                assert "The replica died" in stream.error
            else:
                assert stream.finish == "length"
        assert found[0]["cached_blocks"] == 0
        assert ask(client, QUESTIONS[1]).choices[0].message.content == answers[-1].choices[0].message.content

    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(patient_timeout(60)) == 0
    wait_for(lambda: leftovers() == [])
