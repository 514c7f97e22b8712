"""The options of a cluster: its own, those of its servers, and the parts of the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.cluster import options
from minisgl.cluster.cli import main
from minisgl.cluster.options import ClusterConfig, Share, replica_words, shares
from minisgl.config import ConfigError
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager
from minisgl.plugins.command.describe import core_options
from minisgl.plugins.command.listing import default_text
from minisgl.plugins.routing.round_robin import RoundRobin
from minisgl.server.cli import main as server_main


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return PluginManager.load(light=True)


def composed(manager: PluginManager, *words: str) -> ClusterConfig:
    return compose(manager, words, ClusterConfig)


def test_the_options_of_both(manager: PluginManager) -> None:
    config = composed(manager, "replicas=3", "tp=2", "routing=round_robin", "server.port=5", "restart_limit=2")
    assert (config.replicas, config.tp, config.server.port, config.restart_limit) == (3, 2, 5, 2)
    assert isinstance(config.routing, RoundRobin)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("replicas=0", "replicas must be at least 1"),
        ("replicas=two", "replicas must be a whole number"),
        ("replica=2", "Did you mean replicas?"),
        ("restart_limit=0", "restart_limit must be at least 1"),
        ("health_timeout=0", "health_timeout must be a number of seconds above 0"),
        ("status_port=70000", "status_port must be between"),
        ("kv_events.endpoint=tcp://127.0.0.1:1", "the replicas can't share an address"),
        ("router=other", "there is no such router"),
        ("page_size=0", "page_size must be at least 1"),
    ],
)
def test_a_wrong_option_is_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("minisgl.cluster: ") and message in line


@pytest.mark.parametrize("word", ["router=exact", "routing=round_robin", "routing.max_load=2", "replicas=2"])
def test_a_server_has_no_router(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        server_main([word])
    assert caught.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "python -m minisgl.cluster" in text
    for word in ("replicas=2", "router=exact", "routing=cache_aware", "server.port=1919", "restart_limit=5"):
        assert word in text


def test_words_of_a_replica(manager: PluginManager) -> None:
    words = ["replicas=2", "router=exact", "routing=cache_aware", "routing.max_load=2", "model=tutor", "tp=2"]
    words += ["server.port=80", "server.host=0.0.0.0", "server.api_key=k", "trace=/tmp/run.jsonl", "status_port=3"]
    assert replica_words(words, composed(manager, *words), 1) == [
        "model=tutor",
        "tp=2",
        "server.api_key=k",
        "trace=/tmp/run-1.jsonl",
        "server.host=127.0.0.1",
        "server.port=0",
    ]


def use(monkeypatch: pytest.MonkeyPatch, cores: Sequence[int], gpus: Sequence[str]) -> None:
    monkeypatch.setattr(options, "_cores", lambda: list(cores))
    monkeypatch.setattr(options, "visible_gpus", lambda: list(gpus))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_cores_are_divided(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, range(5), [])
    parts = shares(composed(manager, "replicas=2", "device=cpu"))
    assert [part.cores for part in parts] == [(0, 1), (2, 3, 4)]
    assert [part.environment() for part in parts] == [{"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "3"}]
    assert parts[0].text == "cores 0,1"
    parts = shares(composed(manager, "replicas=7"))
    assert [part.cores for part in parts] == [(0,), (1,), (2,), (3,), (4,), (0,), (1,)]


def test_gpus_are_divided(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, range(8), ["0", "1", "2", "5"])
    parts = shares(composed(manager, "replicas=2", "tp=2"))
    assert [part.environment() for part in parts] == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,5"}]
    assert parts[1] == Share((4, 5, 6, 7), ("2", "5"))
    with pytest.raises(ConfigError, match="replicas=3 tp=2: they need 6 GPUs, and torch finds 4"):
        shares(composed(manager, "replicas=3", "tp=2"))
    assert shares(composed(manager, "replicas=3", "tp=2", "device=cpu"))[0].gpus is None


def test_no_gpu(manager: PluginManager, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, range(2), [])
    assert shares(composed(manager))[0].gpus is None
    with pytest.raises(ConfigError, match="torch finds 0"):
        shares(composed(manager, "device=cuda"))


def test_names_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the environment, as far as torch finds them."""
    monkeypatch.setattr(
        options.subprocess, "run", lambda *_, **__: type("Done", (), {"returncode": 0, "stdout": "2\n"})
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, 3,7")
    assert options.visible_gpus() == ["GPU-a", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert options.visible_gpus() == ["0", "1"]


def test_own_cores_are_those_of_this_process() -> None:
    assert set(options._cores()) <= set(range(os.cpu_count() or 1))


def test_the_page_has_the_options() -> None:
    """Each option of a cluster is in the table of the documentation, with its default."""
    page = (Path(__file__).parents[2] / "docs" / "operation" / "cluster.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\S+)` \|", page, re.MULTILINE))
    defaults = {option.key: default_text(option) for option in core_options(ClusterConfig)}
    assert rows == {name: defaults[name] for name in options.OWN_OPTIONS} | {"router": "auto", "routing": "cache_aware"}
