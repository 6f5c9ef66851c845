"""What a run leaves behind so that it, or another on any mesh, can go on from there."""
