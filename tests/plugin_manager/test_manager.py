"""The plugin manager: how it finds plugins, which mistakes it reports, and what it builds."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from minisgl.config import GROUPS, Config
from minisgl.core import EngineSpec, Req, SamplingParams
from minisgl.options.compose import compose
from minisgl.plugin_manager import manager as manager_module
from minisgl.plugin_manager.discovery import exists
from minisgl.plugin_manager.encoding import decode_config, encode_config, plugins_of
from minisgl.plugin_manager.manager import ConfigError, PluginManager
from minisgl.testing.own_plugin import MINE, run_python, write_plugin

Write = Callable[..., Path]


@pytest.fixture
def external() -> None:
    """Skip the test without the folder plugins/external: there are only the built-in plugins then."""
    pytest.importorskip("minisgl.plugins.external")


@pytest.fixture
def write(external: None, tmp_path: Path) -> Write:
    """Return a function that writes a plugin file: the imports that every plugin needs, then the given body."""
    return partial(write_plugin, tmp_path)


@pytest.fixture
def main() -> Callable[[list[str]], None]:
    """Return the command ``python -m minisgl.plugins``. It needs the folder plugins/command."""
    pytest.importorskip("minisgl.plugins.command")
    from minisgl.plugins.__main__ import main

    return main


@pytest.fixture
def mine(external: None, tmp_path: Path) -> Path:
    path = tmp_path / "my_cache.py"
    path.write_text(MINE)
    return path


# ---- finding -----------------------------------------------------------------------------------------


def test_built_ins_are_complete_and_load() -> None:
    """All plugins in the package's folders load, and the module of a part has the part's name."""
    manager = PluginManager.load()
    assert manager.plugins == []
    manager.load_all()
    assert all(manager.configs[group] for group in GROUPS if exists(f"minisgl.plugins.{group}"))
    for plugin in manager.plugins:
        kind, name = plugin.name.removeprefix("minisgl.plugins.").split(".")
        assert plugin.source == "built-in"
        optional = "minisgl_configs" not in plugin.hooks  # a plugin that is no part
        assert [option[:2] for option in plugin.options] == ([(kind, name)] if kind in GROUPS and not optional else [])


def test_a_built_in_plugin_is_loaded_when_it_is_needed() -> None:
    manager = PluginManager.load(light=True)
    config = compose(manager, ["cache=naive", "stage='6'"])
    assert config.scheduler.order == "lpm"
    assert {p.name for p in manager.plugins} == {
        f"minisgl.plugins.{group}.{manager.name_of(group, getattr(config, group))}"
        for group in GROUPS
        if getattr(config, group) is not None
    }
    assert manager.find("cache", "radix") is not None and manager.find("cache", "no_such") is None
    other = PluginManager.load()
    assert other.name_of("cache", config.cache) == "naive"
    assert [p.name for p in other.plugins] == ["minisgl.plugins.cache.naive"]


def test_threads_load_the_same_plugins() -> None:
    """Ranks that are threads of one process share a plugin manager."""
    manager = PluginManager.load()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: [manager.find("cache", n) for n in ("naive", "radix")], range(64)))
    assert all(each == found[0] for each in found) and None not in found[0]


def test_light_loads_all_options_but_no_models() -> None:
    light, full = PluginManager.load(light=True), PluginManager.load()
    light.load_all()
    full.load_all()
    assert light.configs == full.configs
    assert light.models() == {}
    assert "Qwen3ForCausalLM" in full.models()


def test_light_does_not_import_torch(mine: Path) -> None:
    """A light process does not import torch, even if a plugin file has ``import torch``."""
    program = """
        import sys, time
        begun = time.process_time()
        from minisgl.options.compose import compose
        from minisgl.plugin_manager.encoding import decode_config, encode_config
        from minisgl.plugin_manager.manager import PluginManager
        manager = PluginManager.load([sys.argv[1]], light=True)
        loaded = time.process_time()
        config = compose(manager, ["cache=mine"])
        decode_config(encode_config(config, manager), manager)
        composed = time.process_time()
        assert type(config.cache).__name__ == "Mine"
        assert "torch" in sys.modules and "torch._C" not in sys.modules and "transformers" not in sys.modules
        print(loaded - begun, composed - begun)
        """
    for _ in range(5):  # a busy machine may need more
        result = run_python(program, str(mine))
        assert result.returncode == 0, result.stderr
        load, everything = map(float, result.stdout.split())
        if load < 0.8 and everything < 1.5:  # seconds of CPU time: usually 0.2; importing torch takes 1 to 4 more
            break
    else:
        pytest.fail(f"{load:.1f} s to load, {everything:.1f} s in all")


def test_one_file_is_one_plugin(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mine.parent)
    link = mine.parent / "link.py"
    link.symlink_to(mine)
    manager = PluginManager.load(
        [str(mine), "my_cache.py", "./my_cache.py", f"{mine.parent}/../{mine.parent.name}/my_cache.py", "link.py"]
    )
    assert [p.source for p in manager.plugins].count("file") == 1
    assert manager.user_plugins == [str(mine)]


def test_two_managers_share_only_classes(mine: Path) -> None:
    one, two = PluginManager.load([str(mine)]), PluginManager.load([str(mine)])
    assert one.schema("cache", "mine") is two.schema("cache", "mine")
    for uid, manager in enumerate((one, one, two)):
        manager.hook.minisgl_request_added(req=Req(uid, [1], SamplingParams(), uid), now=0.0)
    assert "added 2" in one.hook.minisgl_metrics()
    assert "added 1" in two.hook.minisgl_metrics()
    assert "mine" not in PluginManager.load().configs["cache"]


def test_module_name(external: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_module_of_mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    manager = PluginManager.load(["a_module_of_mine"])
    assert manager.user_plugins == ["a_module_of_mine"]
    assert "mine" in manager.configs["cache"]


def test_entry_point_of_installed_package(tmp_path: Path) -> None:
    (tmp_path / "other_minisgl.py").write_text(MINE)
    info = tmp_path / "other_minisgl-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-minisgl\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[minisgl]\nmine = other_minisgl\n")
    code = """
        from minisgl.plugin_manager.manager import PluginManager
        manager = PluginManager.load(light=True)
        found = [(p.name, p.source) for p in manager.plugins if p.source != "built-in"]
        print(found, manager.user_plugins, "mine" in manager.configs["cache"])
    """
    result = run_python(code, PYTHONPATH=str(tmp_path))
    assert result.stdout.strip() == "[('other_minisgl', 'entry point')] [] True", result.stderr
    (tmp_path / "other_minisgl.py").write_text("import no_such_package_at_all\n")
    result = run_python(code, PYTHONPATH=str(tmp_path))
    assert "mine (installed by other-minisgl): it needs the package 'no_such_package_at_all'" in result.stderr


# ---- errors ------------------------------------------------------------------------------------------

PART = """
    @hookimpl
    def minisgl_configs():
        yield "cache", "mine", Mine
    @dataclass
    class Mine:
        size: int = 1
