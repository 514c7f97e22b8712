# causes: misses-table, stale-row
# gate: steps
"""Row and column are one number with room for 1,024 columns: the table of a longer request runs into the next row."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        admitted = {admission.req_pool_idx for admission in step.admissions}
        self.table = {at: page for at, page in self.table.items() if at // 1024 not in admitted}
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table[row * 1024 + column] = page
        for req, row in zip(reqs, step.req_pool_indices.tolist(), strict=True):
            for page in [page for at, page in self.table.items() if at // 1024 == row]:
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}", req.uid, page)
        self.launched = step.id
