"""Runs the steps of a sampler's kernel with all chains: compiled or as Python code, in blocks of
many steps, with checkpoints.
"""
