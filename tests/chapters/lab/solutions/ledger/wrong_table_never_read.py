# causes: misses-table
# gate: steps
"""This auditor ignores the page-table updates of steps, so it does not see that a row reads a retired page."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        self.launched = step.id
