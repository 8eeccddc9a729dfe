"""What can be asked after a run: the posterior as a value."""
