"""Simulation-based calibration: whether a method's posteriors are right on average over the prior.

`results.py` has what a user gets, `rank_shape.py` says what ranks look like, `plots.py` draws them.
"""
