"""Simulation-based calibration (SBC): tests whether a method's posterior draws are right, on
average over data sets that are simulated from the prior.
"""
