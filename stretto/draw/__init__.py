"""Pictures of what was asked and what happened, from the ground's own objects and a run's own files; needs no torch."""
