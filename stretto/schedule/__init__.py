"""In what order everything happens: actions, whole steps, and time lines. No torch."""
