"""Build the shipped plugin in the factory."""

from minisgl.plugin_manager.manager import PluginManager


def make_policy(order):
    manager = PluginManager.load()
    config = manager.make("scheduler", "mixed")
    config.order = order
    return manager.build("scheduler", config)
