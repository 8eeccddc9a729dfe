"""The chain of a network that is sharded over processes: each has a part of the state."""