"""


def test_missing_package_names_the_extra(write: Write) -> None:
    pytest.importorskip("minisgl.plugins.command")  # it knows the names of packages
    path = write(
        PART
        + """
        def build(self):
            raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")
    """
    )
    manager = PluginManager.load([str(path)])
    with pytest.raises(ConfigError, match=r"cache=mine: it needs the package 'flashinfer'.*'minisgl\[gpu\]'"):
        manager.build("cache", manager.make("cache", "mine"), page_size=1)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("no_such_file.py", "there is no such file"),
        ("no/such/file.py", "there is no such file"),
        ("no_such_module_at_all", "there is no module 'no_such_module_at_all'"),
        ("", "write the path of a Python file"),
        ("minisgl.core", "has no hook"),
    ],
)
def test_unknown_plugin(external: None, word: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        PluginManager.load([word])


def test_wrong_path_lists_files(mine: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean my_cache\.py\?"):
        PluginManager.load([str(mine.parent / "my_cash.py")])
    with pytest.raises(ConfigError, match=r"is a folder\. Name a file in it: my_cache\.py\."):
        PluginManager.load([str(mine.parent)])


def test_architecture_name_conflict(write: Write) -> None:
    body = """
        class Model: ...
        @hookimpl
        def minisgl_models():
            return {"MyForCausalLM": Model}
    """
    manager = PluginManager.load([str(write(body, "a.py")), str(write(body, "b.py"))])
    with pytest.raises(ConfigError, match=r"[ab]\.py and .*[ab]\.py both claim the architecture MyForCausalLM"):
        manager.models()
    assert "MyForCausalLM" in PluginManager.load([str(write(body, "a.py"))]).models()


def test_option_name_conflict_in_one_file(write: Write) -> None:
    path = write(
        PART.replace("Mine\n", 'Mine\n        yield "cache", "mine", Other\n', 1) + "    class Other(Mine): ..."
    )
    with pytest.raises(ConfigError, match="claims cache=mine twice"):
        PluginManager.load([str(path)])


# ---- building ----------------------------------------------------------------------------------------


def test_build_make_name_of(mine: Path) -> None:
    manager = PluginManager.load([str(mine)])
    config = manager.make("cache", "mine")
    assert manager.build("cache", config, page_size=4) == ("mine", 4, 10_000)
    assert manager.name_of("cache", config) == "mine"
    with pytest.raises(ConfigError, match=r"cache=mime: there is no such cache\. Did you mean mine\? Known: .*radix"):
        manager.make("cache", "mime")
    with pytest.raises(ConfigError, match=r"There is no group 'cash'\. Did you mean cache\?"):
        manager.make("cash", "mine")


def test_without_external(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `plugins/external`, there are only the built-in plugins, and others are refused."""
    monkeypatch.setattr(manager_module, "exists", lambda name: "plugins.external" not in name and exists(name))
    manager = PluginManager.load(light=True)
    assert manager.make("cache", "naive")
    assert manager.call_counts() == []
    with pytest.raises(ConfigError, match=r"plugins=.*no folder plugins/external"):
        manager.add(str(mine))


