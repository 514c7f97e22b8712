# causes: forgets
# gate: plan
"""At most 128 partly computed prompts get tokens in a step."""

REPLACED = [
    (
        "for r in running if r.num_remaining_tokens and (n :=",
        "for r in [r for r in running if r.num_remaining_tokens][:128] if (n :=",
    ),
]
