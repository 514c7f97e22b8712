"""Care for plugins that are not built in: checks with advice, counts of calls, printed hook calls, plugins for 0.2.

`minisgl.plugin_manager.manager` loads `checking` when it meets the first such plugin. Without this folder, plugins work
as they are, and pluggy's own errors are all that a mistake in them gives.
"""
