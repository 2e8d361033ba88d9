"""All cross-rank state: symmetric heaps, collectives, put-with-signal, and the choice between them."""
