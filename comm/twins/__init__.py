"""The protocols as state machines small enough to try every interleaving of."""
