"""KV groups: layers with a window have their own pages, and free those behind it: docs/design/kv-groups.md.

`cache=groups` selects them. The core knows a group's columns of the page table (`minisgl.core.KVGroup`). What depends
on a window is in `plugins/cache/groups.py`: which pages are read, where a prefix is valid, what becomes free. Here is:

- `tree`: the tree of the prefix cache, which knows for each page of tokens a page of each group, or none;
- `table`: which columns of a group each running request has;
- `manager`: the `CacheManager` that allocates, frees and caches pages by group;
- `layers`: which layers form a group;
- `attention`: an attention backend for each group;
- `options`: which options of the engine go with it.
"""
