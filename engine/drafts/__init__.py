"""Guesses at the tokens to come, which the target verifies several at a time."""
