"""millpond beside its peers: the same model, cores and workloads, in alternating rounds. See README.md."""
