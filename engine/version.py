"""The version of this engine, as it stands in side files and records."""

VERSION = "0.1.0"
