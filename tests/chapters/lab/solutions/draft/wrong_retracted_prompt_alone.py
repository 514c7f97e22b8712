# causes: retracted, missed, wrong
# gate: turn
"""This proposer forgets the output of a request that runs again."""


class MyProposer:
    def admitted(self, req):
        self.texts[req.uid] = self.new_text()
        self.texts[req.uid].append(req.prompt_ids.tolist())
