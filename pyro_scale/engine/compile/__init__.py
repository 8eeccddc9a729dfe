"""From a function of tensors to a loop in C++: knows no model, no data and no kernel."""
