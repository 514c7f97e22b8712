"""Plugins that fail: the error names the plugin and the hook, and no plugin ends a program silently."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.config import Config, ConfigError
from minisgl.core import EngineSpec
from minisgl.plugin_manager.failures import described
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.external.failures import PluginError
from minisgl.plugins.http.apis.queries import metrics_of
from minisgl.scheduler.observer import HookObserver

SPEC = EngineSpec(page_size=16, num_pages=64, max_running_requests=8, max_seq_len=512, vocab_size=320)
HEAD = """
import sys
from dataclasses import dataclass, field
from minisgl import hookimpl
class Odd(BaseException): ...
@dataclass
class Mine: ...
"""
RAISED = ["sys.exit(0)", "sys.exit('bye')", "raise SystemExit", "raise KeyboardInterrupt", "raise Odd('x')", "1 / 0"]
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def plugin(text: str) -> str:
        path = tmp_path / f"plugin{len(list(tmp_path.iterdir()))}.py"
        path.write_text(HEAD + text)
        return str(path)

    return plugin


@pytest.fixture(autouse=True)
def _worker_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handle SIGINT as the server and its workers do: Python raises no KeyboardInterrupt for it."""
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize(
    ("text", "hook"),
    [
        ("{}", "importing it failed at line"),
        ("@hookimpl\ndef minisgl_configs():\n    {}\n    yield", "minisgl_configs"),
        ("class A:\n    def __init__(self):\n        {}\n    @hookimpl\n    def minisgl_closed(self): ...", "A()"),
    ],
)
def test_loading(write: Write, text: str, hook: str, raised: str) -> None:
    path = write(text.format(raised))
    with pytest.raises(ConfigError) as error:
        PluginManager.load([path], light=True)
    assert path in str(error.value) and hook in str(error.value)


