"""Where the numbers of a step come from: sources, their order, batches and this rank's part of them."""
