"""From a Pyro model to a log posterior, scaled for minibatches."""
