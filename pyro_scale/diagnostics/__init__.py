"""Whether draws can be trusted: convergence, temperature, bias, crashes."""
