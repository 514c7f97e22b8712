"""Build the shipped plugin in the factory."""

from minisgl.plugin_manager.manager import PluginManager


def make_policy():
    manager = PluginManager.load()
    return manager.build("scheduler", manager.make("scheduler", "mixed"))
