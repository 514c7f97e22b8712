"""A short soak of a real server, and the faults that the soak must find."""

from __future__ import annotations

from collections import Counter

import pytest

from minisgl.testing import server_soak
from minisgl.testing.server_soak import Client, Level, Question, Report, run

OPTIONS = ("model=tutor", "num_pages=400", "max_running_requests=16")


def test_mixed_traffic() -> None:
    """Every answer is the one of the idle server, and nothing stays behind."""
    report = run(OPTIONS, seconds=5, level_after=2, clients=6, number=30)
    assert report.problems(memory_mb=100) == []
    assert min(report.answers[kind] for kind in ("whole", "streamed", "left")) > 0


def test_wrong_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Client.ask

    def forged(self: Client, question: Question, stream: bool = False, leave_after: int | None = None) -> object:
        texts = ask(self, question, stream, leave_after)
        return [*texts[:-1], texts[-1] + "x"] if texts and stream else texts

    monkeypatch.setattr(server_soak.Client, "ask", forged)
    report = run(OPTIONS, seconds=60, level_after=0, clients=2, number=6)
    assert "was answered streamed" in report.problems(memory_mb=1000)[0]


@pytest.mark.parametrize(
    ("after", "log", "found"),
    [
        (Level(140, 20), "", []),
        (Level(151, 20), "", ["api grew from 100 to 151 MB"]),
        (Level(100, 21), "", ["api has 21 file descriptors, and had 20"]),
        (Level(100, 20), "Traceback (…)", ["the log has an error:\nTraceback (…)"]),
    ],
)
def test_problems(after: Level, log: str, found: list[str]) -> None:
    assert Report(Counter(), [], {"api": Level(100, 20)}, {"api": after}, log).problems() == found
