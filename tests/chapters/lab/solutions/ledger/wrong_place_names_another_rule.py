# causes: place
# gate: steps
"""This auditor finds every bug, but reports all of them under the rule `owner`."""


class MyAuditor:
    def find(self, rule, text, uid=None, page=None):
        self.findings.append(Finding("owner", self.launched, uid, page, text))
