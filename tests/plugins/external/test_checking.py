"""Plugins that are not built in: mistakes are refused with advice, plugins for 0.2 work, and hook calls are printed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from minisgl.config import ConfigError
from minisgl.plugin_manager.manager import PluginManager
from minisgl.testing.own_plugin import MINE, run_python, write_plugin

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a plugin file: the imports that every plugin needs, then the given body."""

    return partial(write_plugin, tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my_cache.py"
    path.write_text(MINE)
    return path


PART = """
    @hookimpl
    def minisgl_configs():
        yield "cache", "mine", Mine
    @dataclass
    class Mine:
        size: int = 1
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("x = 1", "has no hook, so it would do nothing"),
        ("def minisgl_metrics(): ...", "minisgl_metrics has no @hookimpl above it"),
        ("def minisgl_metrix(): ...", "no hook of that name either. Did you mean minisgl_metrics?"),
        ("@hookimpl\ndef minisgl_metricss(): ...", "there is no hook minisgl_metricss. Did you mean minisgl_metrics?"),
        (
            "@hookimpl\ndef minisgl_pages_evicted(step, page): ...",
            "takes 'page', which this hook does not offer. Did you mean pages?",
        ),
        ("@hookimpl\ndef minisgl_pages_evicted(self, step): ...", "It may take any of: step, pages."),
        (
            "@dataclass\nclass Mine:\n    def build(self, page_sise): ...\n"
            "@hookimpl\ndef minisgl_configs():\n    yield 'cache', 'mine', Mine",
            "Mine.build takes 'page_sise', which the group cache does not offer. Did you mean page_size?",
        ),
        (
            "@dataclass\nclass Mine: ...\n@hookimpl\ndef minisgl_configs():\n    yield 'cash', 'mine', Mine",
            "there is no group 'cash'. Did you mean cache?",
        ),
        ("@hookimpl\ndef minisgl_configs():\n    yield 'cache', 'mine'", "it yielded ('cache', 'mine')"),
        ("@hookimpl\ndef minisgl_configs():\n    yield 'cache', 'mine', int", "must yield (group, name, dataclass)"),
        ("@hookimpl\ndef minisgl_configs():\n    pass", "it has no `yield`"),
        ("@hookimpl\ndef minisgl_configs():\n    yield undefined", "NameError: name 'undefined' is not defined"),
        (
            "@dataclass(frozen=True)\nclass Mine: ...\n@hookimpl\ndef minisgl_configs():\n    yield 'cache', 'm', Mine",
            "Mine is a frozen dataclass",
        ),
        (
            "@dataclass\nclass Mine: ...\n@hookimpl\ndef minisgl_configs():\n    yield 'cache', 'radix', Mine",
            "and minisgl.plugins.cache.radix both claim cache=radix",
        ),
        (
            "class Watch:\n    def __init__(self, path): ...\n    @hookimpl\n    def minisgl_metrics(self): ...",
            "Watch() without arguments",
        ),
        ("import no_such_package", "it needs the package 'no_such_package', which is not installed. Try: pip install"),
        ("from . import helper", "relative import"),
        ("from minisgl.core import Nothing", "cannot import name 'Nothing'"),
        ("def f(:\n    pass", "line 3 is not Python"),
        ("1 / 0", "importing it failed at line 3: ZeroDivisionError"),
    ],
)
def test_wrong_plugin_is_refused(write: Write, body: str, expected: str) -> None:
    """A plugin with a mistake is refused with an error that explains it, and can be loaded once it is corrected."""
    path = write(body)
    with pytest.raises(ConfigError) as caught:
        PluginManager.load([str(path)])
    assert expected in str(caught.value)
    assert "my_cache.py" in str(caught.value)
    path.write_text(MINE)  # the corrected file, in the same process
    assert "mine" in PluginManager.load([str(path)]).configs["cache"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("", "has no method `build`"),
        ("        def build(self): ...", "build returned an object of the type NoneType"),
    ],
)
def test_a_part_that_is_not_built(write: Write, body: str, expected: str) -> None:
    manager = PluginManager.load([str(write(PART + body))])
    with pytest.raises(ConfigError, match=f"cache=mine: .*{expected}"):
        manager.build("cache", manager.make("cache", "mine"), page_size=1)


def test_factory_hooks_of_minisgl_0_2(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """A plugin whose hook builds its part still works. A warning says what to write instead."""
    body = """
    @hookimpl
    def minisgl_cache(config, page_size, build):
        if isinstance(config, Mine):
            return Cache((config.size, page_size, type(build("naive")).__name__))
    class Cache(tuple):
        def match(self, key): ...
    """
    manager = PluginManager.load([str(write(PART + body))])
    assert "minisgl_cache is deprecated" in caplog.text
    assert (
        "as the method `build` of the options dataclass, which takes page_size, spec, build_other by name"
        in caplog.text
    )
    assert manager.build("cache", manager.make("cache", "mine"), page_size=4) == (1, 4, "NaiveCache")


def test_trace_hooks_prints_calls(mine: Path) -> None:
    code = """
        import sys
        from minisgl.plugin_manager.manager import PluginManager
        manager = PluginManager.load([sys.argv[1]], light=True)
        manager.build("cache", manager.make("cache", "mine"), page_size=4)
    """
    traced = run_python(code, str(mine), MINISGL_TRACE_HOOKS="1").stderr
    assert f"minisgl_configs() calls {mine}" in traced
    assert "cache=mine -> ('mine', 4, 10000)" in traced
    assert run_python(code, str(mine), MINISGL_TRACE_HOOKS="0").stderr == ""
