# causes: misses-table, stale-row
# gate: steps
"""The updates of a step are sorted, so of two updates of one column the larger page counts."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        self.launched = step.id
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        for row, column, page in sorted(zip(*(part.tolist() for part in step.page_table_updates), strict=True)):
            self.table.setdefault(row, {})[column] = page
        for row, req in zip(step.req_pool_indices.tolist(), reqs, strict=True):
            for page in self.table.get(row, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}", req.uid, page)
