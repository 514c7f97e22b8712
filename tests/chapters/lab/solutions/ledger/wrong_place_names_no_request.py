# causes: place
# gate: pages
"""This auditor names the page of every bug and never the request."""


class MyAuditor:
    def find(self, rule, text, uid=None, page=None):
        self.findings.append(Finding(rule, self.launched, uid if page is None else None, page, text))
