"""The stage profiler: where the time of a step goes, by events between its stages; on a CPU by the host's clock."""
