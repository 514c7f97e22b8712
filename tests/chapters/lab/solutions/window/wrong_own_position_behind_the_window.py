# causes: own
# gate: reads


def first_columns(positions, windows, page_size):
    first = np.maximum(positions[:, None] - windows, 0) // page_size
    return np.where(windows < 0, 0, first).astype(np.int32)
