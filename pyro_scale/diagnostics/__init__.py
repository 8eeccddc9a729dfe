"""Checks of whether draws can be trusted: convergence, temperature, bias, crashes."""
