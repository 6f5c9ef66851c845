"""The verbs of the command line, one file each: its options, and what it runs. Nothing heavy is imported until a verb runs."""
