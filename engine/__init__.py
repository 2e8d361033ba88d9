"""The model and its life: config, weights, steps, KV pages, sampling, batches, and the commands."""
