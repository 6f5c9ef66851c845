"""Other frameworks running the same Job: the same model, first values, batches and update, each in the framework's own terms."""
