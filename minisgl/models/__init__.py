"""Model configuration, weight loading and the shared decoder. Architectures are plugins."""
