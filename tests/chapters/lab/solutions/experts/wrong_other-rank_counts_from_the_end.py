# causes: other-rank
# gate: sort
class MyMoe:
    def sort(self, expert, experts):
        expert = torch.where(expert < 0, (expert + experts).clamp(min=0), expert)
        pairs, counts = [], []
        for number in range(experts):
            mine = (expert == number).nonzero().flatten()
            padding = mine.new_full((-len(mine) % self.block,), len(expert))
            pairs += [mine, padding]
            counts.append(len(mine) + len(padding))
        return torch.cat(pairs), counts
