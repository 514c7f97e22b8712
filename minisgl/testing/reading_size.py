"""Measures how much of the project a reader must open: the files that a call runs through, and the lines in them.

`python -m minisgl.testing.reading_size` prints the figures. `tests/test_reading_size.py` keeps them from growing. A
file counts whole, however few of its lines run. Only files of the project count, and only from the second call on: the
first one also runs what happens once.

The processes of a server are measured too: `RECORDER` is a ``sitecustomize`` module, which every Python process imports
at its start if it is on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from minisgl.core import SamplingParams
from minisgl.llm import LLM
from minisgl.testing.serving import Server

ROOT = Path(__file__).resolve().parent.parent.parent
AROUND = ("bench", "trace", "testing", "cluster")
"""The folders of ``minisgl`` that are around the engine."""
OPTIONS = ("attention=torch", "cache=radix", "device=cpu", "live=off")
PLAIN = (*OPTIONS, "kernels=torch", "tokenizer=plain")
"""The options of the plain engine: its layers and its tokenizer are those of the core."""
PLAIN_SERVER = (*PLAIN, "server.extensions=[]")

RECORDER = f"""
import json, os, sys, threading, time
ROOTS = ({str(ROOT / "minisgl")!r}, {str(ROOT / "plugins")!r})
last = {{}}  # file -> when it last ran
own = {{}}  # file name of a code object -> whether it belongs to the project

def trace(frame, event, arg):
    name = frame.f_code.co_filename
    ours = own.get(name)
    if ours is None:
        ours = own[name] = name.startswith(ROOTS)
    if not ours:
        return None
    last[name] = time.monotonic()
    return trace

def write():
    path = os.path.join(os.environ["MINISGL_READING"], f"{{os.getpid()}}.json")
    while True:
        time.sleep(0.05)
        with open(path + ".new", "w") as file:
            json.dump(dict(last), file)
        os.replace(path + ".new", path)

threading.settrace(trace)
sys.settrace(trace)
thread = threading.Thread(target=write, daemon=True)
thread.start()
"""


def lines(files: Iterable[str | Path]) -> int:
    """Return the number of lines of the files together."""
    return sum(len(Path(file).read_text("utf-8").splitlines()) for file in files)


def core_files() -> list[Path]:
    """Return the Python files of ``minisgl`` without what is around the engine."""
    folder = ROOT / "minisgl"
    return [path for path in sorted(folder.rglob("*.py")) if path.relative_to(folder).parts[0] not in AROUND]


def files_of_generate(options: Sequence[str] = OPTIONS, tokens: int = 8) -> set[str]:
    """Return the files of the project that ``LLM.generate`` of ``tokens`` tokens runs through, at its second call."""
    roots = (str(ROOT / "minisgl"), str(ROOT / "plugins"))
    files: set[str] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(roots):
            return None
        files.add(frame.f_code.co_filename)
        return trace

    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    with LLM("tutor", overrides=[*options, "num_pages=64"]) as llm:
        llm.generate("How many legs has a spider?", params)
        before = sys.gettrace()
        sys.settrace(trace)
        threading.settrace(trace)
        try:
            llm.generate("How many legs has a spider?", params)
        finally:
            sys.settrace(before)
            threading.settrace(None)
    return files


def files_of_chat(options: Sequence[str] = OPTIONS, tokens: int = 8) -> set[str]:
    """Return the files that a streamed chat runs through in all processes of a server, at the second chat."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(RECORDER, "utf-8")
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {"PYTHONPATH": os.pathsep.join(paths), "MINISGL_READING": folder}
        with Server("model=tutor", *options, "num_pages=64", env=env) as server:
            body = {
                "model": "tutor",
                "messages": [{"role": "user", "content": "How many legs has a spider?"}],
                "max_tokens": tokens,
                "stream": True,
            }
            for _ in range(2):
                begin = time.monotonic()
                with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as answer:
                    assert answer.status_code == 200
                    assert "data: [DONE]" in list(answer.iter_lines())
            time.sleep(0.5)  # the processes have written what ran until now
            found: set[str] = set()
            for path in Path(folder).glob("*.json"):
                found |= {name for name, when in json.loads(path.read_text()).items() if begin <= when}
    return found


def report(title: str, files: set[str]) -> None:
    """Print the files with their lines, and the totals."""
    print(f"{title}: {len(files)} files, {lines(files)} lines")
    for file in sorted(files):
        print(f"{lines([file]):6} {Path(file).relative_to(ROOT)}")
    print()


if __name__ == "__main__":
    core = core_files()
    print(f"minisgl/ without {', '.join(AROUND)}: {len(core)} files, {lines(core)} lines")
    print(
        "files above 400 lines:", ", ".join(str(p.relative_to(ROOT)) for p in core if lines([p]) > 400) or "none", "\n"
    )
    for words in (PLAIN, OPTIONS):
        report(f"LLM.generate, {' '.join(words)}", files_of_generate(words))
    for extended in (PLAIN_SERVER, OPTIONS):
        report(f"a streamed chat, {' '.join(extended)}", files_of_chat(extended))
