# causes: leak
# gate: conformance
"""This proposer keeps the texts of removed requests."""


class MyProposer:
    def removed(self, req):
        pass
