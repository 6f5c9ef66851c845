"""A step is run: the engine, its optimizer and precision, the loop around it, and the check that it is the step of one process."""
