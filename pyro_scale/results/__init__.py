"""The result of a run: the posterior as a value, with its summaries, diagnostics and
predictions."""
