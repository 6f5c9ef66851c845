"""Models: our own small decoder, and the library that turns a name into a module."""
