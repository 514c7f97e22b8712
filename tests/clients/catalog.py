"""The clients that the tests run: `clients.toml`, and the versions that the files beside it pin."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CLIENTS", "ENVIRONMENTS", "FOLDER", "ROOT", "Client", "table"]

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
"""Where `make check-clients` installs: a virtual environment for each file of ``requirements/``."""
WORKS = {
    "chat": "chat",
    "stream": "streaming",
    "schema": "structured output",
    "tools": "tools",
    "agent": "a whole turn with a tool",
    "streamed_agent": "a streamed turn that the model leads",
    "responses": "the Responses API",
    "schema_by_tool": "structured output by a tool",
    "counted": "counting tokens",
    "loglikelihood": "log-likelihoods",
    "completion": "completions",
    "measured_chat": "measuring chats",
}
"""Case → its name in the table, for the cases that the table names."""


@dataclass(frozen=True)
class Client:
    """One client. ``cases`` are the functions of its script, ``broken`` has the reason of each that fails today."""

    name: str
    package: str
    environment: str
    script: str
    cases: tuple[str, ...]
    point: str
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return _versions(self.environment)[self.package]

    @property
    def command(self) -> list[str]:
        """The first words of the command line that runs the script."""
        interpreter = "node" if self.environment == "node" else str(ENVIRONMENTS / self.environment / "bin" / "python")
        return [interpreter, str(FOLDER / "scripts" / self.script)]

    @property
    def installed(self) -> bool:
        if self.environment == "node":
            return (FOLDER / "node_modules" / self.package).is_dir()
        return any((ENVIRONMENTS / self.environment).glob(f"lib/*/site-packages/{self.package.replace('-', '_')}-*"))

    @property
    def payloads(self) -> Path:
        """The file with the requests that the client sent when `make check-clients` last recorded them."""
        return FOLDER / "payloads" / f"{self.name}.json"


def _versions(environment: str) -> dict[str, str]:
    if environment == "node":
        return json.loads((FOLDER / "package.json").read_text())["dependencies"]
    text = (FOLDER / "requirements" / f"{environment}.txt").read_text()
    return dict(re.findall(r"^([\w-]+)(?:\[.+\])?==(\S+)$", text, re.MULTILINE))


def _read() -> Iterator[Client]:
    for name, given in tomllib.loads((FOLDER / "clients.toml").read_text()).items():
        script = given.pop("script", f"ask_{name.replace('-', '_')}.py")
        given = {"package": name, "environment": "common", **given, "cases": tuple(given["cases"])}
        yield Client(name=name, script=script, **given)


CLIENTS = {client.name: client for client in _read()}


def table() -> str:
    """Return the table of `docs/clients.md`."""
    rows = ["| client | tested version | works | how to point it at minisgl |", "| --- | --- | --- | --- |"]
    for client in CLIENTS.values():
        works = ", ".join(WORKS[case] for case in client.cases if case in WORKS and case not in client.broken)
        package = f"{'npm' if client.environment == 'node' else 'PyPI'}: `{client.package}` {client.version}"
        rows.append(f"| {client.name} | {package} | {works} | `{client.point}` |")
    return "\n".join(rows)
