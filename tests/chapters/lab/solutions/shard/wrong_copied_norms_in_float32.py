# causes: copied
# gate: attention
"""The constructor makes float32 copies of the norms' weights. In a bfloat16 model, they are never loaded."""

REPLACED = [
    (
        "        self.q_norm = RMSNorm(dim, config.rms_norm_eps, ctx)\n"
        "        self.k_norm = RMSNorm(dim, config.rms_norm_eps, ctx)\n",
        "        self.q_norm = RMSNorm(dim, config.rms_norm_eps, ctx)\n"
        "        self.k_norm = RMSNorm(dim, config.rms_norm_eps, ctx)\n"
        "        self.norm = QKNorm(self.q_norm.weight.float(), self.k_norm.weight.float(), "
        "self.q_norm.eps)\n",
    ),
    (
        "        norm = QKNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)\n",
        "        norm = self.norm\n",
    ),
]
