# causes: missed, run, latest
# gate: turn
"""This proposer indexes the prompt only."""


class MyProposer:
    def advanced(self, reqs, tokens):
        for req, run in zip(reqs, tokens):
            self.texts[req.uid].tokens.extend(run)
