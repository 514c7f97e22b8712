# causes: lacks-method
# gate: match
REPLACED = [
    ("    def check(self) -> None:", "    def checks(self) -> None:"),
]
