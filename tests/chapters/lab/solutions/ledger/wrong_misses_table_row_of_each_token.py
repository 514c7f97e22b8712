# causes: raises, misses-table, false-alarm
# gate: steps
"""Rows are counted by their tokens: right as long as every row computes one token."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(row, {})[column] = page
        for i in range(len(step.input_ids)):
            req, row = reqs[i], int(step.req_pool_indices[i])
            for page in self.table.get(row, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}", req.uid, page)
        self.launched = step.id
