"""The one place in the package that says its version; a test holds pyproject.toml to it."""

__version__ = "0.1.0"
