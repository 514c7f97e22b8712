# causes: again
# gate: counts
"""This backend multiplies each row alone, so the weights of an expert are read once for each of its rows."""


class MyMoe:
    def multiply(self, weights, rows, counts):
        linear = torch.nn.functional.linear
        done, begin = [], 0
        for expert, count in enumerate(counts):
            for row in rows[begin : begin + count].split(1):
                inner = weights.act(linear(row, weights.gate_up[expert]))
                done.append(linear(inner, weights.down[expert]))
            begin += count
        return torch.cat(done) if done else rows
