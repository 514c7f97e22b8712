# causes: partly
# gate: reads


def tail_pages(window, page_size):
    return ALL if window < 0 else (window - 1) // page_size
