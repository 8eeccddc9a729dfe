"""The step size, and the gradient noise that it is chosen by."""
