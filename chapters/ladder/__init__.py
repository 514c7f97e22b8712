"""The ladder of stages: one workload run with ``stage=1`` to ``stage=9``, and a picture of what each stage gains."""