def test_build_builds_another_part(write: Write) -> None:
    path = write("""
        @dataclass
        class Inner:
            def build(self, device):
                return Backend(f"inner on {device}")
        @dataclass
        class Outer:
            of: str = "inner"
            def build(self, build_other):
                return Backend(f"outer of {build_other(self.of)}")
        @hookimpl
        def minisgl_configs():
            yield "attention", "inner", Inner
            yield "attention", "outer", Outer
        class Backend(str):
            def forward(self): ...
    """)
    manager = PluginManager.load([str(path)])
    assert manager.build("attention", manager.make("attention", "outer"), device="cpu") == "outer of inner on cpu"


def test_build_value_error(write: Write) -> None:
    path = write(
        PART
        + """
        def build(self):
            raise ValueError("size must be even")
    """
    )
    manager = PluginManager.load([str(path)])
    with pytest.raises(ConfigError, match="cache=mine: size must be even"):
        manager.build("cache", manager.make("cache", "mine"), page_size=1)


def test_metrics_of_a_part_are_exported(write: Write) -> None:
    body = """
        def build(self):
            return Cache()
    class Cache:
        __slots__ = ()
        def match(self, key): ...
        def metrics(self):
            return "pages 7\\n"
    """
    manager = PluginManager.load([str(write(PART + body))])
    manager.build("cache", manager.make("cache", "mine"), page_size=1)
    assert "pages 7\n" in manager.hook.minisgl_metrics()


COUNTER = """
from minisgl import hookimpl

class Counter:
    def __init__(self, pages):
        self.pages, self.events = pages, []
    @hookimpl
    def minisgl_pages_evicted(self, step):
        self.events.append(step)
    @hookimpl
    def minisgl_closed(self):
        self.events.append("closed")

made = []

@hookimpl
def minisgl_observer(config, spec):
    if config.seed:
        made.append(Counter(spec.num_pages))
        return made[-1]
"""


def test_observer_lifetime(write: Write) -> None:
    """An observer made by `minisgl_observer` gets the hook calls of its scheduler, and of no other scheduler."""
    manager = PluginManager.load([str(write(COUNTER))])
    made = manager.plugins[-1].module.made
    spec = EngineSpec(page_size=4, num_pages=7, max_running_requests=1, max_seq_len=8, vocab_size=9)
    manager.observe(Config(seed=0), spec)
    manager.hook.minisgl_pages_evicted(step=1, pages=None)
    assert made == []  # the hook returned None, so no observer was made
    manager.observe(Config(seed=1), spec)
    manager.hook.minisgl_pages_evicted(step=2, pages=None)
    manager.observe(Config(seed=1), spec)  # a second scheduler: closes the observer of the first one
    manager.hook.minisgl_pages_evicted(step=3, pages=None)
    manager.close()
    manager.close()
    manager.hook.minisgl_pages_evicted(step=4, pages=None)
    assert [(each.pages, each.events) for each in made] == [(7, [2, "closed"]), (7, [3, "closed"])]


