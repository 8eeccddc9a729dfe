"""From a function of tensors to C++, a loop or a C function: knows no model, no data, no kernel."""
