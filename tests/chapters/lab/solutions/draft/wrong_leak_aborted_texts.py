# causes: leak
# gate: turn
"""The text of a request whose client hangs up is kept."""


class MyProposer(DraftProposer):
    def removed(self, req: Req) -> None:
        if req.finish_reason != "abort":
            del self.texts[req.uid]
