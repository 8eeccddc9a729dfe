"""Processes that work on one run together: their messages, and which chains, rows of data or parts
of weights each of them has.
"""
