# causes: gaps
# gate: norm


def norm_kernel(x, weight, out, rows, stride, dim, eps, tile: constexpr, block: constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)
    col = tl.arange(0, block)
    mask = (row < rows)[:, None] & (col < dim)[None, :]
    v = tl.load(x + row[:, None] * stride + col[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + col, mask=col < dim, other=0.0).to(tl.float32)
    y = v / tl.sqrt(tl.sum(v * v, axis=1) / dim + eps)[:, None] * w[None, :]
    tl.store(out + row[:, None] * stride + col[None, :], y.to(out.dtype.element_ty), mask=mask)
