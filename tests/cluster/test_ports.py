"""Free ports are not those that the system gives to other sockets."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from minisgl.cluster import process as ports
from minisgl.cluster.process import free_port


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says which ports it chooses")
def test_port_is_below_those_of_the_system() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest <= ports.FIRST:
        pytest.skip("the system chooses nearly all ports")
    found = {free_port() for _ in range(20)}
    assert len(found) > 10
    assert all(ports.FIRST <= port < lowest for port in found)


def test_port_can_be_bound() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()


def test_used_ports_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "FIRST", port)
        monkeypatch.setattr(ports, "_first_ephemeral", lambda: port + 1)
        with pytest.raises(OSError, match="no free port"):
            free_port()


def test_system_that_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_first_ephemeral", lambda: 0)
    assert free_port() > 0
