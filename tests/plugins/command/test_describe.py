"""Descriptions of the options: help text, reference pages and shell completion."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from minisgl.chapters.site.reference import pages
from minisgl.config import Config
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.completion import SCRIPTS, completions
from minisgl.plugins.command.describe import core_options
from minisgl.plugins.command.help import doc_of, field_docs, help_of, help_text
from minisgl.plugins.command.listing import default_text, group_options, presets, type_name
from minisgl.plugins.http import HttpConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load(light=True)


def test_field_docs() -> None:
    """The help text of a field is the string literal on the line below it."""
    assert "tensor-parallel ranks" in field_docs(Config)["tp"].lower()
    assert "free port" in field_docs(HttpConfig)["port"]
    assert "attention" not in field_docs(Config)


def test_every_option_is_documented(manager: PluginManager) -> None:
    everything = core_options() + list(group_options(manager).values())
    assert [o.key for o in everything if not help_of(o)] == []
    classes = [schema for names in manager.configs.values() for schema in names.values()]
    assert [schema for schema in classes if not doc_of(schema)] == []
    texts = {**presets("experiment"), **presets("stage")}
    assert [name for name, text in texts.items() if not text.endswith(".")] == []


def test_help_is_complete(manager: PluginManager) -> None:
    text = help_text(manager)
    for option in [*core_options(), *group_options(manager).values()]:
        assert f" {option.key}={default_text(option)}" in text
        assert f"[{type_name(option)}]" in text
    for group, names in manager.configs.items():
        for name in names:
            assert f"  {group}={name}" in text
    assert max(map(len, text.splitlines())) <= 110
    assert "``" not in text


def test_reference_pages_are_current() -> None:
    for name, text in pages().items():
        page = ROOT / "docs" / "reference" / name
        fresh = page.read_text("utf-8") == text
        assert fresh, f"docs/reference/{name} is stale: run `make reference`"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("pag", ["page_size="]),
        ("cache=", ["cache=groups", "cache=naive", "cache=radix", "cache=states"]),
        ("cache=r", ["cache=radix"]),
        ("stage=", [f"stage={n}" for n in range(1, 10)]),
        ("dtype=fl", ["dtype=float32", "dtype=float16"]),
        ("overlap=", ["overlap=true", "overlap=false"]),
        ("scheduler.p", ["scheduler.patience=", "scheduler.preempt="]),
        ("server.po", ["server.port="]),
        ("--v", ["--version"]),
        ("zzz", []),
        ("seed=", []),
    ],
)
def test_completions(manager: PluginManager, word: str, expected: list[str]) -> None:
    assert list(completions(manager, word)) == expected


def test_completions_of_model(manager: PluginManager) -> None:
    assert "model=tutor" in list(completions(manager, "model=t"))


@pytest.fixture
def on_path(tmp_path: Path) -> dict[str, str]:
    """Return environment variables with which ``minisgl`` is a command, even if the package is not installed."""
    script = tmp_path / "bin" / "minisgl"
    script.parent.mkdir()
    code = "import sys; from minisgl.options.compose import run_cli; run_cli(sys.argv[1:])"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$@"\n')
    script.chmod(0o755)
    return os.environ | {"PATH": f"{script.parent}:{os.environ['PATH']}"}


def complete_in_bash(line: str, env: dict[str, str], breaks: str = " \t\n\"'><=;|&(:") -> list[str]:
    """Return the completions that bash offers for ``line``.

    ``breaks`` are readline's word break characters. The test splits the line at ``=`` as readline does.
    """
    program = r"""
        eval "$(minisgl --shell-completion bash)"
        complete -p minisgl >/dev/null || exit 9
        COMP_LINE="$1"; COMP_POINT=${#1}
        mapfile -t COMP_WORDS < <(printf '%s\n' "$1" | sed -E "$2" | tr ' ' '\n')
        [[ "$1" == *" " ]] && COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        compopt() { :; }
        _minisgl minisgl "${COMP_WORDS[COMP_CWORD]}" ""
        printf '%s\n' "${COMPREPLY[@]}"
    """
    split = "s/=/ = /g; s/ +$//" if "=" in breaks else "s/ +$//"
    command = ["bash", "-c", program, "bash", line, split]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return result.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_completion_in_bash(on_path: dict[str, str], tmp_path: Path) -> None:
    options = ["order", "patience", "max_pause", "preempt", "interactive", "step_tokens", "batch_share"]
    keys = ["scheduler=", *(f"scheduler.{option}=" for option in options)]
    assert complete_in_bash("minisgl sched", on_path) == keys
    assert complete_in_bash("minisgl tp=2 cache=", on_path) == ["groups", "naive", "radix", "states"]
    assert complete_in_bash("minisgl cache=r", on_path) == ["radix"]
    assert complete_in_bash("minisgl cache=r", on_path, breaks=" ") == ["cache=radix"]
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from dataclasses import dataclass\nfrom minisgl import hookimpl\n@dataclass\nclass Mine:\n    depth: int = 1\n"
        '@hookimpl\ndef minisgl_configs():\n    yield "cache", "mine", Mine\n'
    )
    assert complete_in_bash(f"minisgl plugins={plugin} cache=m", on_path) == ["mine"]
    assert complete_in_bash(f"minisgl plugins={plugin} cache.d", on_path) == ["cache.depth="]
    assert complete_in_bash(f"minisgl plugins={tmp_path}/mi", on_path) == [str(plugin)]


@pytest.mark.parametrize("shell", list(SCRIPTS))
def test_completion_scripts_are_valid(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell])
    subprocess.run([shell, "-n", str(script)], check=True, timeout=150)
