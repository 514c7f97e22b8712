"""``--cfg job``: prints the composed options as YAML, with the choice of each group as a comment."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from minisgl.config import GROUPS, Config, ConfigError
from minisgl.options.compose import compose
from minisgl.plugin_manager.manager import PluginManager


def run(words: Sequence[str], kind: type[Config], usage: str) -> None:
    """Print the options that the other words describe."""
    flag = next(flag for flag in ("--cfg", "-c") if flag in words)
    at = words.index(flag)
    if list(words[at + 1 : at + 2]) != ["job"]:
        raise ConfigError(f"{flag}: write {flag} job.")
    print(as_yaml(PluginManager.load(light=True), [*words[:at], *words[at + 2 :]], kind), end="")


def as_yaml(manager: PluginManager, overrides: Sequence[str], kind: type[Config] = Config) -> str:
    """Return the composed config as YAML, with each group's choice as a comment."""
    config = compose(manager, overrides, kind)
    choices = {group: manager.name_of(group, getattr(config, group)) for group in GROUPS}
    lines = []
    for line in OmegaConf.to_yaml(OmegaConf.structured(config)).splitlines():
        group = line.partition(":")[0]
        lines.append(f"{line}  # {group}={choices[group]}" if group in choices else line)
    return "\n".join(lines) + "\n"