def test_loading_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "leaves_at_once.py").write_text("import sys\nsys.exit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"plugins=leaves_at_once: importing it failed at line 2: SystemExit: 0"):
        PluginManager.load(["leaves_at_once"], light=True)


def test_ctrl_c_is_no_fault_of_the_plugin(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python's own handler, a KeyboardInterrupt comes from the user."""
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        PluginManager.load([write("raise KeyboardInterrupt")], light=True)


BUILD = """
@dataclass
class Part:
    def build(self):
        {}
@hookimpl
def minisgl_configs():
    yield "cache", "mine", Part
"""


@pytest.mark.parametrize("raised", RAISED[:-1])
def test_build(write: Write, raised: str) -> None:
    path = write(BUILD.format(raised))
    manager = PluginManager.load([path], light=True)
    with pytest.raises(ConfigError, match=r"cache=mine: the plugin .* raised .* in build") as error:
        manager.build("cache", manager.make("cache", "mine"), page_size=1)
    assert path in str(error.value)


@pytest.mark.parametrize(
    ("made", "says"), [("Mine", "the class Mine"), ("7", "type int"), ("'radix'", "type str"), ("Mine()", "type Mine")]
)
def test_build_returns_another_type(write: Write, made: str, says: str) -> None:
    manager = PluginManager.load([write(BUILD.format(f"return {made}"))], light=True)
    with pytest.raises(ConfigError, match=f"cache=mine: build returned .*{says}"):
        manager.build("cache", manager.make("cache", "mine"), page_size=1)


def test_models_returns_another_type(write: Write) -> None:
    path = write("@hookimpl\ndef minisgl_models():\n    return {'LlamaForCausalLM': 7}")
    with pytest.raises(ConfigError, match="minisgl_models must return a mapping") as error:
        PluginManager.load([path]).models()
    assert path in str(error.value)


@pytest.mark.parametrize("raised", RAISED)
def test_observer_that_is_built(write: Write, raised: str) -> None:
    path = write(f"@hookimpl\ndef minisgl_observer(config):\n    {raised}")
    manager = PluginManager.load([path], light=True)
    with pytest.raises(ConfigError, match="minisgl_observer") as error:
        manager.observe(Config(), SPEC)
    assert path in str(error.value)


@pytest.mark.parametrize("raised", RAISED)
def test_observer_and_method(write: Write, raised: str) -> None:
    """An event and a method of a built object raise an `Exception`, and its description names the plugin."""
    text = BUILD.format("return Cache()") + f"class Cache:\n    def match(self, key):\n        {raised}\n"
    path = write(text + f"@hookimpl\ndef minisgl_batch_planned(step):\n    {raised}\n")
    manager = PluginManager.load([path], light=True)
    made = manager.build("cache", manager.make("cache", "mine"), page_size=1)
    planned = HookObserver(manager.hook).batch_planned
    for call, name in ((lambda: made.match(1), "match"), (lambda: planned(1, []), "minisgl_batch_planned")):
        with pytest.raises(ZeroDivisionError if "/" in raised else PluginError) as error:
            call()
        assert path in described(error.value) and name in described(error.value)


def test_description_of_an_error_below_the_plugin(write: Write) -> None:
    """The plugin called the code that raised: the line is the plugin's."""
    path = write("import json\n@hookimpl\ndef minisgl_batch_planned(step):\n    json.loads('{')\n")
    manager = PluginManager.load([path], light=True)
    with pytest.raises(ValueError) as error:
        HookObserver(manager.hook).batch_planned(1, [])
    assert described(error.value).endswith(f"(raised in minisgl_batch_planned of the plugin {path}, line 11)")
    assert described(ValueError("ours")) == "ValueError: ours"


# ---- metrics -------------------------------------------------------------------------------------------------------


def manager_with(write: Write, body: str) -> PluginManager:
    """Return a manager with a good observer and one whose metrics are ``body``."""
    good = write("@hookimpl\ndef minisgl_metrics():\n    return '# TYPE good gauge\\ngood{a=\"b\"} 1'")
    return PluginManager.load([good, write(f"@hookimpl\ndef minisgl_metrics():\n    {body}")], light=True)


BAD = [
    *RAISED,
    "return 7",
    "return b'mine 1'",
    "return ['mine 1']",
    "return 'mine \\udcff'",
    "return 'mine{a=\"\\ud800\"} 1'",
    "return 'not metrics'",
    "return 'mine{a=b} 1'",
    "return 'mine 1\\n\\x00'",
    "return '# TYPE mine colour'",
    "return 'mine 1\\n' * 2**18",
    "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})",
]


@pytest.mark.parametrize("body", BAD)
def test_bad_metrics(write: Write, body: str, caplog: pytest.LogCaptureFixture) -> None:
    """The other observer's metrics are complete; the error is logged once."""
    manager = manager_with(write, body)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            texts = metrics_of(manager)
    assert "".join(texts).count("good{") == 1 and "mine" not in "".join(texts)
    (record,) = caplog.records
    assert "minisgl_metrics of " in record.getMessage() and "plugin1.py failed" in record.getMessage()


@pytest.mark.parametrize(
    "text",
    [
        '# HELP mine a help\n# TYPE mine histogram\nmine_bucket{le="+Inf"} 3\nmine_sum 1.5e-3\nmine_count 3 139506636',
        'mine{a="x\\"y\\\\z\\n",b="ü"} NaN\n\n# a comment\nmine{} -Inf\nmine{a="1",} +4\nmine 1\n',
        "",
    ],
)
def test_good_metrics(write: Write, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """What Prometheus reads is passed on, with a newline at its end."""
    manager = manager_with(write, f"return {text!r}")
    found = "".join(metrics_of(manager))
    assert not caplog.records and text in found
    list(text_string_to_metric_families(found))


def test_no_metrics(write: Write) -> None:
    with_none, without = manager_with(write, "return None"), PluginManager.load(light=True)
    assert len(metrics_of(with_none)) == len(metrics_of(without)) + 1  # that of the good observer


# ---- command lines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "sys.exit(0)",
        "@hookimpl\ndef minisgl_configs():\n    sys.exit(0)\n    yield",
        "def leave(): sys.exit(0)\n@dataclass\nclass Ours:\n    x: int = field(default_factory=leave)\n"
        '@hookimpl\ndef minisgl_configs():\n    yield "cache", "ours", Ours',
    ],
)
def test_server_does_not_end_with_status_0(write: Write, text: str) -> None:
    path = write(text)
    command = [sys.executable, "-m", "minisgl", "model=tutor", "server.port=0", f"plugins=[{path}]", "cache=ours"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 2 and path in ran.stderr, ran.stderr
