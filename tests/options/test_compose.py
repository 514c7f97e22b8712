"""`compose`: options, choices of groups and presets, the error messages, and that Hydra's state stays unchanged."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import OmegaConf

from minisgl.config import GROUPS, Config, ConfigError, ServerConfig
from minisgl.options.compose import compose, run_cli, split_plugins
from minisgl.plugin_manager.discovery import exists
from minisgl.plugin_manager.manager import BUILT_IN, PluginManager

from .own_cache import PLUGIN, refused, write_plugin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_plugin(tmp_path_factory.mktemp("plugins"))


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load(light=True)


@pytest.fixture(scope="module")
def mine(plugin: str) -> PluginManager:
    return PluginManager.load([plugin], light=True)


def test_defaults(manager: PluginManager) -> None:
    """Without overrides, every group has its default choice and every option its dataclass's default value."""
    config = compose(manager)
    names = {group: manager.name_of(group, getattr(config, group)) for group in GROUPS}
    written = OmegaConf.load(ROOT / "conf" / "config.yaml").defaults
    default = {key.split()[-1]: name for entry in written if not isinstance(entry, str) for key, name in entry.items()}
    assert names == {
        g: name if exists(f"{BUILT_IN}.{g}.{name}") else "null" for g in GROUPS for name in [default.get(g)]
    }
    assert (names["cache"], names["scheduler"]) == ("radix", "prefill_first")
    plain = Config(**{group: getattr(config, group) for group in GROUPS})
    assert config == plain
    assert type(config) is Config
    assert type(config.server) is type(Config().server)
    assert type(config.cache) is manager.schema("cache", "radix")


def test_sections_without_their_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server then has the options of the core, and a section that only a plugin reads is None."""
    missing = dict.fromkeys(("server", "kv_events", "multi_node"), ("missing.options", "Options"))
    monkeypatch.setattr("minisgl.config.SECTIONS", missing)
    config = Config()
    assert (type(config.server), config.kv_events, config.multi_node) == (ServerConfig, None, None)
    config.check()
    with pytest.raises(ConfigError, match=r"server\.port=-1: server\.port must be between 0"):
        Config(server=ServerConfig(port=-1)).check()


def test_overrides(manager: PluginManager) -> None:
    config = compose(
        manager, ["tp=2", "num_pages=64", "cache=naive", "scheduler=mixed", "scheduler.order=lpm", "++seed=3"]
    )
    assert (config.tp, config.num_pages, config.seed) == (2, 64, 3)
    assert type(config.cache) is manager.schema("cache", "naive")
    assert config.scheduler.order == "lpm"
    assert compose(manager, ["server.port=0", "server.api_key=k", "overlap=off"]).server.port == 0


def test_hydra_composes_the_same_words_once(
    manager: PluginManager, mine: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second config equals the first and shares nothing with it. Other plugins, words or values are composed."""
    words = ["cache.max_nodes=34", "cache=mine", "cache.path=a", "cache.sizes=[1]"]
    composed: list[Sequence[str]] = []

    def count(name: str, overrides: list[str]) -> Any:
        composed.append(overrides)
        return original(name, overrides)

    original = hydra.compose
    monkeypatch.setattr(hydra, "compose", count)
    monkeypatch.setenv("MINISGL_TEST_PATH", "one")
    first, second = compose(mine, words), compose(mine, words)
    assert first == second and len(composed) == 1
    assert first.cache is not second.cache and first.server is not second.server
    first.cache.sizes.append(2)
    assert second.cache.sizes == compose(mine, words).cache.sizes == [1]
    assert compose(mine, [*words, "tp=2"]).tp == 2 and len(composed) == 2
    from_environment = [*words, "cache.path=${oc.env:MINISGL_TEST_PATH}"]
    assert compose(mine, from_environment).cache.path == "one"
    monkeypatch.setenv("MINISGL_TEST_PATH", "two")
    assert compose(mine, from_environment).cache.path == "two"
    with pytest.raises(ConfigError, match="mine"):
        compose(manager, words)


def test_null(manager: PluginManager) -> None:
    """``null`` is None for an optional option, and ``'null'`` in quotes is a text."""
    config = compose(manager, ["server.api_key=null", "num_pages=null", "model='null'"])
    assert config.server.api_key is None
    assert config.num_pages is None
    assert config.model == "null"


def test_value_types_of_plugin_options(mine: PluginManager) -> None:
    words = ["cache=mine", "cache.path=/x", "cache.ratio=inf", "cache.colour=BLUE", "cache.sizes=[1,2]"]
    cache = compose(mine, words).cache
    assert (cache.path, cache.ratio, cache.colour.name, cache.sizes) == ("/x", math.inf, "BLUE", [1, 2])


