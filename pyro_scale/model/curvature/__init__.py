"""Second derivatives of a model: Gauss-Newton, Fisher, Hessian."""
