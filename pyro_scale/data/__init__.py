"""From what users pass (tensors, a DataLoader, a stream) to the minibatches of every chain."""
