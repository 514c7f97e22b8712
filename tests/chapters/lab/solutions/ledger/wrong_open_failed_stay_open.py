# causes: open
# gate: requests
"""."""

CACHE = -1


class MyAuditor:
    def move(self, pages: I32, old: int, new: int | None) -> None:
        for page in pages.tolist():
            if self.owner.get(page) != old:
                actor = "the cache evicted" if old == CACHE else f"request {old} transferred or retired"
                self.find(
                    "owner", f"{actor} page {page}, which is {self.whose(page)}", None if old == CACHE else old, page
                )
            if new is None:
                self.owner.pop(page, None)
                if old != CACHE:
                    self.until[page] = self.launched
            else:
                self.owner[page] = new

    @hookimpl
    def minisgl_pages_allocated(self, owners: I32, pages: I32) -> None:
        for uid, page in zip(owners.tolist(), pages.tolist(), strict=True):
            if page in self.owner:
                self.find("owner", f"page {page} was allocated to request {uid}, but is {self.whose(page)}", uid, page)
            elif self.until.get(page, -1) > self.read:
                self.find("in-flight", f"step {self.until[page]} is unread and may touch page {page}", uid, page)
            self.owner[page] = uid
            self.until.pop(page, None)

    @hookimpl
    def minisgl_batch_scheduled(self, step: Step, reqs: Sequence[Req]) -> None:
        self.launched = step.id
        for admission in step.admissions:
            self.table[admission.req_pool_idx] = {}
        for row, column, page in zip(*(part.tolist() for part in step.page_table_updates), strict=True):
            self.table.setdefault(row, {})[column] = page
        for row, req in zip(step.req_pool_indices.tolist(), reqs, strict=True):
            for column, page in self.table.get(row, {}).items():
                if self.owner.get(page) not in (req.uid, CACHE):
                    text = f"column {column} of request {req.uid} names page {page}, which is {self.whose(page)}"
                    self.find("table", text, req.uid, page)

    @hookimpl
    def minisgl_request_finished(self, req: Req) -> None:
        if req.finish_reason == "error":
            return
        if req.uid in self.open:
            self.open.remove(req.uid)
        else:
            self.find("reply", f"request {req.uid} is not open and got a final reply", req.uid)
        self.leave(req)

    def leave(self, req: Req) -> None:
        for page, owner in self.owner.items():
            if owner == req.uid:
                self.find("leak", f"request {req.uid} still owns page {page}", req.uid, page)
