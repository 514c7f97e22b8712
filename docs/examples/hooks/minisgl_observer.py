"""Print a warning when running requests own almost all KV pages. Off with `log_level=error`."""

from minisgl import hookimpl


class PoolAlarm:
    def __init__(self, num_pages, threshold=0.9):
        self.limit = int(threshold * num_pages)
        self.num_pages = num_pages
        self.alarms = 0

    @hookimpl
    def minisgl_pages_counted(self, step, free, evictable, retiring):
        in_use = self.num_pages - free - evictable - retiring
        if in_use > self.limit:
            self.alarms += 1
            print(f"step {step}: {in_use} of {self.num_pages} KV pages are in use", flush=True)


@hookimpl
def minisgl_observer(config, spec):
    return None if config.log_level in ("error", "critical") else PoolAlarm(spec.num_pages)
