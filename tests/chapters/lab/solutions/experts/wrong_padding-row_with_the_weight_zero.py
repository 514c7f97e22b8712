# causes: padding-row
# gate: scatter
class MyMoe:
    def scatter(self, rows, pairs, scale, out):
        real = pairs < scale.numel()
        pairs = pairs.where(real, 0)
        weighted = rows.float() * (scale.flatten()[pairs] * real)[:, None]
        total = torch.zeros(out.shape, device=out.device).index_add_(0, pairs // scale.shape[1], weighted)
        return out.copy_(total)
