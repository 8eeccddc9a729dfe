"""The classes that users call."""
