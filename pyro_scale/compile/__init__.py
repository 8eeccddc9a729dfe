"""Compiles functions of tensors to C++, as a loop over steps or as a C function; independent of
models, data and samplers."""
