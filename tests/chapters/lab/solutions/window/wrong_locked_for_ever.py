# causes: locked
# gate: behind
REPLACED = [
    (
        "        self.unlock_later(unlocked)\n",
        "",
    ),
]