def test_unsupported_field_type(plugin: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(PLUGIN.replace("max_nodes: int = 10_000", "call: __import__('typing').Callable = print"))
    manager = PluginManager.load([str(path)], light=True)
    assert "cache=mine: the fields of Mine can't be options" in refused(manager, "cache=mine")


# ---- plugins= ----------------------------------------------------------------------------------------


def test_plugins_are_loaded_first(plugin: str) -> None:
    """A ``plugins=`` argument is read before the other arguments, wherever it is on the command line."""
    assert split_plugins(["a=1", "plugins=[x.py, 'y.py']", "plugins=z"]) == (["x.py", "y.py", "z"], ["a=1"])
    assert split_plugins(["plugins=/a b/x=1.py"]) == (["/a b/x=1.py"], [])
    config = compose(PluginManager.load(light=True), ["cache.path=p", "cache=mine", f"plugins={plugin}"])
    assert config.plugins == [plugin]
    assert config.cache.max_nodes == 10_000


def test_two_managers_have_separate_options(manager: PluginManager, mine: PluginManager) -> None:
    assert compose(mine, ["cache=mine", "cache.path=x"]).cache.path == "x"
    assert "there is no such cache" in refused(manager, "cache=mine")
    assert compose(mine, ["cache=mine", "cache.path=y"]).cache.path == "y"


def test_hydra_state_is_unchanged(manager: PluginManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that uses Hydra itself finds its own configs and its running Hydra after `compose`."""
    from hydra import compose as hydra_compose
    from hydra import initialize
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    store = ConfigStore.instance()
    store.store(name="config", node={"defaults": [{"cache": "theirs"}, "_self_"], "tp": "theirs"})
    store.store(group="cache", name="theirs", node={"x": 1})
    try:
        with initialize(version_base=None, config_path=None):
            running = GlobalHydra.instance().hydra
            assert compose(manager, ["tp=2", "cache=naive"]).tp == 2
            refused(manager, "tp=two")
            assert "there is no such cache" in refused(manager, "cache=theirs")
            assert GlobalHydra.instance().hydra is running
            assert hydra_compose("config") == {"cache": {"x": 1}, "tp": "theirs"}
    finally:
        del store.repo["config.yaml"], store.repo["cache"]
    assert list(tmp_path.iterdir()) == []
    assert Path.cwd() == tmp_path


# ---- presets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [f"{kind}='{path.stem}'" for kind in ("experiment", "stage") for path in (ROOT / "conf" / kind).glob("*.yaml")],
)
def test_presets_compose_and_can_be_overridden(manager: PluginManager, word: str) -> None:
    plain, preset = compose(manager), compose(manager, [word])
    assert preset != plain
    config = compose(manager, [word, "cache=naive", "scheduler=static", "max_running_requests=3"])
    assert type(config.cache) is manager.schema("cache", "naive")
    assert type(config.scheduler) is manager.schema("scheduler", "static")
    assert config.max_running_requests == 3


def test_stage_with_own_plugin(mine: PluginManager) -> None:
    assert compose(mine, ["stage='6'", "cache=mine", "cache.path=x"]).cache.path == "x"


def test_each_stage_adds_one_feature(manager: PluginManager) -> None:
    """Consecutive stages differ only in the options of one feature, and all stages have the same KV capacity."""

    def flat(config: Config) -> dict[str, object]:
        found = {f"{g}={manager.name_of(g, getattr(config, g))}": True for g in GROUPS}
        order = getattr(config.scheduler, "order", "fcfs")
        return found | {k: v for k, v in vars(config).items() if k not in GROUPS} | {"order": order}

    stages = [flat(compose(manager, [f"stage='{n}'"])) for n in range(1, 8)]
    changed = [{k for k in a.keys() | b.keys() if a.get(k) != b.get(k)} for a, b in pairwise(stages)]
    graphs = {f"graph={name}" for name in ("none", "simulated") if exists(f"{BUILT_IN}.graph.{name}")}
    assert changed == [
        {"max_running_requests"},
        {"scheduler=static", "scheduler=prefill_first"},
        {"page_size", "num_pages"},
        {"cache=naive", "cache=radix", "order"},
        {"scheduler=prefill_first", "scheduler=mixed", "max_prefill_tokens"},
        {"overlap"} | graphs,
    ]
    assert all(s["page_size"] * s["num_pages"] == 8192 for s in stages)  # type: ignore[operator]


# ---- the command line --------------------------------------------------------------------------------


def test_run_cli(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["tp=2", "cache=naive"])[0].tp == 2
    for words, status in ((["tp=0"], 2), (["cache=rad"], 2), (["--version"], 0)):
        with pytest.raises(SystemExit) as ended:
            run_cli(words)
        assert ended.value.code == status
    printed = capsys.readouterr()
    assert printed.err.startswith("minisgl: tp=0: tp must be at least 1.\nminisgl: cache=rad: there is no such cache.")
    assert printed.out.startswith("minisgl 0.")


def test_compose_imports_no_torch_and_writes_no_files(tmp_path: Path) -> None:
    code = """
        import logging, sys
        from minisgl.options.compose import run_cli
        handlers = list(logging.getLogger().handlers)
        run_cli(["stage='3'", "server.port=0"])
        assert logging.getLogger().handlers == handlers
        assert "torch._C" not in sys.modules
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert os.listdir(tmp_path) == []