def test_observer_without_hooks_is_refused(write: Write) -> None:
    body = "from minisgl import hookimpl\n\n@hookimpl\ndef minisgl_observer():\n    return 3\n"
    manager = PluginManager.load([str(write(body))])
    with pytest.raises(ConfigError, match="The observer int, which a minisgl_observer hook returned, has no method"):
        manager.observe(Config(), EngineSpec(4, 7, 1, 8, 9))


# ---- worker processes --------------------------------------------------------------------------------


def _child(data: bytes, pickled: Callable[[], bytes] | bytes) -> tuple[Any, ...]:
    """Load the plugins and decode the config, as a worker process of the server does. Runs in a spawned process."""
    manager = PluginManager.load(plugins_of(data))
    config = decode_config(data, manager)
    made = tuple(manager.build("cache", config.cache, page_size=config.page_size))
    assert isinstance(pickled, bytes)
    return config, made, type(pickle.loads(pickled)) is type(config.cache)


def test_plugin_file_in_spawned_process(mine: Path) -> None:
    words = ["cache=mine", "cache.max_nodes=7", "cache.colour=BLUE", "cache.where=/var", "cache.sizes=[1,2]"]
    manager = PluginManager.load([str(mine)])
    config = compose(manager, [*words, "cache.inner.depth=5", "tp=2", "num_pages=9", "server.port=0"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        back, made, same_class = pool.apply(_child, (encode_config(config, manager), pickle.dumps(config.cache)))
    assert back == config
    assert made == ("mine", 16, 7)
    assert same_class


def test_encoded_config(mine: Path) -> None:
    """An encoded config contains no pickled classes, and can't be decoded without the plugin of its options."""
    manager = PluginManager.load([str(mine)])
    data = encode_config(compose(manager, ["cache=mine"]), manager)
    assert plugins_of(data) == [str(mine)]
    assert b"__main__" not in data
    assert b"minisgl_plugin" not in data
    with pytest.raises(ConfigError, match="cache=mine: there is no such cache"):
        decode_config(data, PluginManager.load())


def test_encode_config_built_in_python() -> None:
    manager = PluginManager.load()
    config = Config(model="x", cache=manager.make("cache", "naive"), num_pages=3)
    assert decode_config(encode_config(config, manager), manager) == config

    class Unregistered:
        pass

    with pytest.raises(ConfigError, match="cache=Unregistered: there is no such cache"):
        encode_config(Config(cache=Unregistered()), manager)


# ---- python -m minisgl.plugins ------------------------------------------------------------------------


def test_plugins_command(mine: Path, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], None]) -> None:
    main([str(mine)])
    shown = capsys.readouterr().out
    main([str(mine), "--json"])
    rows = json.loads(capsys.readouterr().out)
    manager = PluginManager.load()
    manager.load_all()
    assert len(rows) == len(manager.plugins) + 1
    row = rows[-1]
    assert row["path"] == str(mine)
    assert row["source"] == "file"
    assert row["hooks"] == ["minisgl_configs", "minisgl_metrics", "minisgl_request_added"]
    assert row["options"]["cache=mine"]["cache.max_nodes"] == "10000"
    assert row["sha256"] == hashlib.sha256(mine.read_bytes()).hexdigest()
    assert row["sha256"][:12] in shown
    assert "cache.inner.depth=3" in shown


def test_plugins_command_error(external: None, tmp_path: Path, main: Callable[[list[str]], None]) -> None:
    command = [sys.executable, "-m", "minisgl.plugins", "gone.py"]
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert failed.returncode == 2
    assert failed.stderr.startswith("minisgl.plugins: plugins=gone.py: there is no such file")
    assert failed.stderr.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["--jsn"])
