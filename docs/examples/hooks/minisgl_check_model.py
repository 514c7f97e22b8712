"""Refuse checkpoints of models that a licence does not allow here, by their ``model_type``."""

from minisgl import hookimpl
from minisgl.config import ConfigError

FORBIDDEN = {"qwen3"}


@hookimpl
def minisgl_check_model(config):
    if config.raw.get("model_type") in FORBIDDEN:
        raise ConfigError("this machine must not serve models of this type")
