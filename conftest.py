"""Makes the root importable for tests, so that nothing has to be installed to run them."""
