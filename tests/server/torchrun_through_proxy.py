"""``python -m minisgl`` for tests: a rank above 0 connects to rank 0 through a proxy in its own process.

Commands for the proxy come from the file ``proxy`` beside the secret: ``cut DIRECTION …``, ``delay SECONDS``,
``lose DIRECTION NUMBER``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from minisgl.cluster.multi_node import follower_process
from minisgl.cluster.multi_node.torchrun import Place
from minisgl.server.cli import main
from minisgl.testing.proxy import Proxy

find = follower_process.rank0_address


def through_proxy(place: Place, seconds: float) -> str:
    proxy = Proxy(find(place, seconds))
    secret = next(word.partition("=")[2] for word in sys.argv if word.startswith("multi_node.secret_file="))
    threading.Thread(target=obey, args=(proxy, Path(secret).with_name("proxy")), daemon=True).start()
    return proxy.address


def obey(proxy: Proxy, commands: Path) -> None:
    while True:
        time.sleep(0.05)
        if commands.exists():
            name, *words = commands.read_text().split()
            commands.unlink()
            if name == "cut":
                proxy.cut(words)  # type: ignore[arg-type]
            elif name == "delay":
                proxy.delay = float(words[0])
            else:
                proxy.lose[words[0]] = int(words[1])  # type: ignore[index]


follower_process.rank0_address = through_proxy

if __name__ == "__main__":
    raise SystemExit(main())
