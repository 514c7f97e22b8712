# causes: stale-row, false-alarm, retraction
# gate: steps
"""This auditor does not clear the page table of a request-pool row when another request is admitted to the row.

The new request then seems to read the pages of the row's previous request.
"""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(row, {})[column] = page
        for req, row in zip(reqs, step.req_pool_indices.tolist(), strict=True):
            for page in self.table.get(row, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}, {self.whose(page)}", req.uid, page)
        self.launched = step.id
