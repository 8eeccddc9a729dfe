"""Compiles functions of tensors to C++, as a loop over steps or as a C function. Knows nothing of
models, data or samplers.
"""
