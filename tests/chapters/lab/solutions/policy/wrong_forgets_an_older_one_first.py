# causes: forgets
# gate: plan
"""With `fcfs`, a waiting request that arrived before a partly computed prompt gets its tokens first."""

REPLACED = [
    (
        "for r in running if r.num_remaining_tokens and (n :=",
        "for r in running\n"
        "            if r.num_remaining_tokens\n"
        "            and not (self.order == 'fcfs' and waiting and waiting[0].arrival < r.arrival)\n"
        "            and (n :=",
    ),
]
