"""The working tree against a commit: the same rows of `millpond bench engine` in alternating runs."""
