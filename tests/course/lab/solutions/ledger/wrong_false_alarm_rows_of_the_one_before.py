# causes: false-alarm, hang-up, retraction, evicted, shared
"""The table is never cleared: who takes a slot inherits the pages of whoever sat there before."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        for slot, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(slot, {})[column] = page
        for req, slot in zip(reqs, step.req_pool_indices.tolist(), strict=True):
            for page in self.table.get(slot, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}, {self.whose(page)}", req.uid, page)
        self.launched = step.id
