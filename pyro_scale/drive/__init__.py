"""Runs a kernel: batches, chains, collection."""
