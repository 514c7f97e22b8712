# causes: last-step
# gate: steps
"""This auditor reports step 0 for every bug."""


class MyAuditor:
    def find(self, rule, text, uid=None, page=None):
        self.findings.append(Finding(rule, 0, uid, page, text))
