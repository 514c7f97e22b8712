"""What is particular to each lab, one module a lab: ``GATES``, in the order in which they are tried."""
