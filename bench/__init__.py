"""Benchmarks that need more than the package: other engines, other environments."""
