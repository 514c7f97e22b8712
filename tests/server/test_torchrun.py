"""The place of a process in torchrun's environment, and the options that belong to it. No process is started."""

from __future__ import annotations

import os
import socket
from typing import Any

import msgspec
import pytest
import torch

from minisgl.cluster.multi_node.same_options import check_same_options, check_same_plugins, plugin_hashes
from minisgl.cluster.multi_node.torchrun import Place, address_of, fit_config, read_place, use_interface
from minisgl.config import Config, ConfigError
from minisgl.engine.setup import resolve_device
from minisgl.options.compose import compose
from minisgl.plugin_manager.encoding import encode_config
from minisgl.plugin_manager.manager import PluginManager

ENVIRONMENT = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
PLACE = Place(5, 8, 1, 4, "10.0.0.1", 29500, True)
NODES = ["multi_node.secret_file=/run/secret", "multi_node.interface=eth0"]


def config_of(*words: str) -> Config:
    return compose(PluginManager.load(light=True), words)


def test_place() -> None:
    assert read_place(ENVIRONMENT) == PLACE


def test_without_torchrun() -> None:
    """Variables that other launchers set are no reason to wait for other ranks."""
    assert read_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}) is None
    config = config_of("tp=2")
    fit_config(config, ["tp=2"], None)
    assert config.tp == 2
    with pytest.raises(ConfigError, match="torchrun"):
        fit_config(config_of(NODES[0]), NODES[:1], None)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", [None, "", "one", "-1"])
def test_missing_variables(name: str, value: str | None) -> None:
    environment = (
        ENVIRONMENT | {name: value} if value is not None else {k: v for k, v in ENVIRONMENT.items() if k != name}
    )
    with pytest.raises(ConfigError, match=name):
        read_place(environment)  # type: ignore[arg-type]


def test_restarts_are_refused() -> None:
    with pytest.raises(ConfigError, match="--max-restarts=3"):
        read_place(ENVIRONMENT | {"TORCHELASTIC_MAX_RESTARTS": "3"})


def test_tp() -> None:
    """``tp`` becomes the number of ranks. The same number may be given, another one is an error of one line."""
    for words in (NODES, [*NODES, "tp=8"], ["+tp=8", *NODES]):
        config = config_of(*words)
        fit_config(config, words, PLACE)
        assert config.tp == 8
    for tp in (1, 2, 16):
        words = [*NODES, f"tp={tp}"]
        with pytest.raises(ConfigError, match=rf"^tp={tp}, but torchrun starts 8 ranks .*$"):
            fit_config(config_of(*words), words, PLACE)


@pytest.mark.parametrize("missing", [0, 1])
def test_needed_options(missing: int) -> None:
    words = [NODES[1 - missing]]
    with pytest.raises(ConfigError, match=NODES[missing].partition("=")[0]):
        fit_config(config_of(*words), words, PLACE)


def test_one_rank_needs_no_secret() -> None:
    config = config_of()
    fit_config(config, [], Place(0, 1, 0, 1, "127.0.0.1", 29500))
    assert config.tp == 1


@pytest.mark.parametrize(
    "word",
    [
        "multi_node.secret_file=''",
        "multi_node.interface=''",
        "multi_node.listen_port=70000",
        "multi_node.connect_timeout=0",
    ],
)
def test_values_out_of_range(word: str) -> None:
    with pytest.raises(ConfigError, match=word.partition("=")[0]):
        fit_config(config_of(word), [], PLACE)


# ---- the interface -----------------------------------------------------------------------------------


def test_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name gives its address, and is set for gloo and NCCL, unless the user has set another one."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert use_interface("192.0.2.7") == "192.0.2.7"
    assert address_of("fe80::1") == "fe80::1"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert use_interface(loopback) == "127.0.0.1"
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (loopback, f"={loopback}")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    use_interface(loopback)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0"


def test_unknown_interface() -> None:
    with pytest.raises(ConfigError, match=r"no such network interface. It has: .*lo"):
        address_of("eth99")


# ---- devices ------------------------------------------------------------------------------------------


def test_device_by_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank uses the GPU of its local rank, and only the ranks of its own machine need GPUs there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = Config(tp=8, device="cuda")
    assert resolve_device(config, local_rank=3, local_size=4) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="tp=8 needs 8 GPUs, but torch finds 4"):
        resolve_device(config, 3)
    with pytest.raises(ConfigError, match="tp=8 needs 5 GPUs on this machine, but torch finds 4"):
        resolve_device(config, local_rank=3, local_size=5)


# ---- equal options ------------------------------------------------------------------------------------


def encoded(*words: str) -> bytes:
    manager = PluginManager.load(light=True)
    return encode_config(compose(manager, words), manager)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["page_size=32"], "page_size=32 (rank 0: 16)"),
        (["attention=torch"], "attention=torch (rank 0: auto)"),
        (["communicator=ring", "communicator.timeout=5"], "communicator.timeout=5.0 (rank 0: None)"),
        (["model=other", "seed=1"], "model=other (rank 0: tutor), seed=1 (rank 0: 0)"),
    ],
)
def test_different_options(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_same_options(encoded(*words), encoded())
    assert expected in str(raised.value)


def test_options_that_may_differ() -> None:
    """What an engine does not read may differ: a node's network interface, the server's port, logs."""
    words = ["server.port=0", "log_level=debug", "multi_node.interface=eth1", "multi_node.secret_file=/s", "trace=t"]
    check_same_options(encoded(*words), encoded())


def test_every_option_is_compared() -> None:
    """Each option of an engine counts: a changed value of any of them is found."""
    rank0 = encoded()
    plugins, plain, groups = msgspec.msgpack.decode(rank0)
    compared = plain.keys() - {"server", "kv_events", "multi_node", "trace", "log_level", "log_format", "plugins"}
    assert {"model", "dtype", "quantize", "max_running_requests", "seed", "overlap"} <= compared
    for key in compared:
        changed: dict[str, Any] = plain | {key: "another value"}
        with pytest.raises(ConfigError, match=key):
            check_same_options(msgspec.msgpack.encode([plugins, changed, groups]), rank0)


def test_different_plugins() -> None:
    own = plugin_hashes(PluginManager.load(light=True))
    check_same_plugins(own, dict(own))
    with pytest.raises(ConfigError, match=r"rank 0's: mine.py\."):
        check_same_plugins(own | {"mine.py": "00"}, own | {"mine.py": "01"})
    with pytest.raises(ConfigError, match=r"rank 0's: mine.py\."):
        check_same_plugins(own, own | {"mine.py": "01"})
