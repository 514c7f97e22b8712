# causes: block
# gate: norm


def norm_kernel(x, weight, out, rows, stride, dim, eps, tile: constexpr, block: constexpr):
    row = tl.program_id(0) * tile + tl.arange(0, tile)[:, None]
    column = tl.arange(0, block)[None, :]
    is_real = (row < rows) & (column < dim)
    wide = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / block + eps)[:, None]
    by = tl.load(weight + column, mask=column < dim, other=0.0).to(tl.float32)
    tl.store(out + row * dim + column, (wide * scale * by).to(out.dtype.element_ty), mask=is_real)
