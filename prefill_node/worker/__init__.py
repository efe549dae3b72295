"""The worker processes: a forward pass that can stop at a boundary and go on from there."""
