"""Compiles functions of tensors to C++, as a loop or a C function; independent of models, data and
kernels."""
