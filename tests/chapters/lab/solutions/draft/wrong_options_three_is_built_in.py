# causes: missed, match, latest, itself
# gate: index
"""This text has groups of three tokens, whatever the option says."""


class MyProposer:
    def new_text(self):
        return Text(3)
