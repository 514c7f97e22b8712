# causes: misses-table
# gate: steps
"""Only the rows that decode are checked: a chunk of a prompt reads pages too."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step, reqs):
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(row, {})[column] = page
        decode = step.num_decode
        for req, row in zip(reqs[:decode], step.req_pool_indices[:decode].tolist(), strict=True):
            for page in self.table.get(row, {}).values():
                if self.owner.get(page) not in (req.uid, CACHE):
                    self.find("table", f"request {req.uid} reads page {page}", req.uid, page)
        self.launched = step.id
