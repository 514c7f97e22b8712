# gate: add
"""Row by row, each in two tiles: the largest power of two that fits into a row, and one for the rest of it."""


def add_norm_kernel(
    x, residual, weight, out, total, rows, stride, dim, eps, tile: constexpr, block: constexpr, rest: constexpr
):
    left, right = tl.arange(0, block), block + tl.arange(0, rest)
    inside = right < dim
    by_left = tl.load(weight + left).to(tl.float32)
    by_right = tl.load(weight + right, mask=inside, other=0.0).to(tl.float32)
    first = tl.program_id(0) * tile
    for row in range(first, tl.minimum(first + tile, rows)):
        begin, at = x + row * stride, row * dim
        a = tl.load(begin + left).to(tl.float32) + tl.load(residual + at + left).to(tl.float32)
        b = tl.load(begin + right, mask=inside, other=0.0).to(tl.float32)
        b += tl.load(residual + at + right, mask=inside, other=0.0).to(tl.float32)
        a, b = a.to(total.dtype.element_ty), b.to(total.dtype.element_ty)
        tl.store(total + at + left, a)
        tl.store(total + at + right, b, mask=inside)
        a, b = a.to(tl.float32), b.to(tl.float32)
        scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / dim + eps)
        tl.store(out + at + left, (a * scale * by_left).to(out.dtype.element_ty))
        tl.store(out + at + right, (b * scale * by_right).to(out.dtype.element_ty), mask=inside)


class Launcher:
    def _launch(self, kernel, x, *others):
        if not len(x):
            return
        grid, dim = (-(-len(x) // TILE),), x.shape[1]
        if kernel is self.norm_kernel:
            kernel[grid](x, *others, tile=TILE, block=self.next_power_of_2(dim))
        else:
            block = 1 << (dim.bit_length() - 1)
            kernel[grid](x, *others, tile=TILE, block=block, rest=self.next_power_of_2(max(dim - block, 1)))
