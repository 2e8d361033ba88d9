"""Measurements of the engine, one file a bench; each prints what it found and appends one record a case."""
