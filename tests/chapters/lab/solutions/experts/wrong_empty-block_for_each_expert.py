# causes: empty-block
# gate: sort
class MyMoe:
    def sort(self, expert, experts):
        pairs, counts = [], []
        for number in range(experts):
            mine = (expert == number).nonzero().flatten()
            blocks = max(-(-len(mine) // self.block), 1)
            padding = mine.new_full((blocks * self.block - len(mine),), len(expert))
            pairs += [mine, padding]
            counts.append(blocks * self.block)
        return torch.cat(pairs), counts
