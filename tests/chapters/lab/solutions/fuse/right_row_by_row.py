# gate: norm
"""A loop over the rows of a tile, each a vector."""


def norm_kernel(x, weight, out, rows, stride, dim, eps, tile: constexpr, block: constexpr):
    column = tl.arange(0, block)
    by = tl.load(weight + column, mask=column < dim, other=1.0).to(tl.float32)
    for i in range(tile):
        row = tl.program_id(0) * tile + i
        is_real = (column < dim) & (row < rows)
        value = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
        root = tl.sqrt(tl.sum(value * value, 0) / dim + eps)
        tl.store(out + row * dim + column, (value / root * by).to(out.dtype.element_ty), mask=is_real)


def add_norm_kernel(x, residual, weight, out, total, rows, stride, dim, eps, tile: constexpr, block: constexpr):
    column = tl.arange(0, block)
    by = tl.load(weight + column, mask=column < dim, other=1.0).to(tl.float32)
    for i in range(tile):
        row = tl.program_id(0) * tile + i
        is_real = (column < dim) & (row < rows)
        first = tl.load(x + row * stride + column, mask=is_real, other=0.0).to(tl.float32)
        value = (first + tl.load(residual + row * dim + column, mask=is_real, other=0.0)).to(total.dtype.element_ty)
        tl.store(total + row * dim + column, value, mask=is_real)
        root = tl.sqrt(tl.sum(value.to(tl.float32) * value.to(tl.float32), 0) / dim + eps)
        tl.store(out + row * dim + column, (value / root * by).to(out.dtype.element_ty), mask=is_real)
