# causes: misses-table
# gate: steps
"""Only rows whose page table was updated in this step are checked."""


class MyAuditor:
    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        self.launched = step.id
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(row, {})[column] = page
        updated = set(step.page_table_updates[0].tolist())
        for row, req in zip(step.req_pool_indices.tolist(), reqs, strict=True):
            for column, page in self.table.get(row, {}).items() if row in updated else ():
                if self.owner.get(page) not in (req.uid, CACHE):
                    text = f"column {column} of request {req.uid} names page {page}, which is {self.whose(page)}"
                    self.find("table", text, req.uid, page)
