"""The router's weights are contiguous, so they can be viewed as a vector; the sort works with lists."""


class MyMoe:
    def sort(self, expert, experts):
        chosen = [[] for _ in range(experts)]
        for pair, e in enumerate(expert.tolist()):
            if 0 <= e < experts:
                chosen[e].append(pair)
        pairs, counts = [], []
        for mine in chosen:
            counts.append(-(-len(mine) // self.block) * self.block)
            pairs += [*mine, *[len(expert)] * (counts[-1] - len(mine))]
        return torch.tensor(pairs, dtype=torch.int32).to(expert.device), counts

    def scatter(self, rows, pairs, scale, out):
        real = torch.where(pairs < scale.numel())[0]
        rows, pairs = rows[real], pairs[real].long()
        total = out.new_zeros(out.shape, dtype=torch.float32)
        total.index_add_(0, pairs // scale.shape[1], rows * scale.view(-1)[pairs][:, None])
        return out.copy_(total)
