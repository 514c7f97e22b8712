# causes: scan
# gate: cost
"""This proposer builds the text anew in each turn."""


class MyProposer:
    def advanced(self, reqs, tokens):
        for req in reqs:
            self.admitted(req)
