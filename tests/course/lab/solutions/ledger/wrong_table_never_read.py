# causes: misses-table
"""Only what the hooks about pages say; what a step carries is not looked at."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        self.launched = step.id
