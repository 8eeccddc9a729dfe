"""The chain of a network that is sharded over processes, each of which has a part of the state."""
