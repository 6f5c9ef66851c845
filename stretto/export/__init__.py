"""A job as another framework's own configuration: files to run there, and what has no counterpart. No torch."""
