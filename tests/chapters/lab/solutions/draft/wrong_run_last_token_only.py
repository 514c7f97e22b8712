# causes: run, wrong, missed
# gate: turn
"""This proposer appends the last of the tokens that a request gained."""


class MyProposer:
    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens):
            self.texts[req.uid].append(run[-1:])
