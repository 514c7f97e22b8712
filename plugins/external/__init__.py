"""Care for plugins that are not built in: their import, checks with advice, counts of calls, printed hook calls, 0.2.

`minisgl.plugin_manager.manager` loads `checking` when it meets the first such plugin. Without this folder, there are
only the built-in plugins. `lazy` lets processes that compute nothing import plugins without torch; without it, they
import torch too.
"""
