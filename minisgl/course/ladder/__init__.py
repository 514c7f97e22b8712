"""The ladder of stages: one workload through ``stage=1`` to ``stage=7``, and the picture of what each stage gains."""
