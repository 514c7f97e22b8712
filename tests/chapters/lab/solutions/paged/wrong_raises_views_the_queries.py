# causes: raises
# gate: attend
"""The queries are viewed in another shape, which fails if they are a part of a larger tensor."""

REPLACED = [
    ('torch.einsum("qhd,khd->hqk", q.float(),', 'torch.einsum("qhd,khd->hqk", q.view(-1).view(q.shape).float(),'),
]
