"""What the museum needs of each sort of part: how it is called, and what is right. `museum.calls` has the protocol."""
