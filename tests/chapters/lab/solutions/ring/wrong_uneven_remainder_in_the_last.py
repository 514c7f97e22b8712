# causes: uneven
# gate: bytes
"""The last chunk gets all elements that are left over, up to n - 1 more than the others."""

REPLACED = [
    (
        "whole.view(-1).tensor_split(self.size)",
        "whole.view(-1).split([whole.numel()//self.size]*(self.size-1)+[whole.numel()-(self.size-1)"
        "*(whole.numel()//self.size)])",
    ),
]
