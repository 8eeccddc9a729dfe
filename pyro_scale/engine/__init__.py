"""Runs a kernel's steps: compiled or eager, chain by chain, with checkpoints."""
