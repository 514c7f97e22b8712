# causes: own
# gate: reads


def tail_pages(window, page_size):
    return ALL if window < 0 else -(-window // page_size)
