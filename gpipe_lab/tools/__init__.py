"""For maintainers: what the engine costs, and what holds on a machine."""
