# causes: gaps
# gate: add


def add_norm_kernel(x, residual, weight, out, total, rows, stride, dim, eps, tile: constexpr, block: constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)[:, None]
    column = tl.arange(0, block)[None, :]
    is_real = (row < rows) & (column < dim)
    added = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
    added += tl.load(residual + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
    stored = added.to(total.dtype.element_ty)
    tl.store(total + row * dim + column, stored, mask=is_real)
    wide = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
    by = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, (wide * scale * by).to(out.dtype.element_ty), mask=is_real)
