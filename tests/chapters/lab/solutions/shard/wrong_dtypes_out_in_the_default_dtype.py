# causes: dtypes
# gate: attention
"""`out` has the default dtype of torch, whatever the dtype of the model."""

REPLACED = [
    ("torch.empty(q.shape, dtype=q.dtype, device=q.device)", "torch.empty(q.shape, device=q.device)"),
]
