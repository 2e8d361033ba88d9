"""Stateless device code, its launchers, and a plain torch twin of each."""
