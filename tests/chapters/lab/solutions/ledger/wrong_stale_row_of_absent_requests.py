# causes: stale-row
# gate: steps
"""Updates of rows that have no row in the step are dropped."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        present = set(step.req_pool_indices.tolist())
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            if row in present:
                self.table.setdefault(row, {})[column] = page
        for req, row in zip(reqs, step.req_pool_indices.tolist(), strict=True):
            for page in self.table.get(row, {}).values():
                if self.owner.get(page) not in (req.uid, -1):
                    self.find("table", f"request {req.uid} reads page {page}", req.uid, page)
        self.launched = step.id
