"""One chain of a network that is sharded over processes."""
