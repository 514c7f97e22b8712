# causes: few
# gate: rows
"""This policy also keeps tokens for batch prompts that are left out for their prefix."""

REPLACED = [
    (
        "        tokens = self.prompt_tokens(is_open, len(rows), budget)",
        "        tokens = self.prompt_tokens(is_open, len(rows), budget)\n"
        "        left_out = [w for w in islice(waiting, budget.rows + AHEAD) if w.same_prefix_req is not None]\n"
        "        left_out = [w for w in left_out if budget.rows and not self.is_interactive(w)]",
    ),
    (
        "self.kept_tokens(tokens, batch)",
        "self.kept_tokens(tokens, batch + left_out)",
    ),
]
