# causes: impure
# gate: rows
"""The options belong to the class: the last policy that was made changes them for all."""


class MyPolicy:
    def __init__(self, interactive: int, step_tokens: int, batch_share: float):
        MyPolicy.interactive, MyPolicy.step_tokens, MyPolicy.batch_share = interactive, step_tokens, batch_share
