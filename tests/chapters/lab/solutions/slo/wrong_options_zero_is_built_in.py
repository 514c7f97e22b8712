# causes: limit, small, share, urgent, idle, overtakes
# gate: rows
"""The option `interactive` is ignored: priorities up to 0 are interactive."""


class MyPolicy:
    def is_interactive(self, request):
        return request.priority <= 0
