"""What can go wrong inside a rank and is not the fault of the model."""


class PeerLost(RuntimeError):
    """A transfer failed because the other end is gone: a consequence, never the first failure."""


class BoundaryChanged(RuntimeError):
    """A message is not what both ends agreed on; the text compares it field by field."""
