"""Makes the processes that tests start cheaper; Python imports this module at their start, from ``PYTHONPATH``.

The garbage collector searches the objects of ``import torch`` several times during the import, and once more when the
process exits: a third of the CPU time of a process that only imports torch.
"""

import atexit
import gc

gc.set_threshold(20_000, 20, 50)
atexit.register(gc.freeze)  # the operating system frees the memory of the process at once
