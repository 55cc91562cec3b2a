"""Training: the step, the loop around it, and what it leaves on disk."""
