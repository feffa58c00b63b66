"""Scripts that run inside an engine's own environment and answer JSON lines."""
