"""The benchmarks' command lines: wrong arguments and unwritable files are reported before a benchmark runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.bench import (
    abuse,
    cluster,
    cpu,
    grammar,
    host,
    kernels,
    link,
    live,
    offline,
    online,
    speculation,
    suite,
    ttft,
)
from minisgl.bench.__main__ import BENCHMARKS, main
from minisgl.chapters.ladder import stages

WRITERS = {
    "offline": (offline, "measure", ["--json"]),
    "online": (online, "measure", ["--json", "--plot"]),
    "replay": (online, "measure", ["--json", "--plot"]),
    "stages": (stages, "measure", ["--json", "--plot"]),
    "suite": (suite, "measure", ["--json"]),
    "abuse": (abuse, "_server", ["--json"]),
    "host": (host, "measure", ["--json"]),
    "kernels": (kernels, "cases", ["--json"]),
    "link": (link, "measure", ["--json"]),
    "cluster": (cluster, "prepare", ["--json", "--plot"]),
    "speculation": (speculation, "measure", ["--json"]),
    "ttft": (ttft, "measure", ["--json"]),
    "grammar": (grammar, "measure", ["--json"]),
    "cpu": (cpu, "measure", ["--json"]),
    "live": (live, "Server", ["--json"]),
}


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name in WRITERS for flag in WRITERS[name][2]])
def test_unwritable_file_is_refused_first(
    name: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, function, _ = WRITERS[name]
    monkeypatch.setattr(module, function, lambda *_: pytest.fail("the benchmark ran first"))
    for file, message in (
        (tmp_path / "nowhere" / "x", f"there is no folder {tmp_path / 'nowhere'}"),
        (tmp_path, f"argument {flag}: {tmp_path} is a folder: name a file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main([name, flag, str(file)])
        assert message in capsys.readouterr().err


def test_writers_lists_all_file_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for name in BENCHMARKS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        text = capsys.readouterr().out
        flags = [flag for flag in ("--json", "--plot") if f"{flag} FILE" in text]
        assert name == "profile" or flags == WRITERS.get(name, (None, "", []))[2], name


@pytest.mark.parametrize(
    "words",
    [
        "--only 6 7 plugins=mine.py scheduler=mine",
        "plugins=mine.py --only 6 7 scheduler=mine",
        "--only 6 7 --seed=1 plugins=mine.py scheduler=mine",
        "plugins=mine.py scheduler=mine --only 6 7",
    ],
)
def test_options_after_a_flag_with_several_values(words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    words = words.replace("--seed=1", f"--json={tmp_path}/a=b.json")
    monkeypatch.setattr(
        stages, "measure", lambda *arguments: calls.append(arguments) or {"stages": [], "without_cache": 0}
    )
    monkeypatch.setattr(stages, "show", lambda report: None)
    stages.main(words.split())
    assert calls == [(["plugins=mine.py", "scheduler=mine"], [6, 7])]
    assert (tmp_path / "a=b.json").exists() == ("--json" in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--only 5 --counts stage=3", "stage=3: this benchmark measures all stages"),
        ("--only 5 stage=3", "choose one with --only 3"),
        ("device=cpu 9x --only 5", "9x: write key=value"),
        ("--only 4 --counts num_pages=9", "these options cannot serve request"),
        ("--only 4 --counts num_pages=null", "set num_pages and max_seq_len to a number"),
        ("--counts model=nosuch", "model=nosuch: --counts uses no model and no device"),
        ("--only 7 --counts graph=cuda", "graph=cuda: --counts uses no model and no device"),
        ("--only 7 --counts attention.workspace=1", "There is no option 'attention.workspace'"),
        ("--counts schedulr=mine", "Did you mean scheduler?"),
    ],
)
def test_wrong_stage_options_are_refused(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        stages.main(words.split())
    out, err = capsys.readouterr()
    assert message in err
    assert not out


def test_counted_options_change_a_count() -> None:
    """Each option that ``--counts`` accepts changes a count of stage 6 or, with drafts, of stage 8, except three."""
    changed = {
        "cache": "cache=naive",
        "scheduler": "scheduler=static",
        "page_size": "page_size=8",
        "num_pages": "num_pages=130",
        "max_running_requests": "max_running_requests=3",
        "max_prefill_tokens": "max_prefill_tokens=32",
        "overlap": "overlap=true",
        "starvation_steps": "starvation_steps=1",
        "speculation": "speculation=ngram",
        "max_draft_tokens": "max_draft_tokens=1",
    }
    unchanged = {"max_seq_len", "trace", "plugins"}  # these have other effects: a refusal, a file, loaded code
    assert changed.keys() | unchanged == set(stages.COUNTED)
    defaults = {number: stages.count((), [number])["stages"][0] for number in (6, 8)}
    for key, word in changed.items():
        number = 8 if key == "max_draft_tokens" else 6
        assert stages.count([word], [number])["stages"][0] != defaults[number], word
