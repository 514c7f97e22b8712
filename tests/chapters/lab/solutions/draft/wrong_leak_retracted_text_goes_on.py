# causes: leak
# gate: turn
"""A retracted request keeps its text, and all its tokens are appended to it when it runs again."""


class MyProposer:
    def admitted(self, req):
        self.texts.setdefault(req.uid, self.new_text()).append(req.tokens().tolist())

    def removed(self, req):
        if req.finish_reason is not None:
            del self.texts[req.uid]
