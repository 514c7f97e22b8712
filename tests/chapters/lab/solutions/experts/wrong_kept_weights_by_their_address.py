# causes: kept
# gate: whole
"""Copies of the weights are kept by their address, where another layer may have its weights later."""

REPLACED = [
    (
        "        linear = torch.nn.functional.linear\n",
        "        linear = torch.nn.functional.linear\n"
        "        kept = self.__dict__.setdefault('kept', {})\n"
        "        key = weights.gate_up.data_ptr()\n"
        "        if key not in kept:\n"
        "            kept[key] = weights.gate_up.clone(), weights.down.clone()\n"
        "        gu, dn = kept[key]\n",
    ),
    (
        "weights.gate_up[expert]",
        "gu[expert]",
    ),
    (
        "linear(inner, weights.down[expert])",
        "linear(inner, dn[expert])",
    ),
]
