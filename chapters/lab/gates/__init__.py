"""The gates of each lab: one module per lab, with the tuple ``GATES`` in the order in which the grader runs them."""
