"""Decode on the device alone: steps captured in graphs, launched in bursts, their tokens read from memory as they arrive."""
