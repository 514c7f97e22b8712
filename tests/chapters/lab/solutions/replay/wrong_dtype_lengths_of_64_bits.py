# causes: dtype
# gate: buffers
"""The lengths of a step are in an array of the dtype that numpy chooses."""

REPLACED = [
    ("            host[4],\n", "            np.array(host[4].tolist()),\n"),
]
